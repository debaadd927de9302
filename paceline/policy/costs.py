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

    def guess(self, value: float) -> None:
        """Another guess, before anything was seen."""
        self.value, self._first = value, [value]

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
    """R(n): seconds of a round of `batch` rows that drafts up to n tokens a row, drafting itself not included.

    R(n) = T(batch * (1 + n)) * drift * shape(n). The drift is what the machine does to all rounds alike; the shape is
    what the loop around the pass adds to long drafts, with shape(0) = 1, and for trees what branching adds to the pass.
    A residual goes to the shape while that is new and to both later on; plain rounds settle the rest.
    """

    def __init__(self, curve: PassCurve, batch: int, drift: float = 1.0):
        self.curve, self.batch = curve, batch
        self.drift = Level(drift)
        self.num_plain = 0
        self._shapes = {tree: [Level(1.0) for _ in range(8)] for tree in (False, True)}
        self._surprised = set[int]()  # sizes of trees of which one took far longer than it should have
        self._spared, self._doubts = 0.0, False  # seconds of the last surprise that nobody paid for; see `believed`

    @staticmethod
    def _size(nodes: int) -> int:
        return min(nodes.bit_length(), 7)

    def _shape(self, nodes: int, tree: bool) -> Level:
        return self._shapes[tree][self._size(nodes)]

    def seconds(self, nodes: int, tree: bool = False) -> float:
        """R(nodes), never below R(0)."""
        plain = self.curve.seconds(self.batch) * self.drift.value
        if nodes == 0:
            return plain
        shape = self._shape(nodes, tree).value
        return max(plain, self.curve.seconds(self.batch * (1 + nodes)) * self.drift.value * shape)

    def knows_tree(self, nodes: int) -> bool:
        """Whether a few trees of about this size were seen."""
        return self._shape(nodes, True).count >= 3

    @property
    def tries_trees(self) -> bool:
        """Whether the next tree had better be small: the first, and the second if the first took far too long.

        Not after every surprise: where the smallest tree does not pay, larger ones would seldom be tried again.
        """
        return sum(shape.count for shape in self._shapes[True]) < 1 + self._doubts

    def believed(self, nodes: int, seconds: float, most: float) -> float:
        """How much of what a tree took to book, `most` being what one hiccup of the clock may cost.

        Of a size that is known, no more. Of a new size the first surprise is taken for a hiccup; a second one of that
        size, or of the very next tree, shows that trees are dear: it is booked in full, with as much of the first as it
        confirms. Else what is measured too low would be lost again and again, or one hiccup would end all drafting.
        """
        doubted, surprises = self._doubts, seconds > most
        if not surprises or self.knows_tree(nodes):
            self._doubts = doubted and surprises
            return min(seconds, most)
        self._doubts = True
        size = self._size(nodes)
        if not (doubted or size in self._surprised):
            self._surprised.add(size)
            self._spared = seconds - most
            return most
        spared, self._spared = self._spared, 0.0
        return seconds + min(spared, seconds - most)

    def step(self, nodes: int) -> float:
        """What one more token of a chain adds to R(nodes)."""
        rows, shape = self.batch * (1 + nodes), self._shape(nodes + 1, False).value
        return (self.curve.seconds(rows + self.batch) - self.curve.seconds(rows)) * self.drift.value * shape

    def observe(self, nodes: int, seconds: float, tree: bool = False) -> None:
        """One round took this long."""
        ratio = seconds / self.seconds(nodes, tree)
        if nodes == 0:
            self.num_plain += 1
            self.drift.add(ratio * self.drift.value)
            return
        shape = self._shape(nodes, tree)
        below = seconds / self.seconds(0)
        if below < IMPOSSIBLE:  # then it was R(0) that was taken too high
            self.drift.add(below * self.drift.value)
        elif shape.count >= 6:
            self.drift.add(ratio * self.drift.value, gain=0.06)
        shape.add(ratio * shape.value, gain=0.15 if shape.count < 6 else 0.08)
        if tree:  # larger trees were not seen yet, and branch no less
            for larger in self._shapes[True][self._size(nodes) + 1 :]:
                if not larger.count:
                    larger.guess(shape.value)


@final
class DraftSeconds:
    """What a drafter takes: seconds per drafted token, and per token it has to read first."""

    def __init__(self, token: Level, uncached_tokens: Level):
        self.token, self.uncached_tokens = token, uncached_tokens

    def of(self, depth: int, uncached_tokens: int) -> float:
        """Seconds of one draft."""
        return depth * self.token.value + uncached_tokens * self.uncached_tokens.value
