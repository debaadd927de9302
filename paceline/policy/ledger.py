"""The ledger behind "never slower": what speculation has won and lost, in passes of plain decoding.

A round that emits e tokens and takes the time of s plain passes has won e - s. A round may only cost what is in the
ledger even if all it drafts is rejected, so the loss is bounded by INITIAL + ALLOWANCE per token: over 256 tokens 2.4%
of the time.
"""

from typing import final

from .constants import ALLOWANCE, HALF_LIFE, INITIAL, MOST, REQUEST_HALF_LIFE, WEIGHT


@final
class Ledger:
    """The credit of the process and of each request (by slot), and how fast the last rounds were.

    A single request may lose little of what others won.
    """

    def __init__(self) -> None:
        self.credit = INITIAL
        self._requests: dict[int, float] = {}
        self._speeds: dict[int, tuple[float, float]] = {
            -1: (0.0, 0.0)
        }  # by slot, at -1 of all: tokens, seconds, fading

    def available(self, slot: int) -> float:
        """The passes that a draft for this request may lose."""
        return min(self.credit, self._requests.get(slot, INITIAL))

    def speed(self, slot: int, plain: float) -> float:
        """The tokens per second of this request's last rounds, at least those of plain rounds of `plain` seconds.

        With it, time has a price: what it would have brought otherwise.
        """
        (tokens, seconds), (own, own_seconds) = self._speeds[-1], self._speeds.get(slot, (0.0, 0.0))
        if not seconds:
            return 1 / plain
        prior = WEIGHT * plain  # seconds that the speed of all counts for
        return max(1 / plain, (own + prior * tokens / seconds) / (own_seconds + prior))

    def book(self, slot: int, emitted: int, seconds: float, plain: float, batch: int, drafted: bool) -> None:
        """Book one row of a round: the tokens it emitted, and the seconds that the round took.

        plain: the seconds of a plain round. drafted: a row without a draft is not charged for what the others took.
        """
        won, extra = (1 + ALLOWANCE) * emitted - 1, max(0.0, seconds / plain - 1)
        own = self._requests.get(slot, INITIAL)
        self._requests[slot] = min(MOST, own + won - (extra if drafted else 0.0))
        self.credit = min(MOST, self.credit + (won - extra) / batch)
        for key, half_life in ((-1, HALF_LIFE), (slot, REQUEST_HALF_LIFE)):
            fade, (tokens, total) = 0.5 ** (1 / half_life), self._speeds.get(key, (0.0, 0.0))
            self._speeds[key] = tokens * fade + emitted, total * fade + seconds

    def release(self, slot: int) -> None:
        self._requests.pop(slot, None)
        self._speeds.pop(slot, None)
