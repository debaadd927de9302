"""Which drafter drafts, how deep, and how many nodes: what brings the most tokens beyond those its time is worth.

    tokens(d)  = B + sum over rows of gain(d)           gain(d) = sum_{i<=d} prod_{j<=i} a_j
    seconds(d) = R(nodes(d)) + d c + reading
    value(d)   = tokens(d) - speed seconds(d)

speed is what the last rounds have brought, in tokens per second (`Ledger.speed`). The best ratio of tokens to seconds
would be another choice: it prefers a short good round to a longer one that is nearly as good, though the time that it
saves is then spent at the usual speed (the renewal-reward theorem; Dinkelbach 1967).

d = 0 is plain decoding. A chain is a tree in which every node has one child; nodes(d) is what the drafter makes of d
levels on average (`odds`), and c the seconds of a level. Drafters with masks (SPACE) share the nodes of a round between
candidates and masks for the next one; a round that can only add masks is rated as the one after it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from ..core.interfaces import DraftOptions
from .constants import MARGIN, TREE_SIZES, TRIAL_DEPTH
from .costs import DraftSeconds, RoundSeconds


@final
@dataclass(frozen=True, slots=True)
class Option:
    """What one drafter could do for one row, and what that is expected to give.

    must_read: whether it has to read much of the text first. reading: the seconds that reading takes.
    horizon: the tokens that the answer is still expected to have.
    gains: the expected accepted tokens by depth, from depth 0. nodes_per_level: the expected nodes of each level.
    useful: the depth up to which nodes are worth their rows. is_confident: whether the drafter gives confidences.
    novelty: of nodes, for a mixture of experts, see `experts`.
    """

    offer: DraftOptions
    drafter_index: int
    cost: DraftSeconds
    must_read: bool
    reading: float
    horizon: float
    gains: Sequence[float]
    nodes_per_level: float
    useful: int
    is_confident: bool
    novelty: float = 1.0


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """A depth for the pass, and one option or none for each row.

    rate: the expected tokens per second. value: the expected tokens beyond those that the time is worth.
    most: the nodes, or the depth of a chain, that can be paid for if every token is rejected.
    node_seconds: what the first, second, ... node of a row adds to the pass.
    """

    rate: float
    value: float
    options: Sequence[Option | None]
    depth: int = 0
    most: int = 0
    node_seconds: Sequence[float] = (0.0,)


def gains_of(accept: Sequence[float], horizon: float) -> list[float]:
    """Expected accepted tokens by depth, from depth 0, of the chances a_1, a_2, ...; the answer ends at `horizon`."""
    gains, chance = [0.0], 1.0
    for a in accept:
        chance *= a
        gains.append(min(gains[-1] + chance, horizon - 1))
    return gains


def best_plan(
    rows: Sequence[Sequence[Option]], seconds: RoundSeconds, speed: float, credit: float, max_nodes: int
) -> Plan:
    """The best depth for the best drafters: one drafter for all rows or, in a batch, each row's most promising one.

    speed: the tokens per second that time is worth. credit: the passes that the round may lose.
    max_nodes: the most nodes of a tree.
    """
    batch, plain = len(rows), seconds.of(0)
    best = Plan(batch / plain, batch - speed * plain, [None] * batch)
    least = MARGIN * best.rate
    sources = list(dict.fromkeys(option.offer.source for row in rows for option in row))
    for team in [[source] for source in sources] + [sources] * (batch > 1 and len(sources) > 1):
        options = [
            max((o for o in row if o.offer.source in team), key=lambda o: o.gains[-1], default=None) for row in rows
        ]
        plan = _plan_of(options, seconds, speed, credit, max_nodes)
        if plan.rate > least and plan.value > best.value:
            best = plan
    return best


def _plan_of(
    options: Sequence[Option | None], seconds: RoundSeconds, speed: float, credit: float, max_nodes: int
) -> Plan:
    """The best depth for these drafters, one or none for each row."""
    drafting, batch, plain = [option for option in options if option is not None], len(options), seconds.of(0)
    is_tree, at_once = any(o.offer.branches > 1 for o in drafting), all(o.offer.at_once for o in drafting)
    step = sum({o.offer.source: o.cost.step.value for o in drafting}.values())
    deepest, probes = max(o.useful for o in drafting), max(o.offer.probes for o in drafting)
    widest, share = max_nodes if is_tree else deepest, 1.0 if seconds.pads_trees else len(drafting) / batch
    novelty = sum(o.novelty for o in drafting) / len(drafting)

    def round_seconds(nodes: float) -> float:
        return seconds.of((nodes + probes) * share, novelty)

    def can_pay(nodes: float, depth: int) -> bool:
        """Whether the credit pays for such a round if every token is rejected."""
        return round_seconds(nodes) + (1 if at_once else depth) * step <= (1 + credit) * plain

    rate, value, depth, size = 0.0, -math.inf, 0, 0.0
    for d in range(1, min(widest, deepest) + 1):
        tokens, reading, total, longest = float(batch), 0.0, 0.0, 0.0
        for o in drafting:
            gain, nodes = o.gains[min(d, o.useful)], o.nodes_per_level * min(d, o.useful)
            tokens += gain
            reading += o.reading * (1 + gain) / o.horizon
            total, longest = total + nodes, max(longest, nodes)
        mean = total / len(drafting)
        nodes = min(widest, max(1, math.ceil((mean + longest) / 2 - 0.05) if seconds.pads_trees else mean))
        if not can_pay(max(nodes, d), d):
            break
        took = round_seconds(nodes) + (1 if at_once else d) * step + reading
        if tokens - speed * took > value:
            rate, value, depth, size = tokens / took, tokens - speed * took, d, nodes
    if not depth:
        return Plan(rate, value, options)
    most = max(math.ceil(size), depth)
    for n in TREE_SIZES if is_tree else range(depth + 1, widest + 1):
        if most < n <= widest:
            if not can_pay(n, depth if is_tree else n):
                break
            most = n
    if not any(o.is_confident for o in drafting):
        return Plan(rate, value, options, depth, most)
    # Further experts are ever fewer, which is no reason to draft the first nodes of a tree that will stay small.
    usual = max(math.ceil(size), depth) if seconds.experts else most
    sizes = {0: plain, **{n: round_seconds(n) for n in (*TREE_SIZES, usual, most) if n <= most}}
    parts = [{n: sizes[n] for n in sizes if n <= usual}, {n: sizes[n] for n in sizes if n >= usual}]
    return Plan(rate, value, options, depth, most, [added for part in parts for added in node_seconds(part)])


def node_seconds(seconds: dict[int, float]) -> list[float]:
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
    return [(b - a) / (n - m) for (m, a), (n, b) in pairwise(corners) for _ in range(n - m)]


def trial_depth(option: Option, accept: Sequence[float], seconds: RoundSeconds, replaces: float, credit: float) -> int:
    """The depth of a trial of an option, 0 if drafting could not pay before the answer ends, reading included.

    accept: a_1, a_2, ..., as hopeful as a trial may be. replaces: the expected speed of what it takes the place of,
    over plain decoding. credit: the passes that it may lose.
    """
    offer, step, plain = option.offer, option.cost.step.value, seconds.of(0)

    def took(depth: int) -> float:
        return seconds.of(depth + offer.probes, option.novelty) + offer.steps(depth) * step

    gains = enumerate(gains_of(accept[: len(option.gains) - 1], option.horizon))
    best = min(took(depth) / (1 + gain) for depth, gain in gains if depth)
    if (plain / replaces - best) * option.horizon <= option.reading:
        return 0
    depth = min(TRIAL_DEPTH, len(option.gains) - 1)
    return depth if (took(depth) + option.reading) / plain * replaces - 1 <= credit else 0
