"""What passes, rounds and drafts take, estimated on machines where one step in twenty takes ten times too long.

No single measurement is trusted: estimates start as medians and later move by bounded steps.
"""

import math
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

from .constants import CLIP, FEW_TOKENS, FOLLOW, LONG_TEXT, MAX_PASS_RATIO, MEASURE_SECONDS
from .experts import Experts
from .profile import Profile


@final
class RobustMean:
    """A positive number that follows what is seen of it and is robust to outliers."""

    __slots__ = ("_first", "count", "value")

    def __init__(self, value: float, votes: int = 1):
        """votes: observations that the first value counts for."""
        self.value, self.count = value, 0
        self._first = [value] * votes

    def add(self, seen: float) -> None:
        """Take the lower median of the first four, and later a bounded step towards what is seen."""
        seen, self.count = max(seen, 1e-9), self.count + 1
        if self.count <= 4:
            insort(self._first, seen)
            self.value = self._first[(len(self._first) - 1) // 2]
        else:
            self.value *= min(max(seen / self.value, 1 / CLIP), CLIP) ** FOLLOW


@final
class PassCurve:
    """T(n): the seconds of a target pass over n rows, linear between the measured points.

    A larger pass is never faster, and clocks err upwards: a point that is above a later one is lowered to it.

    experts: those that each of the measured passes read, see `experts.Experts`.
    """

    def __init__(self, points: Mapping[int, float], experts: Mapping[int, int] | None = None):
        rows = sorted(points)
        seconds = [max(least, 1e-9) for least in accumulate((points[n] for n in reversed(rows)), min)][::-1]
        self.points = dict(zip(rows, seconds, strict=True))
        self._seconds, self._experts = _Line(self.points), _Line(experts or {1: 0.0})
        self.seconds_per_row = self._seconds.per_row

    def seconds(self, rows: int) -> float:
        return self._seconds.at(rows)

    def experts(self, rows: int) -> float:
        """x(n)."""
        return self._experts.at(rows)


@final
class _Line:
    """A quantity by the number of rows, linear between points. per_row: on average, and beyond the last point."""

    def __init__(self, points: Mapping[int, float]):
        rows = sorted(points)
        values = [points[n] for n in rows]
        self.per_row = (values[-1] - values[0]) / max(1, rows[-1] - rows[0])
        self._table = [values[0]] * (rows[0] + 1)
        for low, high, at_low, at_high in zip(rows, rows[1:], values, values[1:], strict=False):
            self._table += [at_low + (at_high - at_low) * (n - low) / (high - low) for n in range(low + 1, high + 1)]

    def at(self, rows: int) -> float:
        beyond = rows - len(self._table) + 1
        return self._table[rows] if beyond <= 0 else self._table[-1] + beyond * self.per_row


@final
class RoundSeconds:
    """R(n): the seconds of a round of `batch` rows that verifies n nodes a row, without the drafting.

    n is the mean over the rows or, where passes pad trees, the most of any of them.

    R(n) = T(batch (1 + n)) drift overhead(n). The drift is what the machine does to all rounds, and is learnt from
    plain ones; the overhead is what the loop around the pass adds to drafts of any size, and overhead(0) = 1.

    experts: of a mixture. T then depends on the experts that are read, and R on the novelty of the nodes.
    """

    def __init__(
        self,
        curve: PassCurve,
        batch: int,
        drift: float = 1.0,
        pads_trees: bool = True,
        experts: Experts | None = None,
    ):
        self.batch, self.pads_trees, self.experts = batch, pads_trees, experts
        self.drift, self.overhead, self.num_plain = RobustMean(drift), RobustMean(1.0), 0
        self.use(curve)

    def use(self, curve: PassCurve) -> None:
        self.curve, self._known = curve, dict[tuple[float, float], float]()

    def of(self, nodes: float, novelty: float = 1.0) -> float:
        """R(nodes), never below R(0)."""
        found = self._known.get((nodes, novelty))
        if found is None:
            read = self.experts.expected(self.batch, nodes, novelty) if self.experts else 0.0
            found = self._known[nodes, novelty] = self.of_pass(nodes, read)
        return found

    def of_pass(self, nodes: float, read: float) -> float:
        """R(nodes) where the pass reads so many experts."""
        found = self._pass_seconds(self._rows(nodes), read) * self.drift.value
        return max(found * self.overhead.value, self.of(0)) if nodes else found

    def _rows(self, nodes: float) -> int:
        return math.ceil(self.batch * (1 + nodes) - 1e-6)

    def _pass_seconds(self, rows: int, read: float) -> float:
        seconds = self.curve.seconds(rows)
        if self.experts:
            seconds += self.experts.seconds * (read - self.curve.experts(rows))
        return max(seconds, self.curve.seconds(1))

    def price(self, novelty: float = 1.0) -> float:
        """The tokens that one more node of a row must bring at least: what the batch emits in the time of its row.

        0 where passes pad trees, since rows of other trees may come at no cost.
        """
        if self.pads_trees or self.batch == 1:
            return 0.0
        plain, sizes = self.of(0), (1, 2, 4, 8, 16, 32)
        return self.batch / plain * min((self.of(rows / self.batch, novelty) - plain) / rows for rows in sizes)

    def observe(self, nodes: float, seconds: float, read: int = 0) -> None:
        """read: the experts of the pass, 0 if unknown."""
        expected = self.of_pass(nodes, read) if read else self.of(nodes)
        ratio = seconds / expected
        if self.experts and read:
            pace = self.drift.value * (self.overhead.value if nodes else 1.0)
            self.experts.learn_seconds(self._rows(nodes), read, min(seconds, CLIP * expected) / pace)
        if nodes:
            self.overhead.add(ratio * self.overhead.value)
        else:
            self.num_plain += 1
            self.drift.add(ratio * self.drift.value)
        self._known.clear()


@final
@dataclass(frozen=True)
class DraftSeconds:
    """What a drafter takes: seconds for each drafting step, and for each token it has to read first.

    A step is a drafted token, of a tree a level, and a whole draft where it is made at once.
    """

    step: RobustMean
    uncached_token: RobustMean

    def of(self, steps: int, uncached_tokens: int) -> float:
        return steps * self.step.value + uncached_tokens * self.uncached_token.value


@final
class Costs:
    """T(n), R(n) by batch size, and what each drafter takes. They start from a profile and learn from rounds."""

    def __init__(self, given: Profile, pads_trees: bool, experts: Experts | None = None):
        self._pads_trees, self._timed, self.experts = pads_trees, dict(given.draft_seconds), experts
        is_known = given.pass_seconds and (experts is None or experts.read)
        self.curve = PassCurve(given.pass_seconds, given.pass_experts) if is_known else None
        self.drafts: dict[str, DraftSeconds] = {}
        self._rounds: dict[tuple[int, int], RoundSeconds] = {}  # by rows, and doublings of the length of texts
        self._most_rows = 0  # of passes, as far as they were measured or not worth it

    def measure(
        self, pass_seconds: Callable[[int], float], sizes: Sequence[int], room: int, clock: Callable[[], float]
    ) -> None:
        """T(n) at 1 and at these sizes, in this order, as far as it is not known so far up and drafts could pay.

        room: the most rows that fit.
        """
        most = min(max(sizes), room)
        if self.curve is not None and max(*self.curve.points, self._most_rows) >= most:
            return
        begin, self._most_rows, is_first = clock(), most, self.curve is None

        def took(rows: int) -> float:
            seconds = pass_seconds(rows)
            if self.experts:
                self.experts.read[rows] = self.experts.target.read()
            return seconds

        points = dict(self.curve.points) if self.curve else {1: took(1)}
        for n in (min(size, room) for size in sizes):
            slowest = max((seconds for rows, seconds in points.items() if rows <= n), default=0.0)
            too_slow = n > max(points) and slowest > MAX_PASS_RATIO * min(points.values())
            in_time = len(points) < 2 or clock() - begin < MEASURE_SECONDS
            if n not in points and not too_slow and in_time:
                points[n] = took(n)
        self.curve = PassCurve(points, self.experts.read if self.experts else None)
        if self.experts and is_first:
            self.experts.begin(self.curve.points)
        for seconds in self._rounds.values():
            seconds.use(self.curve)

    def learn_seconds(self, timed: Mapping[str, tuple[float, float]]) -> None:
        """What drafters measured of themselves; a profile and what was seen since say more."""
        self._timed = {**timed, **self._timed}

    def round_seconds(self, batch: int, length: int = 0) -> RoundSeconds:
        """R(n) for this many rows, over texts of about this length; a new kind starts with the drift of the nearest.

        In long texts attention takes most of a pass, and takes it for each row.
        """
        kind = batch, (length // LONG_TEXT).bit_length()
        if kind not in self._rounds:
            assert self.curve is not None, "measure() comes first"
            nearest = min(self._rounds, key=lambda other: (abs(other[1] - kind[1]), other[0] != batch), default=None)
            drift = 1.0 if nearest is None else self._rounds[nearest].drift.value
            self._rounds[kind] = RoundSeconds(self.curve, batch, drift, self._pads_trees, self.experts)
        return self._rounds[kind]

    def novelty(self, source: str) -> float:
        """That of a drafter's nodes, see `Experts`."""
        return self.experts.novelty(source) if self.experts else 1.0

    def draft(self, source: str) -> DraftSeconds:
        """What this drafter takes; one that was never timed gets a guess that invites a try."""
        if source not in self.drafts:
            assert self.curve is not None, "measure() comes first"
            step = RobustMean(self.curve.seconds(1) / 4)
            uncached_token = RobustMean(max(self.curve.seconds_per_row / 5, self.curve.seconds(1) / 200))
            if source in self._timed:
                step, uncached_token = (RobustMean(max(seconds, 1e-9), votes=2) for seconds in self._timed[source])
                uncached_token.count = 1  # not a guess
            self.drafts[source] = DraftSeconds(step, uncached_token)
        return self.drafts[source]

    def learn_drafting(
        self, steps: Mapping[str, int], uncached_tokens: Mapping[str, int], batch: int, seconds: float
    ) -> None:
        """A draft of so many steps by each drafter took `seconds`, split as was expected.

        What reading takes is learnt where it is, or is held to be, most of the draft: behind a deep one, errors about
        steps would pass for it. The first time is better than a guess in any case.
        """
        expected = {source: self.draft(source).of(steps[source], uncached_tokens[source]) for source in steps}
        share = seconds / max(sum(expected.values()), 1e-9)
        for source in steps:
            cost, uncached = self.drafts[source], uncached_tokens[source]
            drafting = steps[source] * cost.step.value
            if uncached > FEW_TOKENS * batch:
                believed, reading = uncached * cost.uncached_token.value, expected[source] * share - drafting
                if max(believed, reading) >= drafting or not cost.uncached_token.count:
                    cost.uncached_token.add(max(reading, believed / 8) / uncached)
            elif steps[source]:
                cost.step.add(cost.step.value * share)
