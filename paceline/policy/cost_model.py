"""The default policy: draft what is expected to give the most tokens per second, and never lose to plain decoding.

    estimates   what rounds of the target and drafts take, and how likely tokens are to stand
    choice      the drafter and depth that bring the most for their time; of trees also the number of nodes
    probing     when to try again what did not pay
    ledger      what may still be lost; whatever the others say, nothing is drafted beyond it

Decisions may depend on the clock, and on drafted tokens that are kept: neither changes the distribution of the output
(docs/exactness.md, lemmas 4 and 5).
"""

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, final

from pydantic import Field

from ..core.interfaces import NOTHING_PROPOSED, DraftBudget, Drafter, DraftOptions, DraftPolicy
from ..core.request import Sequence
from ..core.round import Round
from ..schema import checked_call
from .choice import TREE_SIZES, DraftPlan, Option, best_plan
from .confidence import Confidence
from .estimates import FEW_TOKENS, TREE_ROWS, Estimates
from .ledger import Ledger
from .probing import Probing, could_pay, largest_probe, may_join, owner
from .profile import Profile
from .seconds import RoundSeconds

PLAIN_ROUNDS = 5  # of each batch size, before anything is compared with them
PLAIN_AFTER, PLAIN_EVERY = 4, 48  # rounds of drafts between two plain ones, which keep the comparison honest
REST, LONG_REST = 2, 4  # rounds for which plans to draft nothing hold while the offers stay the same
OUTLIER = 1.6  # a round cannot cost the ledger more than this many times what it should have
NEW, SLOW_AGAIN = 2.0, 3.0  # the same of trees of a new size; three times that for the second slow one in a row
TOO_SHORT = "the answer ended before plain decoding was measured"
NO_GAIN = "drafting was not expected to pay"


@dataclass(frozen=True, slots=True)
class _Row:
    """What one row is to draft this round.

    replaces: of a probe, the expected speed of what the row would have drafted otherwise, over plain decoding.
    passed: products of the best paths after which drafting continued.
    """

    option: Option | None = None
    depth: int = 0
    nodes: int = 0
    is_probe: bool = False
    replaces: float = 1.0
    passed: list[float] = field(default_factory=list[float])

    def levels(self, record: Round) -> int:
        """Of the draft, those included of which nothing was left."""
        return max(record.num_drafted, min(self.depth, len(self.passed) + 1) if self.passed else 0)


