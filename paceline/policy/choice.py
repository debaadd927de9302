"""Which drafter drafts, how deep, and how many nodes: what brings the most tokens beyond those its time is worth.

    tokens(d)  = B + sum over rows of gain(d)           gain(d) = sum_{i<=d} prod_{j<=i} a_j
    seconds(d) = R(nodes(d)) + levels(d) c + reading
    value(d)   = tokens(d) - speed seconds(d)

speed is what the rounds of these requests have brought, in tokens per second (`Speed`). The best ratio of tokens to
seconds would be another choice: it prefers a short good round to a longer one that is nearly as good, though the time
that it saves is then spent at the usual speed (the renewal-reward theorem; Dinkelbach 1967).

d = 0 is plain decoding. A chain is a tree in which every node has one child; nodes(d) and levels(d) are what the
drafter uses of a budget of depth d (`acceptance`). One more node pays if its chance of being accepted, in all rows
together, is worth the seconds that it adds to the pass, which depend on how many there are already (`node_seconds`).
One more level pays if its chance is also worth the drafting. Drafters with confidences apply both bounds themselves
while they draft (`DraftBudget`).

Drafters with masks (SPACE) share the nodes of a round between candidates and masks for the next one. Where the last
round left no masks, a restart adds up to d below the root, and the next round drafts.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import final

from ..core.interfaces import DraftOptions
from .lengths import Ends
from .seconds import DraftSeconds, RoundSeconds

MARGIN = 1.05
"""Speculation must promise so many times the tokens per second of plain decoding: the estimates are no better."""
COUNTED_GAIN = 0.5
"""The share of the expected gain that counts when a round is checked against the ledger."""
PATIENCE = 3
"""Depths without improvement before the search ends; the pass curve has steps, so one is not enough."""
TREE_SIZES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)
"""With the root they fill the passes that are padded to 2, 4, 8 or 16 rows."""
DRAFTING_SHARE = 8 / 9
"""The share of a drafter's rounds with masks that draft; the others are restarts, which only add masks.

A restart earns nothing by itself, so it is rated as the cycle that it begins: one restart, then eight rounds that draft
until a plain round or another drafter loses the masks. Tokens and seconds are those of the mean round of the cycle.
"""


@dataclass(frozen=True, kw_only=True)
class Option(DraftOptions):
    """What one drafter could do for one row, and what that is expected to give.

    reading: the seconds to read the uncached tokens.
    emitted: tokens of the answer so far. ends: where it may end.
    horizon: the number of tokens that the answer is still expected to have. An investment must pay within them.
    credit: the passes that a round of it may lose (`ledger`).
    gains, nodes, levels: the expected accepted tokens, drafted nodes and drafting steps by depth, from depth 0.
    """

    drafter_index: int
    reading: float
    emitted: int
    ends: Ends
    horizon: float
    credit: float
    gains: Seq[float]
    nodes: Seq[float]
    levels: Seq[float]
    is_tree: bool  # whether nodes may have several children

    @property
    def depth(self) -> int:
        return len(self.gains) - 1

    @property
    def restarts(self) -> bool:
        """Whether this round could only add masks, for the next one to draft from."""
        return self.ready == 0


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A depth for the pass, and one option or none for each row.

    rate: the expected tokens per second. value: the expected tokens beyond those that the time is worth.
    depths: the depth up to which each row's nodes are worth their rows.
    deepest: the depth that could still be paid for if every token were rejected.
    nodes: the most candidates of a tree.
    node_seconds: the seconds that the first, second, ... node of each drafting row adds.
    """

    rate: float
    value: float
    depth: int
    options: Seq[Option | None]
    depths: Seq[int]
    deepest: int = 0
    nodes: int = 0
    node_seconds: Seq[float] = (0.0,)


def node_seconds(seconds: Mapping[int, float]) -> list[float]:
    """What the first, second, ... node adds to passes that take `seconds` by their number of nodes, from 0.

    Passes get dearer in steps, and clocks are not exact. So the sizes are joined by their lower convex hull: one of a
    step's nodes pays if all of them do, and no node takes less than the one before it.
    """
    corners = list[tuple[int, float]]()
    for n, at in sorted(seconds.items()):
        while len(corners) > 1:
            (before, low), (last, high) = corners[-2:]
            if (high - low) * (n - last) < (at - high) * (last - before):
                break
            corners.pop()
        corners.append((n, at))
    added = list[float]()
    for (before, low), (n, at) in pairwise(corners):
        added += [(at - low) / (n - before)] * (n - before)
    return added


def gains_of(accept: Seq[float]) -> list[float]:
    """Expected accepted tokens by depth, from depth 0, of the chances a_1, a_2, ..."""
    return [0.0, *accumulate(accumulate(accept, mul))]


def useful_depth(option: Option, price: float) -> int:
    """The depth up to which each level is expected to bring `price` tokens for each of its nodes."""
    gains, nodes, depth = option.gains, option.nodes, 0
    while depth < option.depth and gains[depth + 1] - gains[depth] >= price * (nodes[depth + 1] - nodes[depth]):
        depth += 1
    return depth


