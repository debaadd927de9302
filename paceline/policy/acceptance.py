"""How likely drafted tokens are to be accepted, and how much of a budget a drafter uses, by depth.

    a_i       chance that some token of depth i is accepted, given that one of depth i - 1 was
    nodes     drafted nodes at each depth (1 for a chain), after the drafter left out what was not worth verifying
    levels    share of the rounds in which the drafter went on to this depth

A round counts at depth i if its budget reached it and its tokens before i were accepted. What lies behind a rejected
token is not counted at all: neither as wrong, which would teach that late tokens are bad, nor as right.

Every a_i is a Beta posterior mean (hits + w m) / (tries + w) with fading counts. The prior mean m comes from the next
wider level, without what the narrower level counts itself:

    all rounds of a drafter  ->  its rounds with this hint  ->  those of this request

A request's prior counts for many rounds where requests are alike, for few where they differ, and never for more than
those that it rests on (empirical Bayes). Which of the two holds is seen for each drafter: by the weight that has
predicted its rounds better.
"""

import math
from collections.abc import Sequence as Seq
from itertools import chain, repeat
from typing import final

from ..core.round import Round

PRIOR = 0.7
"""Assumed acceptance of a new drafter: high enough for it to be tried."""
WEIGHT = 3.0
"""Rounds that a prior counts for."""
REQUEST_WEIGHTS = WEIGHT, 24.0
"""The same for a request's prior, where requests differ and where they are alike."""
HALF_LIFE, REQUEST_HALF_LIFE = 128.0, 16.0  # rounds of the drafter
IMPOSSIBLE = 1e-3
"""No chance is taken for smaller."""
NODES_PER_LEVEL = 3.0
"""Assumed nodes at each depth of a drafter of trees that has not drafted yet."""


