"""What things take, on machines where one step in twenty takes ten times as long as it should.

Nothing here believes a single measurement: levels are medians at first and later move by bounded steps.
"""

from bisect import insort
from collections.abc import Mapping
from typing import final

STEP = 1.5
"""An observation further off than this factor counts as if it were off by this factor."""

IMPOSSIBLE = 0.85
"""A round with drafts cannot be shorter than a plain one by more than the clock's noise."""


@final
class Level:
    """A positive number that follows its observations and shrugs off outliers."""

    __slots__ = ("_first", "count", "value")

    def __init__(self, value: float):
        self.value, self.count = value, 0
        self._first = [value]  # a guess is one vote

    @property
    def cautious(self) -> float:
        """Where few were seen and they disagree, halfway (in ratio) to the highest."""
        return self.value if self.count > 3 else (self.value * max(self._first)) ** 0.5

    def add(self, seen: float, gain: float = 0.15) -> None:
        """Take one observation: the lower median of the first few, then value *= clipped ratio ** gain."""
        seen = max(seen, 1e-9)
        self.count += 1
        if self.count <= 4:
            insort(self._first, seen)
            self.value = self._first[(len(self._first) - 1) // 2]
        else:
            self.value *= min(max(seen / self.value, 1 / STEP), STEP) ** gain


@final
class PassCurve:
    """T(n): seconds of a target pass over n rows, straight between the measured points and non-decreasing."""

    def __init__(self, points: Mapping[int, float]):
        rows = sorted(points)
        seconds, longest = list[float](), 0.0
        for n in rows:
            longest = max(longest, points[n], 1e-9)
            seconds.append(longest)
        self.points = dict(zip(rows, seconds, strict=True))
        steps = list(zip(rows, rows[1:], seconds, seconds[1:], strict=False))
        self._slope = (seconds[-1] - seconds[0]) / max(1, rows[-1] - rows[0])  # beyond the last point
        self._table = [seconds[0]] * (rows[0] + 1)
        for low, high, at_low, at_high in steps:
            self._table += [at_low + (at_high - at_low) * (n - low) / (high - low) for n in range(low + 1, high + 1)]

    def seconds(self, rows: int) -> float:
        """T(rows)."""
        beyond = rows - len(self._table) + 1
        return self._table[rows] if beyond <= 0 else self._table[-1] + beyond * self._slope

    @property
    def seconds_per_row(self) -> float:
        """What one more row adds on average."""
        return self._slope


@final
class TurnSeconds:
    """R(d): seconds of a round of `batch` rows that drafts up to d tokens a row, drafting itself not included.

    R(d) = T(batch * (1 + d)) * drift * shape(d). The drift is what the machine does to all rounds alike; the shape is
    what the loop around the pass adds to long drafts, with shape(0) = 1. A residual goes to the shape while that is
    new and to both later on; plain rounds settle the rest.
    """

    def __init__(self, curve: PassCurve, batch: int, drift: float = 1.0):
        self._curve, self.batch = curve, batch
        self.drift = Level(drift)
        self.num_plain = 0
        self._shape = [Level(1.0) for _ in range(8)]

    def seconds(self, depth: int) -> float:
        """R(depth), never below R(0)."""
        plain = self._curve.seconds(self.batch) * self.drift.value
        if depth == 0:
            return plain
        shape = self._shape[min(depth.bit_length(), 7)].value
        return max(plain, self._curve.seconds(self.batch * (1 + depth)) * self.drift.value * shape)

    def step(self, depth: int) -> float:
        """What one more token of depth adds to R(depth)."""
        rows, shape = self.batch * (1 + depth), self._shape[min((depth + 1).bit_length(), 7)].value
        return (self._curve.seconds(rows + self.batch) - self._curve.seconds(rows)) * self.drift.value * shape

    def observe(self, depth: int, seconds: float) -> None:
        """One round took this long."""
        ratio = seconds / self.seconds(depth)
        if depth == 0:
            self.num_plain += 1
            self.drift.add(ratio * self.drift.value)
            return
        shape = self._shape[min(depth.bit_length(), 7)]
        below = seconds / self.seconds(0)
        if below < IMPOSSIBLE:  # then it was R(0) that was taken too high
            self.drift.add(below * self.drift.value)
        elif shape.count >= 6:
            self.drift.add(ratio * self.drift.value, gain=0.06)
        shape.add(ratio * shape.value, gain=0.15 if shape.count < 6 else 0.08)


@final
class DraftSeconds:
    """What a drafter takes: seconds per drafted token, and per token it has to read first."""

    def __init__(self, token: Level, pending: Level):
        self.token, self.pending = token, pending

    def of(self, depth: int, pending: int) -> float:
        """Seconds of one draft."""
        return depth * self.token.value + pending * self.pending.value
