"""The default policy: draft what is expected to give the most tokens per second, and never lose to plain decoding.

    costs       what rounds of the target and drafts take
    experts     what passes of a mixture read, and what that adds to the costs
    odds        how likely tokens are to be accepted
    plan        the drafter, the depth and the nodes that bring the most for their time
    trials      when to try again what did not pay
    ledger      what may still be lost; whatever the others say, nothing is drafted beyond it

Decisions may depend on the clock, and on drafted tokens that are kept: neither changes the distribution of the output
(docs/exactness.md, lemmas 4 and 5).
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, final

from pydantic import Field

from ..core.interfaces import NOTHING_PROPOSED, DraftBudget, Drafter, DraftOptions, DraftPolicy, TargetExperts
from ..core.request import TokenSequence
from ..core.round import Round
from ..schema import checked_call
from .constants import (
    BAD_ROUNDS,
    CLIP,
    FEW_TOKENS,
    GOOD_ROUNDS,
    LONGEST,
    MOST,
    PLAIN_ROUNDS,
    TREE_ROWS,
    TREE_SIZES,
    WAIT,
    WEIGHT,
)
from .costs import Costs, RoundSeconds
from .experts import Experts
from .ledger import Ledger
from .lengths import Lengths
from .odds import Confidence, Odds
from .plan import Option, Plan, best_plan, gains_of, trial_depth
from .profile import Profile
from .trials import Trials

TOO_SHORT = "the answer ended before plain decoding was measured"
NO_GAIN = "drafting was not expected to pay"
_NOTHING = DraftBudget(0, 0)


@dataclass(slots=True)
class _Row:
    """What one row is to draft this round.

    passed: products of the best paths after which drafting continued.
    """

    option: Option | None = None
    depth: int = 0
    nodes: int = 0
    is_trial: bool = False
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

    def bind(
        self, drafter: Drafter, pass_seconds: Callable[[int], float], pads_trees: bool = True,
        experts: TargetExperts | None = None,
    ) -> None:  # fmt: skip
        self._drafter, self._pass_seconds = drafter, pass_seconds
        self.costs = Costs(self._given, pads_trees, Experts(experts, self._given) if experts else None)
        self.odds = Odds(self.max_depth, self._given)
        self.ledger, self._trials, self._lengths = Ledger(), Trials(), Lengths()
        self._round = self._since_plain = self._rest = self._blind = self._length = 0
        self._key: object = None  # what was offered in the round that was planned last
        self._reasons: dict[int, str] = {}  # why nothing was drafted so far, by slot
        self._plan, self._seen = list[_Row](), list[tuple[TokenSequence, Round]]()

    def measure(self, room: int, probes: bool = False) -> None:
        """Measure target and drafters now, not in the first round that could draft.

        room: the most rows that fit.
        probes: whether drafts have probes, which make passes as wide as trees do.
        """
        is_first = self.costs.curve is None
        if is_first:
            self.costs.measure(self._pass_seconds, (1 + self.max_depth, 4, 8, 2), room, self._clock)
        if self._drafter.info.branches > 1 or probes:
            self.costs.measure(self._pass_seconds, TREE_ROWS, min(room, 1 + self.max_nodes), self._clock)
        if is_first:
            self.costs.learn_seconds(self._drafter.seconds())

    def budgets(self, seqs: Sequence[TokenSequence]) -> list[DraftBudget]:
        self._seen, self._measuring, self._round = [], 0.0, self._round + 1
        self._plan, self._length = [_Row() for _ in seqs], sum(len(seq.token_ids) for seq in seqs) // max(1, len(seqs))
        nothing = [_NOTHING] * len(seqs)
        # Planning takes time, in a large batch milliseconds. After a plan to draft nothing, batches are not looked at
        # for some rounds, and then not planned for while the offers are those of that plan.
        if self._blind > 0:
            self._blind -= 1
            return nothing
        offers = [self._offers(seq) for seq in seqs]
        if not any(offers) or not self._is_measured(seqs, offers):
            return nothing
        key = [(seq.slot, [(i, o.hint, o.ready > 0) for i, o in row]) for seq, row in zip(seqs, offers, strict=True)]
        seconds = self.costs.round_seconds(len(seqs), self._length)
        if seconds.num_plain < PLAIN_ROUNDS or self._since_plain >= LONGEST or (self._rest > 0 and key == self._key):
            self._rest -= 1
            return nothing
        plain, sources = seconds.of(0), {offer.source for row in offers for _, offer in row}
        prices = {source: seconds.price(self.costs.novelty(source)) for source in sources}
        rows = [self._options(seq, row, prices) for seq, row in zip(seqs, offers, strict=True)]
        speed = sum(self.ledger.speed(seq.slot, plain) for seq in seqs)
        credits = [self.ledger.available(seq.slot) for seq in seqs]
        self._reasons.update({seq.slot: NO_GAIN for seq, row in zip(seqs, rows, strict=True) if row})
        may_draft = [
            [o for o in row if credit > 0 and o.useful and (not o.must_read or self._may_read(seq, o, credit, seconds))]
            for seq, row, credit in zip(seqs, rows, credits, strict=True)
        ]
        plan = best_plan(may_draft, seconds, speed, max(credits), self.max_nodes)
        for row, option in zip(self._plan, plan.options, strict=True):
            if option is not None:
                row.option = option
                # With confidences it may go further while they are high, but not with masks: each level adds some.
                goes_on = option.offer.source in self.odds.confidence and not option.offer.masks
                row.depth = min(option.useful, plan.most if goes_on else plan.depth)
                row.nodes = max(row.depth, plan.most) if option.offer.branches > 1 else row.depth
        self._try(seqs, rows, credits, seconds, plan.rate * plain / len(seqs))
        rests = not any(row.option for row in self._plan)
        self._key, self._rest, self._blind = key, WAIT * rests, len(seqs) // WAIT * rests
        return [self._budget(row, plan, speed) for row in self._plan]

    def observe(self, seq: TokenSequence, record: Round) -> None:
        self._seen.append((seq, record))
        if len(self._seen) == record.batch == len(self._plan) and self.costs.curve is not None:
            self._learn(self._seen)

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.odds.release(slot)
            self.ledger.release(slot)
            self._trials.release(slot)
            self._reasons.pop(slot, None)

    def no_draft_reason(self, seq: TokenSequence) -> str | None:
        return self._reasons.get(seq.slot, NOTHING_PROPOSED)

    def profile(self, model: str = "", dtype: str = "", threads: int = 0) -> Profile:
        """What was learnt so far, to start another run from; the arguments say what it was measured with."""
        costs, odds, experts = self.costs, self.odds, self.costs.experts
        return Profile(
            pass_seconds=dict(costs.curve.points) if costs.curve else {},
            pass_experts=dict(experts.read) if experts else {},
            expert_seconds=experts.seconds if experts else 0.0,
            novelty=dict(experts.counts) if experts else {},
            draft_seconds={source: (one.step.value, one.uncached_token.value) for source, one in costs.drafts.items()},
            acceptance={
                source: {hint: (tuple(one.hits), tuple(one.tries)) for hint, one in tables.items()}
                for source, tables in odds.counts.items()
            },
            nodes={source: (nodes, levels) for source, (nodes, levels) in odds.nodes.items()},
            confidence={source: one.columns for source, one in odds.confidence.items()},
            model=model,
            dtype=dtype,
            threads=threads,
        )

    # Planning a round

    def _offers(self, seq: TokenSequence) -> list[tuple[int, DraftOptions]]:
        """What the members of the drafter could draft for a sequence now, with their index."""
        if min(self.max_depth, seq.most_drafted) <= 0:
            return []
        offers, info = enumerate(self._drafter.draft_options(seq)), self._drafter.info
        found = [
            (index, offer)
            for index, offer in offers
            if offer.hint >= 0 and (not seq.has_deferred_tokens or info.member(index).drafts_during_prefill)
        ]
        if found:
            self._reasons.setdefault(seq.slot, TOO_SHORT)
        return found

    def _is_measured(self, seqs: Sequence[TokenSequence], offers: Sequence[Sequence[tuple[int, DraftOptions]]]) -> bool:
        """Measure the target before the first plan, if there is room for a draft."""
        if self.costs.curve is None:
            begin, room = self._clock(), min(seq.max_length - len(seq.token_ids) for seq in seqs)
            if room < 2:
                return False
            self.measure(room, any(offer.probes for row in offers for _, offer in row))
            self._measuring = self._clock() - begin
        return True

    def _options(
        self, seq: TokenSequence, offers: Sequence[tuple[int, DraftOptions]], prices: Mapping[str, float]
    ) -> list[Option]:
        """What each drafter could do for a row, and what that is expected to give. prices: `RoundSeconds.price`."""
        options, limit = list[Option](), min(self.max_depth, seq.most_drafted)
        for index, offer in offers:
            cost, horizon = self.costs.draft(offer.source), self._lengths.left(seq.num_output, seq.remaining)
            accept = self.odds.expected(seq.slot, offer.source, offer.hint)
            gains = gains_of(accept[: min(limit, offer.masks or offer.ready)], horizon)
            nodes, useful = self.odds.nodes_per_level(offer.source, offer.branches > 1), len(gains) - 1
            price, novelty = prices[offer.source], self.costs.novelty(offer.source)
            while price and useful and gains[useful] - gains[useful - 1] < price * nodes:
                useful -= 1
            is_confident = offer.branches > 1 or offer.source in self.odds.confidence
            must_read, reading = offer.uncached_tokens > FEW_TOKENS, cost.of(0, offer.uncached_tokens)
            expected = horizon, gains, nodes, useful, is_confident, novelty
            options.append(Option(offer, index, cost, must_read, reading, *expected))
        return options

    def _may_read(self, seq: TokenSequence, option: Option, credit: float, seconds: RoundSeconds) -> bool:
        """Whether the ledger pays for what a known drafter has to read, and so do its drafts after a bad beginning."""
        source, hint = option.offer.source, option.offer.hint
        if option.reading > credit * seconds.of(0) or self.odds.tries(source) < WEIGHT:
            return False
        return trial_depth(option, self.odds.expected(seq.slot, source, hint, bad=BAD_ROUNDS), seconds, 1.0, MOST) > 0

    def _try(
        self,
        seqs: Sequence[TokenSequence],
        rows: Sequence[Sequence[Option]],
        credits: Sequence[float],
        seconds: RoundSeconds,
        speed: float,
    ) -> None:
        """Let a drafter that was not chosen show itself in the rows where it is due, if its failure can be paid for.

        Reading is dear: one row at a time.

        speed: what the rows with drafts are expected to reach, over plain decoding.
        """
        tried: Option | None = None
        for planned, seq, options, credit in zip(self._plan, seqs, rows, credits, strict=True):
            replaces = speed if planned.option else 1.0
            for option in options:
                source, hint = option.offer.source, option.offer.hint
                if option is planned.option or not self._trials.is_due(
                    _owner(seq, option), (source, hint), self._round
                ):
                    continue
                if tried is not None and (tried.offer.source != source or tried.must_read):
                    continue
                is_new, good = self.odds.tries(source) < WEIGHT, GOOD_ROUNDS * self._trials.unused(source, self._round)
                bad = BAD_ROUNDS if option.must_read else 0.0  # texts differ
                accept = self.odds.expected(seq.slot, source, hint, 1e9 if is_new else good, bad)
                if depth := trial_depth(option, accept, seconds, replaces, credit):
                    planned.option, planned.depth, planned.nodes, planned.is_trial = option, depth, depth, True
                    tried = option
                else:
                    self._trials.postpone(_owner(seq, option), (source, hint), self._round)

    def _budget(self, row: _Row, plan: Plan, speed: float) -> DraftBudget:
        """The budget of a row, with the bounds that its drafter applies while it drafts, unless it is a trial."""
        option = row.option
        if option is None:
            return _NOTHING
        offer, confidence, min_probs = option.offer, None, list[float]()
        if option.is_confident and not row.is_trial:
            confidence = self.odds.confidence.get(offer.source) or Confidence()
        sharing = sum(other.option is not None for other in self._plan)  # rows that pay for a further pass together
        step = 0.0 if offer.at_once else speed * option.cost.step.value / sharing
        nodes = [speed * seconds / sharing for seconds in plan.node_seconds]

        def should_continue(confidences: Sequence[float]) -> bool:
            """One more level must be worth its seconds and those of a node."""
            best, price = math.prod(confidences), step + nodes[min(len(confidences), len(nodes) - 1)]
            if confidence is not None and confidence.deeper.chance(best) < price:
                return False
            row.passed.append(best)
            return True

        if confidence is not None and offer.branches > 1:
            least = {price: confidence.accepted.min_prob(price) for price in {*nodes}}
            min_probs = list(accumulate((least[price] for price in nodes), max))
        return DraftBudget(row.depth, row.nodes, option.drafter_index, should_continue, min_probs)

    # Learning from a round

    def _learn(self, seen: Sequence[tuple[TokenSequence, Round]]) -> None:
        batch, first = len(seen), seen[0][1]
        seconds, target_s = self.costs.round_seconds(batch, self._length), first.verify_s + first.rest_s
        is_fused = any(record.with_prompt for _, record in seen)  # the seconds of some passes counted as prefill
        is_plain = not any(row.option for row in self._plan)
        for seq, _ in seen:
            if seq.is_finished:
                self._lengths.add(seq.num_output, seq.finish_reason == "length")
        steps, uncached, reading = dict[str, int](), dict[str, int](), 0.0
        for row, (_, record) in zip(self._plan, seen, strict=True):
            if row.option is not None:  # a drafter takes one pass for all its rows, as long as the longest
                offer, reading = row.option.offer, reading + row.option.reading
                steps[offer.source] = max(steps.get(offer.source, 0), offer.steps(row.levels(record)))
                uncached[offer.source] = uncached.get(offer.source, 0) + offer.uncached_tokens
        widths = [max(record.num_nodes, record.num_rows - 1) for _, record in seen]
        nodes, read = max(widths) if seconds.pads_trees else sum(widths) / batch, first.num_experts
        took = plain = seconds.of(0)
        if not is_plain:
            drafting = max(0.0, first.draft_s - self._measuring)
            passing = seconds.of_pass(nodes, read) if read else seconds.of(nodes)
            should = passing + sum(self.costs.draft(one).of(steps[one], uncached[one]) for one in steps)
            took = min(drafting + (passing if is_fused else target_s), CLIP * should + reading)
            self.costs.learn_drafting(steps, uncached, batch, drafting)
        if not is_fused:
            seconds.observe(nodes, target_s, read)
            if self.costs.experts and read:
                drafted = Counter[str]()
                for row, width in zip(self._plan, widths, strict=True):
                    if row.option is not None and width:
                        drafted[row.option.offer.source] += width
                self.costs.experts.learn_read(read, batch, drafted)
            self._since_plain = 0 if is_plain else self._since_plain + 1
        for (seq, record), row in zip(seen, self._plan, strict=True):
            option = row.option
            self.ledger.book(seq.slot, record.num_emitted, took, plain, batch, option is not None)
            if option is None:
                continue
            if levels := row.levels(record):
                depth = min(
                    row.depth, max(option.offer.ready, record.num_drafted)
                )  # copies go beyond what is predicted
                self.odds.observe(seq.slot, record, depth, levels, row.passed, seq.is_finished)
            if record.num_drafted:
                key = (option.offer.source, option.offer.hint)
                self._trials.used(_owner(seq, option), key, self._round, row.is_trial, record.num_accepted > 0)


def _owner(seq: TokenSequence, option: Option) -> int:
    """Whose back-off a trial moves: the request's (its slot) or, if much has to be read for it, everybody's."""
    return -1 if option.must_read else seq.slot