@final
class Counts:
    """Hits and tries of each position, fading with every round added."""

    __slots__ = ("_fade", "hits", "tries")

    def __init__(self, half_life: float, hits: Seq[float] = (), tries: Seq[float] = ()):
        self.hits, self.tries = list(hits), list(tries)
        self._fade = 0.5 ** (1 / half_life)

    @property
    def columns(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return tuple(self.hits), tuple(self.tries)

    def add(self, accepted: int, rejected: bool) -> None:
        """Count `accepted` positions as hits and, if `rejected`, the next one as a miss."""
        fade, missing = self._fade, accepted + 1 - len(self.tries)
        if missing > 0:
            self.hits += [0.0] * missing
            self.tries += [0.0] * missing
        for i in range(len(self.tries)):
            is_hit = i < accepted
            self.hits[i] = self.hits[i] * fade + is_hit
            self.tries[i] = self.tries[i] * fade + (is_hit or (rejected and i == accepted))

    def num_rounds(self, less: "Counts | None" = None) -> float:
        """The rounds that are remembered, without those of a part."""
        return max(0.0, sum(self.tries[:1]) - (sum(less.tries[:1]) if less is not None else 0.0))

    def refine(self, prior: list[float], less: "Counts | None" = None, weight: float = WEIGHT) -> list[float]:
        """The posterior mean of each position from its prior mean; a change at one also shifts those behind it.

        less: a part of these counts that is left out. weight: the rounds that the prior counts for.
        """
        hits, tries = self.hits, self.tries
        if less is not None:
            tries = [max(0.0, a - b) for a, b in zip(tries, chain(less.tries, repeat(0.0)), strict=False)]
            hits = [
                min(max(0.0, a - b), n) for a, b, n in zip(hits, chain(less.hits, repeat(0.0)), tries, strict=False)
            ]
        refined, shift = list[float](), 1.0
        for mean, hit, tried in zip(prior, chain(hits, repeat(0.0)), chain(tries, repeat(0.0)), strict=False):
            value = (hit + weight * min(mean * shift, 1.0)) / (tried + weight)
            refined.append(value)
            shift = value / mean if mean > 0 else 1.0
        return refined


@final
class Acceptance:
    """a_i of every drafter, by hint and by request."""

    def __init__(self, depth: int):
        self._flat = [PRIOR] * depth
        self.counts: dict[str, dict[str, Counts]] = {}  # by drafter and hint, under "" those of all hints
        self._losses: dict[str, list[float]] = {}  # by drafter: fading, of each of `REQUEST_WEIGHTS`
        # By drafter, then slot and hint: the means before what is recent in the request, until they may change.
        self._priors: dict[str, dict[tuple[int, int], list[float]]] = {}
        # By slot: recent counts of the request, and its part in the counts of the hint.
        self._requests: dict[int, dict[tuple[str, int], tuple[Counts, Counts]]] = {}

    def expected(self, slot: int, source: str, hint: int, most: float | None = None) -> list[float]:
        """a_1, a_2, ... for this request now. most: one of `REQUEST_WEIGHTS`, None: the better one."""
        means = self._prior(slot, source, hint)
        recent, _ = self._requests.get(slot, {}).get((source, hint), (None, None))
        return means if recent is None else recent.refine(means, weight=self._weight(slot, source, hint, most))

    def _prior(self, slot: int, source: str, hint: int) -> list[float]:
        known = self._priors.setdefault(source, {})
        if (slot, hint) not in known:
            means, counts = self._flat, self.counts.get(source, {})
            _, part = self._requests.get(slot, {}).get((source, hint), (None, None))
            for one, less in ((counts.get(""), counts.get(str(hint))), (counts.get(str(hint)), part)):
                means = means if one is None else one.refine(means, less)
            known[slot, hint] = means
        return known[slot, hint]

    def after(self, slot: int, source: str, hint: int, good: float, bad: float) -> list[float]:
        """The same after further rounds of this request: `good` ones without a rejected token, and `bad` ones.

        They count as where requests differ, since what was bad is tried by this.
        """
        recent, _ = self._requests.get(slot, {}).get((source, hint), (None, None))
        tries, weight = () if recent is None else recent.tries, self._weight(slot, source, hint, REQUEST_WEIGHTS[0])
        means = enumerate(self.expected(slot, source, hint))
        weights = ((mean, weight + (tries[i] if i < len(tries) else 0.0)) for i, mean in means)
        return [(mean * weight + good) / (weight + good + bad) for mean, weight in weights]

    def _weight(self, slot: int, source: str, hint: int, most: float | None = None) -> float:
        """The rounds that a request's prior counts for: both its own uncertainty and `most` bound them."""
        losses, counts = self._losses.get(source), self.counts.get(source, {}).get(str(hint))
        _, part = self._requests.get(slot, {}).get((source, hint), (None, None))
        if most is None:
            most = min(zip(losses, REQUEST_WEIGHTS, strict=True))[1] if losses else REQUEST_WEIGHTS[0]
        return 1 / (1 / most + 1 / (WEIGHT + (counts.num_rounds(part) if counts is not None else 0.0)))

    def _loss(self, slot: int, record: Round, depth: int, most: float) -> float:
        """Minus the logarithm of the chance that the prior and the rounds before gave to the result of a round."""
        means, accepted = self.expected(slot, record.source, record.hint, most), record.num_accepted
        chances = means[:accepted] + [1 - mean for mean in means[accepted:depth][:1]]
        return -sum(math.log(max(chance, IMPOSSIBLE)) for chance in chances)

    def observe(self, slot: int, record: Round, depth: int) -> None:
        """Count a round that had a budget of `depth`."""
        if (record.source, record.hint) in self._requests.get(slot, {}):
            losses = self._losses.setdefault(record.source, [0.0 for _ in REQUEST_WEIGHTS])
            for i, most in enumerate(REQUEST_WEIGHTS):
                losses[i] = losses[i] * 0.5 ** (1 / HALF_LIFE) + self._loss(slot, record, depth, most)
        known, mine = self.counts.setdefault(record.source, {}), self._requests.setdefault(slot, {})
        for counts in (
            known.setdefault("", Counts(HALF_LIFE)),
            known.setdefault(str(record.hint), Counts(HALF_LIFE)),
            *mine.setdefault((record.source, record.hint), (Counts(REQUEST_HALF_LIFE), Counts(HALF_LIFE))),
        ):
            counts.add(record.num_accepted, record.num_accepted < depth)
        self._priors.pop(record.source, None)

    def tries(self, source: str) -> float:
        """Rounds of this drafter that are remembered."""
        counts = self.counts.get(source, {}).get("")
        return counts.tries[0] if counts is not None and counts.tries else 0.0

    def release(self, slot: int) -> None:
        self._requests.pop(slot, None)
        self._priors.clear()


@final
class DraftSize:
    """Nodes and levels that one drafter uses of a budget, by depth, fading."""

    def __init__(self, nodes_per_level: float, columns: Seq[Seq[float]] = ()):
        self._first = nodes_per_level
        self._fade = 0.5 ** (1 / HALF_LIFE)
        self.rounds, self.nodes, self.levels = [list(column) for column in columns] or [[], [], []]
        self._totals: tuple[list[float], list[float]] | None = None

    @property
    def columns(self) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        return tuple(self.rounds), tuple(self.nodes), tuple(self.levels)

    def observe(self, record: Round, depth: int, levels: int, masks: float = 0.0) -> None:
        """Count a round that had a budget of `depth` and took `levels` drafting steps.

        masks: the masks for each depth, which are counted as nodes.
        """
        for column in (self.rounds, self.nodes, self.levels):
            column[:] = [value * self._fade for value in column] + [0.0] * (depth - len(column))
        for i in range(depth):
            self.rounds[i] += 1
            self.levels[i] += i < levels
            self.nodes[i] += masks
        depths = [0]
        for parent in record.parents[1:]:
            depths.append(depths[parent] + 1)
            self.nodes[min(depths[-1], depth) - 1] += 1
        self._totals = None

    def totals(self, depth: int) -> tuple[list[float], list[float]]:
        """Expected nodes and levels of budgets of depth 0 to `depth`; a depth never drafted is as the one before."""
        if self._totals is None or len(self._totals[0]) <= depth:
            nodes, levels = [0.0], [0.0]
            at, share = self._first, 1.0
            for i in range(depth):
                if i < len(self.rounds):
                    at = (self.nodes[i] + at) / (self.rounds[i] + 1)
                    share = (self.levels[i] + share) / (self.rounds[i] + 1)
                nodes.append(nodes[-1] + at)
                levels.append(levels[-1] + share)
            self._totals = nodes, levels
        return self._totals
