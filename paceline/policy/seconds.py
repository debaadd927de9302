"""How long passes, rounds and drafts take, estimated on machines where one step in twenty takes ten times too long.

No single measurement is trusted: estimates start as medians and later move by bounded steps.
"""

import math
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import final

from .acceptance import HALF_LIFE, REQUEST_HALF_LIFE, WEIGHT

STEP = 1.5
"""An observation that is further off than this factor counts as if it were off by this factor."""

IMPOSSIBLE = 0.85
"""A round with drafts cannot take less than this share of a plain one, the clock's noise included."""


@final
class RobustMean:
    """A positive number that follows its observations and is robust to outliers."""

    __slots__ = ("_first", "count", "value")

    def __init__(self, value: float, votes: int = 1):
        """votes: observations that the first value counts for."""
        self.value, self.count = value, 0
        self._first = [value] * votes

    def guess(self, value: float) -> None:
        self.value, self._first = value, [value]

    def add(self, seen: float, gain: float = 0.15) -> None:
        """Add an observation: the value is the lower median of the first four, then value *= clipped ratio ** gain."""
        seen = max(seen, 1e-9)
        self.count += 1
        if self.count <= 4:
            insort(self._first, seen)
            self.value = self._first[(len(self._first) - 1) // 2]
        else:
            self.value *= min(max(seen / self.value, 1 / STEP), STEP) ** gain


@final
class Speed:
    """Tokens per second of the last rounds, of all requests together and of each one (by slot).

    With it, time has a price: what it would have brought otherwise.
    """

    def __init__(self) -> None:
        self._all = 0.0, 0.0  # fading sums of tokens and of seconds
        self._requests: dict[int, tuple[float, float]] = {}

    def of(self, slot: int, plain: float) -> float:
        """Of this request, but at least that of plain decoding, of which a round takes `plain` seconds."""
        (tokens, seconds), (own_tokens, own_seconds) = self._all, self._requests.get(slot, (0.0, 0.0))
        if not seconds:
            return 1 / plain
        prior = WEIGHT * plain  # seconds that the speed of all counts for
        return max(1 / plain, (own_tokens + prior * tokens / seconds) / (own_seconds + prior))

    def add(self, slot: int, tokens: int, seconds: float) -> None:
        """Count one row of a round."""
        self._all = _faded(self._all, HALF_LIFE, tokens, seconds)
        self._requests[slot] = _faded(self._requests.get(slot, (0.0, 0.0)), REQUEST_HALF_LIFE, tokens, seconds)

    def release(self, slot: int) -> None:
        self._requests.pop(slot, None)


def _faded(sums: tuple[float, float], half_life: float, tokens: int, seconds: float) -> tuple[float, float]:
    fade = 0.5 ** (1 / half_life)
    return sums[0] * fade + tokens, sums[1] * fade + seconds


@final
class PassCurve:
    """T(n): the seconds of a target pass over n rows, linear between the measured points.

    A larger pass is never faster, and clocks err upwards: a point that is above a later one is lowered to it.
    """

    def __init__(self, points: Mapping[int, float]):
        rows = sorted(points)
        seconds = [max(least, 1e-9) for least in accumulate((points[n] for n in reversed(rows)), min)][::-1]
        self.points = dict(zip(rows, seconds, strict=True))
        steps = list(zip(rows, rows[1:], seconds, seconds[1:], strict=False))
        # What one more row adds on average, and beyond the last point.
        self.seconds_per_row = (seconds[-1] - seconds[0]) / max(1, rows[-1] - rows[0])
        self._table = [seconds[0]] * (rows[0] + 1)
        for low, high, at_low, at_high in steps:
            self._table += [at_low + (at_high - at_low) * (n - low) / (high - low) for n in range(low + 1, high + 1)]

    def seconds(self, rows: int) -> float:
        beyond = rows - len(self._table) + 1
        return self._table[rows] if beyond <= 0 else self._table[-1] + beyond * self.seconds_per_row


@final
class RoundSeconds:
    """R(n): the seconds of a round of `batch` rows that verifies n tokens a row, without the drafting.

    n is the mean over the rows or, where passes pad trees, the most of any of them.

    R(n) = T(batch * (1 + n)) * drift * overhead(n). The drift is what the machine does to all rounds alike. The
    overhead is what the loop around the pass adds to drafts of about this size; overhead(0) = 1. A deviation is booked
    as overhead while the size is new, and on both later; plain rounds tell the two apart.
    """

    NEW_SIZE = 3
    """A size is new until this many rounds had it."""

    def __init__(self, curve: PassCurve, batch: int, drift: float = 1.0, pads_trees: bool = True):
        self.curve, self.batch, self.pads_trees = curve, batch, pads_trees
        self.drift = RobustMean(drift)
        self.num_plain = 0
        self._known = dict[float, float]()  # R(n), until something is observed
        self._overheads = [RobustMean(1.0) for _ in range(8)]  # by the bit length of n
        self._was_slow = False  # the last round with drafts took far longer than expected

    @staticmethod
    def _size(nodes: float) -> int:
        return min(math.ceil(nodes).bit_length(), 7)

    def nodes(self, each: float, drafting: int) -> float:
        """The n of a round in which `drafting` rows verify `each` tokens, and the others none."""
        return each if self.pads_trees else each * drafting / self.batch

    @property
    def price(self) -> float:
        """The tokens that one more node must bring at least: those that plain rounds emit in the time of its row.

        0 where passes pad trees, since rows of other trees may come at no cost.
        """
        if self.pads_trees or self.batch == 1:
            return 0.0
        plain = self.of(0)
        slope = min((self.of(rows / self.batch) - plain) / rows for rows in (1, 2, 4, 8, 16, 32))
        return slope * self.batch / plain

    def of(self, nodes: float) -> float:
        """R(nodes), never below R(0)."""
        found = self._known.get(nodes)
        if found is None:
            found = self.curve.seconds(math.ceil(self.batch * (1 + nodes) - 1e-6)) * self.drift.value
            if nodes:
                found = max(found * self._overheads[self._size(nodes)].value, self.of(0))
            self._known[nodes] = found
        return found

    def use(self, curve: PassCurve) -> None:
        self.curve = curve
        self._known.clear()

    def is_new(self, nodes: float) -> bool:
        """Whether few drafts of about this size were verified so far."""
        return self._overheads[self._size(nodes)].count < self.NEW_SIZE

    @property
    def needs_small_tree(self) -> bool:
        """Whether the next tree should have one node: the first tree, and the second if the first was too slow."""
        return sum(overhead.count for overhead in self._overheads) < 1 + self._was_slow

    def is_slow_again(self, nodes: float, seconds: float) -> bool:
        """Whether this round took twice its time or more although its size is new, and so did the last one.

        A single slow round is taken for an outlier of the clock; the second in a row shows that such drafts cost more
        than was measured.
        """
        was_slow, self._was_slow = self._was_slow, self.is_new(nodes) and seconds > 2 * self.of(nodes)
        return was_slow and self._was_slow

    def observe(self, nodes: float, seconds: float) -> None:
        ratio, to_plain = seconds / self.of(nodes), seconds / self.of(0)
        self._known.clear()
        if nodes == 0:
            self.num_plain += 1
            self.drift.add(ratio * self.drift.value)
            return
        overhead = self._overheads[self._size(nodes)]
        if to_plain < IMPOSSIBLE:  # then R(0) was estimated too high
            self.drift.add(to_plain * self.drift.value)
        elif overhead.count >= 6:
            self.drift.add(ratio * self.drift.value, gain=0.06)
        overhead.add(ratio * overhead.value, gain=0.15 if overhead.count < 6 else 0.08)
        for larger in self._overheads[self._size(nodes) + 1 :]:  # larger drafts have at least as much, until seen
            if not larger.count:
                larger.guess(overhead.value)


@final
@dataclass(frozen=True)
class DraftSeconds:
    """What a drafter takes: seconds per drafting step, and per token it has to read first.

    A step is a drafted token, of a tree a level, and a whole draft where it is made at once.
    """

    token: RobustMean
    uncached_tokens: RobustMean

    def of(self, depth: int, uncached_tokens: int) -> float:
        return depth * self.token.value + uncached_tokens * self.uncached_tokens.value
