"""What passes cost by their rows, and what a draft may cost for speculation to pay: arithmetic on measured times."""

from collections.abc import Mapping
from dataclasses import dataclass

_GROWN = 1.15  # a pass is longer than one row's from here on; less is noise


@dataclass(frozen=True)
class PassCosts:
    """Seconds of a pass by its rows, and the floor: the time that reading the weights takes at `bandwidth`."""

    weight_bytes: int
    bandwidth: float
    seconds: Mapping[int, float]

    @property
    def floor(self) -> float:
        """Seconds below which no pass can be."""
        return self.weight_bytes / self.bandwidth

    @property
    def floor_fraction(self) -> float:
        """Part of a plain step that is reading weights; 1 is the machine's limit."""
        return self.floor / self.seconds[1]

    @property
    def overhead(self) -> float:
        """Seconds of a plain step beyond the floor."""
        return max(0.0, self.seconds[1] - self.floor)

    @property
    def flat_rows(self) -> int:
        """The most measured rows up to which a pass takes about as long as one row's."""
        flat = 1
        for rows in sorted(self.seconds):
            if self.seconds[rows] > _GROWN * self.seconds[1]:
                break
            flat = rows
        return flat

    def at(self, rows: int) -> float:
        """Seconds of a pass over `rows`, between two measured counts by a straight line, beyond the last along it."""
        known = sorted(self.seconds)
        if rows in self.seconds or len(known) < 2:
            return self.seconds.get(rows, self.seconds[known[0]])
        above = next((i for i, count in enumerate(known) if count > rows), len(known) - 1)
        low, high = known[max(above, 1) - 1], known[max(above, 1)]
        slope = (self.seconds[high] - self.seconds[low]) / (high - low)
        return self.seconds[low] + slope * (rows - low)

    def dearest_draft(self, num_tokens: int, acceptance: float) -> float:
        """Seconds a drafted token may cost at most for a draft of `num_tokens` to pay; negative: not even a free one.

        A round then yields E tokens (`tokens_per_round`) and takes num_tokens * cost + T(num_tokens + 1), where plain
        decoding takes E * T(1).
        """
        gain = tokens_per_round(num_tokens, acceptance) * self.seconds[1] - self.at(num_tokens + 1)
        return gain / num_tokens

    def speedup(self, num_tokens: int, acceptance: float, draft_seconds: float = 0.0) -> float:
        """Over plain decoding, of drafts that cost `draft_seconds` a token."""
        spent = num_tokens * draft_seconds + self.at(num_tokens + 1)
        return tokens_per_round(num_tokens, acceptance) * self.seconds[1] / spent

    def least_acceptance(self, num_tokens: int) -> float | None:
        """Acceptance from which a draft that costs nothing pays, to 0.001; None if even a perfect one does not."""
        if self.dearest_draft(num_tokens, 1.0) < 0:
            return None
        low, high = 0.0, 1.0
        while high - low > 1e-3:
            middle = (low + high) / 2
            low, high = (low, middle) if self.dearest_draft(num_tokens, middle) >= 0 else (middle, high)
        return high


def tokens_per_round(num_tokens: int, acceptance: float) -> float:
    """Expected tokens of a round whose drafted tokens are each accepted with this chance if those before are."""
    return sum(acceptance**i for i in range(num_tokens + 1))