@final
class CostModel(DraftPolicy):
    """Depth and drafter by measured costs and learnt acceptance, per request and round, nothing included.

    max_depth: the longest draft.
    max_nodes: the largest tree.
    profile: measurements of earlier runs. Without them the target is measured, for about a second, when a drafter
        first has something to propose.
    clock: a function that returns seconds; tests bring their own.
    """

    @checked_call
    def __init__(
        self,
        max_depth: Annotated[int, Field(ge=1, le=64)] = 16,
        profile: Profile | None = None,
        clock: Callable[[], float] = time.perf_counter,
        max_nodes: Annotated[int, Field(ge=1, le=TREE_SIZES[-1])] = TREE_SIZES[-1],
    ):
        self.max_depth, self.max_nodes, self._given, self._clock = max_depth, max_nodes, profile or Profile(), clock

    def bind(self, drafter: Drafter, pass_seconds: Callable[[int], float], pads_trees: bool = True) -> None:
        self._drafter, self._pass_seconds = drafter, pass_seconds
        self.estimates = Estimates(self.max_depth, self._given, pads_trees)
        self.ledger, self._probing = Ledger(), Probing()
        self._speed = 0.0  # tokens per second that the time of this round is worth
        self._round = self._since_plain = self._rest = self._blind = 0
        self._plain_after = PLAIN_AFTER
        self._restarted = set[int]()  # slots whose last round only added masks
        self._reasons: dict[int, str] = {}  # why nothing was drafted so far, by slot
        self._plan, self._seen = list[_Row](), list[tuple[Sequence, Round]]()
        # Planning takes time. After a plan to draft nothing, batches are not looked at for `_blind` rounds, and `_rest`
        # more may do without a plan while the offers are those of the round that was planned last.
        self._next_rest, self._offers = REST, list[object]()

    def measure(self, room: int, probes: bool = False) -> None:
        """Measure target and drafters now, not in the first round that could draft.

        room: the most rows that fit.
        probes: whether drafts have probes, which make passes as wide as trees do.
        """
        is_first = self.estimates.curve is None
        if is_first:
            self.estimates.measure(self._pass_seconds, (1 + self.max_depth, 4, 8, 2), room, self._clock)
        if self._drafter.info.branches > 1 or probes:
            self.estimates.measure(self._pass_seconds, TREE_ROWS, min(room, 1 + self.max_nodes), self._clock)
        if is_first:
            self.estimates.learn_seconds(self._drafter.seconds())

    def budgets(self, seqs: Seq[Sequence]) -> list[DraftBudget]:
        self._seen, self._measuring, self._round = [], 0.0, self._round + 1
        self._plan = [_Row()] * len(seqs)
        plain, rows = [DraftBudget(0, 0)] * len(seqs), self._options(seqs)
        if not any(rows):
            return plain
        offered = [seq.slot for seq, row in zip(seqs, rows, strict=True) if row]
        self._reasons |= {slot: self._reasons.get(slot, TOO_SHORT) for slot in offered}
        round_seconds = self.estimates.round_seconds(len(seqs))
        if round_seconds.num_plain < PLAIN_ROUNDS:
            return plain
        if self._since_plain >= self._plain_after + bool(self._restarted):  # a restart may still be drafted from
            # With masks a plain round takes two: what they foresaw is lost.
            loses = any(option.masks and option.ready for row in rows for option in row)
            self._plain_after = min(PLAIN_EVERY * (1 + loses), 2 * self._plain_after)
            return plain
        allowed = [
            [option for option in row if may_join(seq, option, round_seconds, self.estimates)]
            for seq, row in zip(seqs, rows, strict=True)
        ]
        max_nodes = 1 if round_seconds.needs_small_tree else self.max_nodes
        self._speed = sum(self.estimates.speed.of(seq.slot, round_seconds.of(0)) for seq in seqs)
        plan = best_plan(allowed, round_seconds, self.estimates.costs, max_nodes, self._speed)
        self._reasons |= dict.fromkeys(offered, NO_GAIN)
        for row, option in enumerate(plan.options):
            if option is not None:
                # With confidences it may go further while they are high. Not with masks: a deeper budget adds more of
                # them, however few levels are drafted.
                is_sure = option.source in self.estimates.confidence and not option.masks
                depth = min(plan.deepest, option.depth) if is_sure else min(plan.depth, plan.depths[row])
                self._plan[row] = _Row(option, depth, max(depth, plan.nodes) if option.is_tree else depth)
        self._probe(seqs, rows, round_seconds, plan.rate * round_seconds.of(0) / len(seqs), max_nodes)
        rests = not any(row.option for row in self._plan)
        self._blind, self._rest = (len(seqs) // 4, self._next_rest) if rests else (0, 0)
        self._next_rest = min(self._next_rest + REST, LONG_REST) if rests else REST
        return [self._budget(row, plan) for row in self._plan]

    def observe(self, seq: Sequence, record: Round) -> None:
        self._seen.append((seq, record))
        if len(self._seen) == record.batch == len(self._plan) and self.estimates.curve is not None:
            self._learn(self._seen)

    def release(self, slots: Seq[int]) -> None:
        self._restarted.difference_update(slots)
        for slot in slots:
            self._reasons.pop(slot, None)
            self.estimates.release(slot)
            self._probing.release(slot)
            self.ledger.release(slot)

    def no_draft_reason(self, seq: Sequence) -> str | None:
        return self._reasons.get(seq.slot, NOTHING_PROPOSED)

    def profile(self, model: str = "", dtype: str = "", threads: int = 0) -> Profile:
        """What was learnt so far, to start another run from; the arguments say what it was measured with."""
        return self.estimates.profile(model, dtype, threads)

    # Planning a round

    def _options(self, seqs: Seq[Sequence]) -> list[list[Option]]:
        """What each drafter could do for each row; before the first of them the target is measured.

        Empty where no plan is made.
        """
        if self._blind > 0:
            self._blind -= 1
            return []
        limits = [min(self.max_depth, seq.remaining - 1, seq.params.most_drafted) for seq in seqs]
        ready = [self._ready(seq) if limit > 0 else {} for seq, limit in zip(seqs, limits, strict=True)]
        offers = [
            (seq.slot, [(i, o.hint, o.uncached_tokens > FEW_TOKENS, o.ready > 0) for i, o in row.items()])
            for seq, row in zip(seqs, ready, strict=True)
        ]
        if offers == self._offers and self._rest > 0:
            self._rest -= 1
            return []
        self._offers = offers
        begin, room = self._clock(), min(seq.max_length - len(seq.token_ids) for seq in seqs)
        if room < 2 and self.estimates.curve is None:
            return []
        if any(ready):
            self.measure(room, any(offer.probes for row in ready for offer in row.values()))
        self._measuring = self._clock() - begin
        return [
            [
                self.estimates.option(seq, index, offer, limit, self.ledger.available(seq.slot, offer.source))
                for index, offer in row.items()
            ]
            for seq, limit, row in zip(seqs, limits, ready, strict=True)
        ]

    def _ready(self, seq: Sequence) -> dict[int, DraftOptions]:
        """What the members of the drafter could draft for a sequence now, by their index."""
        offers, info = enumerate(self._drafter.draft_options(seq)), self._drafter.info
        return {
            index: offer
            for index, offer in offers
            if offer.hint >= 0 and (not seq.has_deferred_tokens or info.member(index).drafts_during_prefill)
        }

    def _probe(
        self, seqs: Seq[Sequence], rows: Seq[Seq[Option]], round_seconds: RoundSeconds, speed: float, max_nodes: int
    ) -> None:
        """Let a drafter that was not chosen show itself in the rows where it is due, if its failure can be paid for.

        Reading is dear: one row at a time, and a drafter that has caught up in one has to show itself there first.

        speed: what the rows with drafts are expected to reach, over plain decoding.
        """
        replaces = [speed if row.option else 1.0 for row in self._plan]
        reader = {o.source for row in rows for o in row if o.uncached_tokens <= FEW_TOKENS}
        due = [
            (row, option)
            for row, (seq, options) in enumerate(zip(seqs, rows, strict=True))
            for option in options
            if option is not self._plan[row].option
            and (option.masks or seq.slot not in self._restarted)  # a draft from new masks comes first
            and (option.uncached_tokens <= FEW_TOKENS or option.source not in reader)
            and self._probing.is_due(owner(seq, option), (option.source, option.hint), self._round)
            and could_pay(seq, option, round_seconds, self.estimates, self._good_rounds(option), replaces[row])
        ]
        read_by_others = 0.0
        for row, option in due:
            cost = self.estimates.cost(option.source)
            if option.source != due[0][1].source or (option.uncached_tokens > FEW_TOKENS and read_by_others > 0):
                continue
            reading = option.uncached_tokens * cost.uncached_tokens.value + read_by_others
            probe = largest_probe(option, reading, cost.token.value, round_seconds, max_nodes, replaces[row])
            if probe is not None:
                self._plan[row] = _Row(option, *probe, is_probe=True, replaces=replaces[row])
                read_by_others = reading

    def _good_rounds(self, option: Option) -> float:
        return self._probing.good_rounds(option, self._round, self.estimates.acceptance.tries(option.source))

    def _budget(self, row: _Row, plan: DraftPlan) -> DraftBudget:
        """The budget of a row, with the bounds that its drafter applies while it drafts, unless it is a probe."""
        option = row.option
        if option is None:
            return DraftBudget(0, 0)
        sharing = sum(other.option is not None for other in self._plan)  # rows that pay for a further pass together
        confidence = None
        if not row.is_probe and (option.is_tree or option.source in self.estimates.confidence):
            confidence = self.estimates.confidence.get(option.source) or Confidence()
        token = 0.0 if option.at_once else self.estimates.cost(option.source).token.value
        level, nodes = self._speed * token, [self._speed * seconds for seconds in plan.node_seconds]

        def should_continue(confidences: Seq[float]) -> bool:
            """One more level must be worth its seconds and those of a node."""
            best, price = math.prod(confidences), level + nodes[min(len(confidences), len(nodes) - 1)]
            if confidence is not None and confidence.deeper.chance(best) * sharing < price:
                return False
            row.passed.append(best)
            return True

        min_probs = list[float]()
        if confidence is not None and option.is_tree:
            least = {price: confidence.accepted.min_prob(price / sharing) for price in {*nodes}}
            min_probs = list(accumulate((least[price] for price in nodes), max))
        return DraftBudget(row.depth, row.nodes, option.drafter_index, should_continue, min_probs)

    # Learning from a round

    def _learn(self, seen: Seq[tuple[Sequence, Round]]) -> None:
        batch, first, self._restarted = len(seen), seen[0][1], set[int]()
        round_seconds = self.estimates.round_seconds(batch)
        target_s = first.verify_s + first.rest_s
        reads = any(record.with_prompt for _, record in seen)  # the seconds of some passes counted as prefill
        for seq, _ in seen:
            if seq.is_finished:
                self.estimates.lengths.add(seq)
        if not any(row.option for row in self._plan):
            if not reads:
                self._since_plain = 0
                round_seconds.observe(0, target_s)
            for seq, record in seen:
                self.ledger.book(seq.slot, 1, 0.0, batch, None)
                self.estimates.speed.add(seq.slot, record.num_emitted, round_seconds.of(0))
            return
        self._since_plain += 1
        depths, uncached_tokens = dict[str, int](), dict[str, int]()
        for row, (_, record) in zip(self._plan, seen, strict=True):
            if row.option is not None:  # a drafter takes one pass for all its rows, as long as the longest
                source = row.option.source
                depths[source] = max(depths.get(source, 0), row.option.steps(row.levels(record)))
                uncached_tokens[source] = uncached_tokens.get(source, 0) + row.option.uncached_tokens
        widths = [max(record.num_nodes, record.num_rows - 1) for _, record in seen]
        nodes = max(widths) if round_seconds.pads_trees else sum(widths) / batch
        drafting = max(0.0, first.draft_s - self._measuring)
        should = round_seconds.of(nodes) + sum(self.estimates.cost(s).of(depths[s], uncached_tokens[s]) for s in depths)
        reading = sum(row.option.reading for row in self._plan if row.option)
        target_s = round_seconds.of(nodes) if reads else target_s
        took = drafting + target_s
        is_tree = any(row.option and row.option.is_tree for row in self._plan)
        limit = (NEW if is_tree and round_seconds.is_new(nodes) else OUTLIER) * should + reading
        if is_tree and not reads and round_seconds.is_slow_again(nodes, target_s):
            limit *= SLOW_AGAIN
        self._settle(seen, min(took, limit), round_seconds)
        if not reads:
            round_seconds.observe(nodes, target_s)
        self.estimates.learn_drafting(depths, uncached_tokens, batch, drafting)
        for (seq, record), row in zip(seen, self._plan, strict=True):
            if row.option is None:
                continue
            if row.option.restarts and not record.num_drafted:
                self._restarted.add(seq.slot)
            if levels := row.levels(record):
                depth = min(row.depth, max(row.option.ready, record.num_drafted))  # copies go beyond what is predicted
                masks = record.num_probes / row.depth if row.option.masks else 0.0
                self.estimates.learn_draft(seq.slot, record, depth, levels, row.passed, masks)
            if record.num_drafted:
                key = (row.option.source, row.option.hint)
                self._probing.used(owner(seq, row.option), key, self._round, row.is_probe, record.num_accepted > 0)

    def _settle(self, seen: Seq[tuple[Sequence, Round]], seconds: float, round_seconds: RoundSeconds) -> None:
        """Book the passes beyond one that the round took; known reading is a loan, paid off as tokens come."""
        batch = len(seen)
        extra = max(0.0, seconds / round_seconds.of(0) - 1)
        for (seq, _), row in zip(seen, self._plan, strict=True):
            if row.option is not None and row.option.uncached_tokens > FEW_TOKENS and not row.is_probe:
                lent = min(row.option.reading / round_seconds.of(0), max(0.0, extra))
                self.ledger.add_loan(seq.slot, row.option.source, lent, row.option.horizon)
                extra -= lent
        for (seq, record), row in zip(seen, self._plan, strict=True):
            source = None if row.option is None else row.option.source
            self.estimates.speed.add(seq.slot, record.num_emitted, seconds)
            missed = (1 + extra) * (row.replaces - 1)
            self.ledger.book(seq.slot, record.num_emitted, extra, batch, source, missed)