def best_plan(
    rows: Seq[Seq[Option]],
    round_seconds: RoundSeconds,
    costs: Mapping[str, DraftSeconds],
    max_nodes: int,
    speed: float,
) -> DraftPlan:
    """The best depth for the best drafters: one drafter for all rows or, in a batch, each row's most promising one.

    max_nodes: the most nodes of a tree. speed: the tokens per second that time is worth.
    """
    batch, price, plain = len(rows), round_seconds.price, round_seconds.of(0)
    best = DraftPlan(batch / plain, batch - speed * plain, 0, [None] * batch, [0] * batch)
    least = best.rate * MARGIN
    sources = list(dict.fromkeys(option.source for row in rows for option in row))
    teams = [[source] for source in sources]
    if batch > 1 and len(sources) > 1:
        teams.append(sources)
    for team in teams:
        options = [
            max((o for o in row if o.source in team), key=lambda o: o.gains[-1], default=None) for row in rows
        ]  # fmt: skip
        depths = [0 if o is None else useful_depth(o, price) for o in options]
        if any(depths):
            found = _Team(options, depths, round_seconds, costs, max_nodes, speed).best()
            if found.rate > least and found.value > best.value:
                best = found
    return best


@final
class _Team:
    """The drafters of a round, one or none for each row, and the most that each is to draft."""

    def __init__(
        self,
        options: Seq[Option | None],
        depths: Seq[int],
        round_seconds: RoundSeconds,
        costs: Mapping[str, DraftSeconds],
        max_nodes: int,
        speed: float,
    ):
        self.options = [o if depth else None for o, depth in zip(options, depths, strict=True)]
        self.depths, self.round_seconds, self.max_nodes = depths, round_seconds, max_nodes
        self.drafting = [o for o in self.options if o]
        self.is_tree = any(o.is_tree for o in self.drafting)
        self.probes = max(o.probes for o in self.drafting)
        self.restarts = all(o.restarts for o in self.drafting)
        self.level = sum(costs[source].token.value for source in {o.source for o in self.drafting})
        self.steps = min(self.drafting, key=lambda o: o.at_once).steps  # of one that drafts level by level, if any does
        self.credit, self.plain, self.speed = max(o.credit for o in self.drafting), round_seconds.of(0), speed

    def best(self) -> DraftPlan:
        batch, drafting = len(self.options), self.drafting
        reading = [(o, most, o.reading / o.horizon) for o, most in zip(self.options, self.depths, strict=True) if o]
        share = DRAFTING_SHARE if self.restarts else 1.0
        rate, value, depth, expected, kept = 0.0, -math.inf, 0, 0.0, 0.0
        longest_draft = max(self.depths)
        if self.is_tree:
            longest_draft = min(longest_draft, self.max_nodes)
        for d in range(1, longest_draft + 1):
            tokens, read, levels, nodes, longest = float(batch), 0.0, 0.0, 0.0, 0.0
            for o, most, per_token in reading:
                own = d if d < most else most
                gain = o.gains[own]
                tokens += share * gain
                read += per_token * (1 + gain)
                levels, nodes, longest = max(levels, o.levels[own]), nodes + o.nodes[own], max(longest, o.nodes[own])
            mean = nodes / len(drafting)
            size = max(1, math.ceil((mean + longest) / 2 - 0.05) if self.round_seconds.pads_trees else mean)
            if self.is_tree and size > self.max_nodes:
                size = self.max_nodes
            full = max(size, d) if self.is_tree else d
            full_seconds = self.pass_seconds(full)
            if d > depth + PATIENCE or not self.can_pay(d, full_seconds, tokens / batch):
                break
            seconds = full_seconds if size == full else self.pass_seconds(size)
            if self.restarts:
                seconds = DRAFTING_SHARE * seconds + (1 - DRAFTING_SHARE) * self.masks_seconds(d)
            seconds += levels * self.level + read
            if (found := tokens - self.speed * seconds) > value:
                rate, value, depth, expected, kept = tokens / seconds, found, d, tokens, size
        if not depth:
            return DraftPlan(rate, value, 0, self.options, self.depths)
        nodes = self.largest(depth, kept, expected / batch) if self.is_tree else depth
        least_nodes, deeper = nodes if self.is_tree else 0, range(depth + 1, longest_draft + 1)

        def is_too_dear(d: int) -> bool:
            return not self.can_pay(d, self.pass_seconds(max(least_nodes, d)), expected / batch)

        deepest = depth + bisect_left(deeper, True, key=is_too_dear)
        sizes = {0: self.plain} | {n: self.pass_seconds(n) for n in {*TREE_SIZES, nodes, deepest}}
        return DraftPlan(rate, value, depth, self.options, self.depths, deepest, nodes, node_seconds(sizes))

    def pass_seconds(self, nodes: float) -> float:
        """Seconds of a round without the drafting. nodes: of each drafting row."""
        return self.round_seconds.of(self.round_seconds.nodes(nodes + self.probes, len(self.drafting)))

    def masks_seconds(self, depth: int) -> float:
        """The same of a round that only adds masks for drafts of this depth."""
        return self.pass_seconds(min(depth, max(o.masks for o in self.drafting)))

    def can_pay(self, depth: int, seconds: float, tokens: float) -> bool:
        """Whether the ledger can pay for such a pass, the drafting, and for adding masks first where there are none, if
        `COUNTED_GAIN` of the gain comes true. tokens: the expected tokens per row.
        """
        if self.restarts:
            seconds += self.masks_seconds(depth) - self.plain
        limit = self.credit + (1 - COUNTED_GAIN) + COUNTED_GAIN * tokens
        return seconds + self.steps(depth) * self.level <= limit * self.plain

    def largest(self, depth: int, kept: float, tokens: float) -> int:
        """The most nodes of a tree that usually has `kept`: as many as can be paid for."""
        nodes = max(math.ceil(kept), depth)
        for n in TREE_SIZES:
            if nodes < n <= self.max_nodes:
                if not self.can_pay(depth, self.pass_seconds(n), tokens):
                    break
                nodes = n
        return nodes
