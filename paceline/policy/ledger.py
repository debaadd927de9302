"""The ledger behind "never slower": what speculation has won and lost, in passes of plain decoding.

A round that emits e tokens and takes the time of s plain passes has won e - s. A drafter may only be given what is
in the ledger, so the total loss is bounded by INITIAL + ALLOWANCE per token: over 256 tokens 2.4% of the time. Each
drafter pays for itself, and one that is tried in the place of a better one also for what that one was expected to win.
"""

from typing import final

INITIAL = 4.0  # passes
ALLOWANCE = 0.008  # passes per emitted token
REQUEST_INITIAL = 4.0
"""A single request may lose this much of what others won."""
MOST = 24.0
"""The highest credit in passes, so that old gains do not allow long losses."""


@final
class Ledger:
    """Credit of the process, of each drafter (by source) and of each request (by slot)."""

    def __init__(self) -> None:
        self.credit = INITIAL
        self._sources: dict[str, float] = {}
        self._requests: dict[int, float] = {}
        self._loans: dict[tuple[int, str], tuple[float, float]] = {}  # passes still owed, passes repaid per token

    def available(self, slot: int, source: str) -> float:
        own = self._sources.setdefault(source, INITIAL)
        return min(self.credit, own, self._requests.get(slot, REQUEST_INITIAL))

    def book(self, slot: int, emitted: int, extra: float, batch: int, source: str | None, missed: float = 0.0) -> None:
        """Book one row of a round: the tokens it emitted, and the passes beyond one that the round took.

        source: the drafter of the row. A row without one is not charged for what the others took.
        missed: tokens that another drafter was expected to win in these passes, charged to this drafter alone, as far
            as it has credit: they are no more than a guess.
        """
        won, repaid = (1 + ALLOWANCE) * emitted - 1, self._repay(slot, emitted)
        own = self._requests.get(slot, REQUEST_INITIAL) + won - repaid - (0.0 if source is None else extra)
        self._requests[slot] = min(MOST, own)
        self.credit = min(MOST, self.credit + (won - extra) / batch - repaid)
        for other, credit in self._sources.items():
            share = won - extra - min(missed, max(0.0, credit)) if other == source else ALLOWANCE * emitted
            self._sources[other] = min(MOST, credit + share / batch)

    def _repay(self, slot: int, emitted: int) -> float:
        """Passes that this request pays back for `emitted` tokens, charged to the drafters that borrowed."""
        total = 0.0
        for (borrower, source), (owed, rate) in self._loans.items():
            if borrower == slot and owed:
                repaid = min(owed, rate * emitted)
                self._loans[borrower, source] = owed - repaid, rate
                self._sources[source] = self._sources.get(source, INITIAL) - repaid
                total += repaid
        return total

    def add_loan(self, slot: int, source: str, passes: float, tokens: float) -> None:
        """Charge an investment (a draft model reads the prompt) over the `tokens` it is made for."""
        owed, _ = self._loans.get((slot, source), (0.0, 0.0))
        self._loans[slot, source] = (owed + passes, (owed + passes) / max(tokens, 1.0))

    def release(self, slot: int) -> None:
        """The request ended; what it still owes is lost."""
        self._requests.pop(slot, None)
        for key in [key for key in self._loans if key[0] == slot]:
            owed, _ = self._loans.pop(key)
            self.credit -= owed
            self._sources[key[1]] = self._sources.get(key[1], INITIAL) - owed
