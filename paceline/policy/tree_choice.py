"""How deep, how many nodes, and which of them: the shape of a tree with the most expected tokens per second.

    rate(d, n) = (B + sum over rows of gain(d, n)) / (R(n) + draft(d) + reading)

gain(d, n) is learnt by replay (`tree_gains`), and so is how many nodes and levels are left of such a budget once the
drafter has pruned. Given the best rate, a node pays iff its chance of standing, in all rows together, is worth the
seconds that a row of the pass takes: P B >= rate (R(n + 1) - R(n)). The drafter applies this bound as `min_prob`.

With masks R also depends on d, and a node's price is that of its own masks too (`option.width`). A depth is rated as if
all rounds had it: masks hung now are drafted from in the next round, which may be of another depth.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import final

from ..core.interfaces import DraftBudget
from .costs import DraftSeconds, TurnSeconds
from .option import DRAFTING, Choice, Option, is_affordable, width
from .tree_gains import DEPTHS, FIRST, NODES, Cell
from .tree_odds import TreeOdds

PATIENCE, BETTER = 2, 1.002
"""The search ends after so many depths or sizes none of which was better by this factor."""
KNOWN = 4.0
"""Rounds after which a budget counts as tried: what was never tried may promise anything."""
CONVEX = 1.3
"""A tree may outgrow the best size, in rounds that deserve it, while its rows get dearer by no more than this."""

_Row = tuple[Seq[Cell], float, int, float, bool]
"""Cells by size, their scale, the depth that can be reached, seconds of reading per token, whether it is a chain."""
_Found = tuple[float, int, int, int, float]
"""Rate, places in DEPTHS and NODES, nodes that are left of that budget, tokens per row."""


@final
@dataclass(frozen=True)
class MaskCosts:
    """Seconds of a round by depth and candidates, the masks below every node included; `masks` 0 for trees without.

    sizes: numbers of candidates. restarts: this round could only hang masks.
    """

    turn: TurnSeconds
    masks: int
    sizes: Seq[int]
    restarts: bool
    _timed: dict[int, float] = field(default_factory=dict[int, float])  # by rows behind the root
    _columns: dict[int, list[float]] = field(default_factory=dict[int, list[float]])  # by masks below a node

    def pass_of(self, depth: int, nodes: int) -> float:
        """Of a round with this budget."""
        rows = width(depth, nodes, self.masks)
        if rows not in self._timed:
            self._timed[rows] = self.turn.seconds(rows, tree=True)
        return self._timed[rows]

    def passes_at(self, depth: int) -> list[float]:
        """Of a round without candidates, then of each of `sizes`, none shorter than the one before."""
        below = min(depth, self.masks)
        if below not in self._columns:
            self._columns[below] = list(accumulate((self.pass_of(depth, n) for n in [0, *self.sizes]), max))
        return self._columns[below]

    def restart(self, depth: int) -> float:
        """Beyond a plain round, to hang masks first; 0 where they hang."""
        return self.pass_of(depth, 0) - self.turn.seconds(0) if self.restarts else 0.0

    def mean(self, seconds: float, depth: int) -> float:
        """Of a round of the cycle (`DRAFTING`) whose drafting rounds take `seconds`; `seconds` where masks hang."""
        return DRAFTING * seconds + (1 - DRAFTING) * self.pass_of(depth, 0) if self.restarts else seconds


def best_shape(
    options: Seq[Option | None], turn: TurnSeconds, costs: Mapping[str, DraftSeconds], credit: float, max_nodes: int
) -> Choice:
    """The best depth and number of nodes for a team of which at least one member drafts trees; see `choose`."""
    drafting = [o for o in options if o]
    token = sum(costs[source].token.value for source in {o.source for o in drafting})
    deepest_row = max(len(o.accept) for o in drafting)
    sizes = [n for n in NODES if n <= max(1, max_nodes)]
    costs_of = MaskCosts(turn, max(o.masks for o in drafting), sizes, all(o.restarts for o in drafting))
    plain, batch = turn.seconds(0), len(options)
    found: _Found = 0.0, 0, 0, 0, 0.0
    widest, known = 0, 0.0
    for place, depth in enumerate(DEPTHS):
        if depth > deepest_row or depth > sizes[-1]:
            break
        best_here, idle, rows = 0.0, 0, [_row(o, place) for o in drafting]
        passes, first = costs_of.passes_at(depth), costs_of.restart(depth)
        for g in range(FIRST[place], len(sizes)):
            tokens, kept, levels, read, tries = _expected(rows, g)
            tokens += batch
            if not is_affordable(passes[g + 1] + depth * token + first, tokens / batch, credit, plain):
                break
            widest = max(widest, g)
            rate = tokens / costs_of.mean(costs_of.pass_of(depth, kept) + levels * token + read, depth)
            idle = 0 if rate > best_here * BETTER else idle + 1
            best_here = max(best_here, rate)
            if tries >= KNOWN:
                known = max(known, rate)
            if rate > found[0] * BETTER:
                found = rate, place, g, kept, tokens / batch
            if idle >= PATIENCE:
                break
        if place >= found[1] + PATIENCE:
            break
    rate, place, wide, kept, expects = found
    if rate == 0.0:
        return Choice(0.0, 0, options)
    # The price of a row where trees usually end; they may grow as long as it is about that.
    g = min(bisect_left(sizes, kept), len(sizes) - 1)
    passes = costs_of.passes_at(DEPTHS[place])
    row_seconds = _slope(passes, [0, *sizes], g + 1)

    def fits(place: int, wide: int) -> bool:
        depth = DEPTHS[place]
        seconds = costs_of.passes_at(depth)[wide + 1] + depth * token + costs_of.restart(depth)
        return is_affordable(seconds, expects, credit, plain)

    for size in range(wide + 1, widest + 1):
        is_cheap = passes[size + 1] - passes[g + 1] <= CONVEX * row_seconds * (sizes[size] - sizes[g])
        wide = size if is_cheap and fits(place, size) else wide
    chosen = deepest = min(DEPTHS[place], sizes[wide])
    for deeper in range(place + 1, len(DEPTHS)):
        if DEPTHS[deeper] <= min(deepest_row, sizes[wide]) and fits(deeper, wide):
            deepest = DEPTHS[deeper]
    return Choice(
        rate, chosen, options, deepest, sizes[g], sizes[wide], row_seconds, known or rate, tokens=expects * batch
    )


def _row(o: Option, place: int) -> _Row:
    """What is the same for all sizes of a depth."""
    reach = min(DEPTHS[place], len(o.accept))
    if o.tree is None:
        chain = o.gains[reach], float(reach), float(reach), math.inf
        return [chain] * len(NODES), 1.0, reach, o.reading / o.horizon, True
    scale = o.scale[reach] * (DRAFTING if o.restarts else 1.0)
    return o.tree(place), scale, reach, o.reading / o.horizon, False


def _expected(rows: Seq[_Row], g: int) -> tuple[float, int, float, float, float]:
    """Of a budget for all rows: tokens gained, candidates of the longest row, levels drafted, seconds of reading.

    Last, the rounds in which the least known of the trees was tried like this.
    """
    if len(rows) == 1:  # the usual case, and budgets have to be quick
        cells, scale, reach, per_token, _ = rows[0]
        gain, nodes, drafted, tried = cells[g]
        gain = gain * scale if gain * scale < reach else reach
        return gain, max(1, math.ceil(nodes)), drafted, per_token * (1 + gain), tried
    tokens = levels = read = kept = most = 0.0
    tries = math.inf
    for cells, scale, reach, per_token, is_chain in rows:
        gain, nodes, drafted, tried = cells[g]
        gain = min(gain * scale, reach)
        tokens += gain
        kept += nodes
        most = max(most, nodes if is_chain else NODES[g])
        levels, tries = max(levels, drafted), min(tries, tried)
        read += per_token * (1 + gain)
    # The longest row sets the length of the pass: of one row its mean, of many nearly the most.
    mean = kept / len(rows)
    return tokens, max(1, math.ceil(mean + (most - mean) * (1 - 1 / len(rows)))), levels, read, tries


def _slope(passes: Seq[float], sizes: Seq[int], g: int) -> float:
    """Seconds that one more node takes around size `g`, from half of it to twice: clocks are no better than that."""
    low = max(i for i in range(g) if 2 * sizes[i] <= sizes[g])
    high = next((i for i in range(g + 1, len(sizes)) if sizes[i] >= 2 * sizes[g]), len(sizes) - 1)
    return (passes[high] - passes[low]) / (sizes[high] - sizes[low])


def tree_budget(
    wish: DraftBudget, odds: TreeOdds | None, choice: Choice, level_seconds: float, sharing: int, passed: list[float]
) -> DraftBudget:
    """`wish` with the bounds that the drafter applies while it drafts; no bounds where `odds` is None.

    level_seconds: of drafting. sharing: rows that pay for a longer pass together. passed: takes the products of the
    best paths from which drafting went on.
    """
    rate = choice.known_rate or choice.rate
    row, level = rate * choice.row_seconds, rate * (level_seconds + choice.row_seconds)

    def should_continue(confidences: Seq[float]) -> bool:
        """One more level must be worth its seconds and those of a row."""
        best = math.prod(confidences)
        if odds is not None and odds.ahead.chance(best) * sharing < level:
            return False
        passed.append(best)
        return True

    return replace(wish, should_continue=should_continue, min_prob=odds.paths.min_prob(row / sharing) if odds else 0.0)
