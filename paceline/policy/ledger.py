"""The ledger behind "never slower": what speculation has won and lost, in passes of plain decoding.

A round that emits e tokens and takes the time of s plain passes has won e - s. A drafter may only be given what is in
the ledger: a little to begin with, a small share of every token emitted, and what speculation won before. So whatever
a model of costs believes, the total loss is bounded by INITIAL + ALLOWANCE per token: over 256 tokens 2.4% of the time.
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
    """Credit of the process and of each request (by slot)."""

    def __init__(self) -> None:
        self.credit = INITIAL
        self._requests: dict[int, float] = {}
        self._loans: dict[int, tuple[float, float]] = {}  # passes still owed, passes repaid per token

    def available(self, slot: int) -> float:
        """Passes that a round for this request may lose."""
        return min(self.credit, self._requests.get(slot, REQUEST_INITIAL))

    def book(self, slot: int, emitted: int, extra: float, batch: int, drafted: bool) -> None:
        """Book one row of a round: the tokens it emitted, and the passes beyond one that the round took.

        A row that drafted nothing is not charged for what the others took.
        """
        owed, rate = self._loans.get(slot, (0.0, 0.0))
        repaid = min(owed, rate * emitted)
        if owed:
            self._loans[slot] = (owed - repaid, rate)
        won = (1 + ALLOWANCE) * emitted - 1
        own = self._requests.get(slot, REQUEST_INITIAL) + won - repaid - (extra if drafted else 0.0)
        self._requests[slot] = min(MOST, own)
        self.credit = min(MOST, self.credit + (won - extra) / batch - repaid)

    def add_loan(self, slot: int, passes: float, tokens: float) -> None:
        """Charge an investment (a draft model reads the prompt) over the `tokens` it is made for."""
        owed, _ = self._loans.get(slot, (0.0, 0.0))
        self._loans[slot] = (owed + passes, (owed + passes) / max(tokens, 1.0))

    def release(self, slot: int) -> None:
        """The request ended; what it still owes is lost."""
        self._requests.pop(slot, None)
        owed, _ = self._loans.pop(slot, (0.0, 0.0))
        self.credit -= owed
