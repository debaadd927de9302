"""All that a cost model knows: what rounds and drafts take, how often drafts stand, and what confidence is worth."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import final

from ..core.interfaces import DraftOptions
from ..core.request import Sequence
from ..core.round import Round
from .acceptance import HALF_LIFE, NODES_PER_LEVEL, Acceptance, Counts, DraftSize
from .choice import Option, gains_of
from .confidence import Confidence
from .lengths import Lengths
from .profile import Profile
from .seconds import DraftSeconds, PassCurve, RobustMean, RoundSeconds, Speed

MEASURE_SECONDS = 1.2
"""No new point of the pass curve is begun after this long."""
FEW_TOKENS = 8
"""So many uncached tokens are read in the first drafting pass at no cost."""
TREE_ROWS = (16, 32, 64, 8, 17, 9, 33, 4, 5)
"""Where T(n) is measured for trees: each way of padding shows between two of them; the most telling first."""
MAX_PASS_RATIO = 5.0
"""No tree makes up for a pass that is this many times as long as a plain one, so larger passes are not measured."""


@final
class Estimates:
    """Starts from a profile, learns from rounds, and can be exported as a profile."""

    def __init__(self, max_depth: int, given: Profile, pads_trees: bool = True):
        self._given, self._max_depth, self._pads_trees = given, max_depth, pads_trees
        self.curve = PassCurve(given.pass_seconds) if given.pass_seconds else None
        self.costs: dict[str, DraftSeconds] = {}
        self._timed: dict[str, tuple[float, float]] = dict(given.draft_seconds)
        self.acceptance, self.lengths, self.speed = Acceptance(max_depth), Lengths(), Speed()
        self._round_seconds: dict[int, RoundSeconds] = {}  # by batch size
        self._most_rows = 0  # of passes, as far as they were measured or not worth it
        self.sizes = {source: DraftSize(NODES_PER_LEVEL, columns) for source, columns in given.sizes.items()}
        self.confidence = {source: Confidence(**tables) for source, tables in given.confidence.items()}
        for source, tables in given.acceptance.items():
            self.acceptance.counts[source] = {hint: Counts(HALF_LIFE, *table) for hint, table in tables.items()}

    def measure(
        self, pass_seconds: Callable[[int], float], sizes: Seq[int], room: int, clock: Callable[[], float]
    ) -> None:
        """T(n) at 1 and at these sizes, in this order, as far as it is not known so far up and drafts could pay.

        room: the most rows that fit.
        """
        most = min(max(sizes), room)
        if self.curve is not None and max(*self.curve.points, self._most_rows) >= most:
            return
        begin, self._most_rows = clock(), most
        points = dict(self.curve.points) if self.curve else {1: pass_seconds(1)}
        for n in (min(size, room) for size in sizes):
            slowest = max((seconds for rows, seconds in points.items() if rows <= n), default=0.0)
            too_slow = n > max(points) and slowest > MAX_PASS_RATIO * min(points.values())
            in_time = len(points) < 2 or clock() - begin < MEASURE_SECONDS
            if n not in points and not too_slow and in_time:
                points[n] = pass_seconds(n)
        self.curve = PassCurve(points)
        for round_seconds in self._round_seconds.values():
            round_seconds.use(self.curve)

    def learn_seconds(self, timed: Mapping[str, tuple[float, float]]) -> None:
        """What drafters measured of themselves; a profile and what was seen since say more."""
        self._timed = {**timed, **self._timed}

    def round_seconds(self, batch: int) -> RoundSeconds:
        """R(d) for this many rows; a new batch size starts with the drift of another."""
        assert self.curve is not None, "measure() comes first"
        if batch not in self._round_seconds:
            drift = next((other.drift.value for other in self._round_seconds.values()), 1.0)
            self._round_seconds[batch] = RoundSeconds(self.curve, batch, drift, self._pads_trees)
        return self._round_seconds[batch]

    def cost(self, source: str) -> DraftSeconds:
        """What this drafter takes; one that was never timed gets a guess that invites a try."""
        if source not in self.costs:
            assert self.curve is not None, "measure() comes first"
            token = RobustMean(self.curve.seconds(1) / 4)
            uncached_tokens = RobustMean(max(self.curve.seconds_per_row / 5, self.curve.seconds(1) / 200))
            if source in self._timed:
                token, uncached_tokens = (RobustMean(max(seconds, 1e-9), votes=2) for seconds in self._timed[source])
                uncached_tokens.count = 1  # not a guess
            self.costs[source] = DraftSeconds(token, uncached_tokens)
        return self.costs[source]

    def option(self, seq: Sequence, drafter_index: int, offer: DraftOptions, limit: int, credit: float) -> Option:
        """What one drafter may be expected to do for one row: up to `limit` tokens, losing up to `credit` passes."""
        limit = min(limit, offer.masks or offer.ready)
        accept = self.acceptance.expected(seq.slot, offer.source, offer.hint)[:limit]
        ends = self.lengths.of(seq)
        accept = [a * goes_on for a, goes_on in zip(accept, ends.continue_probs(seq.num_output, limit), strict=False)]
        size = self.sizes.setdefault(offer.source, DraftSize(NODES_PER_LEVEL if offer.branches > 1 else 1.0))
        nodes, levels = size.totals(self._max_depth)
        if offer.at_once:
            levels = [0.0] + [1.0] * self._max_depth
        return Option(
            **offer.__dict__,
            drafter_index=drafter_index,
            reading=self.cost(offer.source).uncached_tokens.value * offer.uncached_tokens,
            emitted=seq.num_output,
            ends=ends,
            horizon=ends.left(seq.num_output, seq.remaining),
            credit=credit,
            gains=gains_of(accept),
            nodes=nodes,
            levels=levels,
            is_tree=offer.branches > 1,
        )

    def learn_drafting(
        self, depths: Mapping[str, int], uncached_tokens: Mapping[str, int], batch: int, seconds: float
    ) -> None:
        """A draft of `depths` tokens by drafter took `seconds`, split as was expected.

        What reading takes is learnt where it is, or is held to be, most of the draft: behind a deep one, errors about
        tokens would pass for it. The first time is better than a guess in any case.
        """
        expected = {source: self.cost(source).of(depth, uncached_tokens[source]) for source, depth in depths.items()}
        share = seconds / max(sum(expected.values()), 1e-9)
        for source, depth in depths.items():
            cost = self.costs[source]
            if uncached_tokens[source] > FEW_TOKENS * batch:
                believed, drafting = uncached_tokens[source] * cost.uncached_tokens.value, depth * cost.token.value
                reading = expected[source] * share - drafting
                if max(believed, reading) >= drafting or not cost.uncached_tokens.count:
                    cost.uncached_tokens.add(max(reading, believed / 8) / uncached_tokens[source])
            elif depth:
                cost.token.add(cost.token.value * share)

    def learn_draft(self, slot: int, record: Round, depth: int, levels: int, passed: Seq[float], masks: float) -> None:
        """Learn from a round that had a budget of `depth`, `levels` drafting steps, and `masks` for each depth.

        passed: the products of confidences of the best paths after which drafting continued.
        """
        self.acceptance.observe(slot, record, depth)
        self.sizes[record.source].observe(record, depth, levels, masks)
        if record.confidences or record.source in self.confidence:
            self.confidence.setdefault(record.source, Confidence()).observe(record, passed)

    def release(self, slot: int) -> None:
        self.acceptance.release(slot)
        self.lengths.release(slot)
        self.speed.release(slot)

    def profile(self, model: str, dtype: str, threads: int) -> Profile:
        counts, sizes, confidence = self.acceptance.counts, self.sizes, self.confidence
        return Profile(
            pass_seconds=dict(self.curve.points) if self.curve else {},
            draft_seconds={source: (one.token.value, one.uncached_tokens.value) for source, one in self.costs.items()},
            acceptance={source: {hint: one.columns for hint, one in of.items()} for source, of in counts.items()},
            sizes={source: one.columns for source, one in sizes.items()},
            confidence={source: one.columns for source, one in confidence.items()},
            model=model,
            dtype=dtype,
            threads=threads,
        )
