"""How likely drafted tokens are to be accepted, how much of a budget a drafter uses, and what confidences are worth.

    a_i       chance that some token of depth i is accepted, given that one of depth i - 1 was
    nodes     drafted nodes of each level (1 for a chain), after the drafter left out what was not worth verifying

A round counts at depth i if its budget reached it and its tokens before i were accepted. What lies behind a rejected
token is not counted at all: neither as wrong, which would teach that late tokens are bad, nor as right. A token behind
the end of the answer counts as rejected, so that drafts of short answers are not expected to bring much.

Every a_i is a Beta posterior mean (hits + w m) / (tries + w) with fading counts. The prior mean m comes from the next
wider level:

    all rounds of a drafter  ->  its rounds of this match class  ->  those of this request
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain, repeat
from typing import final

from ..core.round import Round
from .constants import (
    EDGES,
    HALF_LIFE,
    NODES_PER_LEVEL,
    PRIOR,
    REQUEST_HALF_LIFE,
    REQUEST_WEIGHT,
    WEIGHT,
)
from .profile import Profile

FADE = 0.5 ** (1 / HALF_LIFE)
BUCKETS = len(EDGES) + 1


@final
class Counts:
    """Hits and tries of each position, fading with every round added."""

    __slots__ = ("_fade", "hits", "tries")

    def __init__(self, half_life: float, hits: Sequence[float] = (), tries: Sequence[float] = ()):
        self.hits, self.tries = list(hits), list(tries)
        self._fade = 0.5 ** (1 / half_life)

    def add(self, accepted: int, rejected: bool) -> None:
        """Count `accepted` positions as hits and, if `rejected`, the next one as a miss."""
        fade, missing = self._fade, [0.0] * (accepted + 1 - len(self.tries))
        self.hits = [hits * fade for hits in self.hits] + missing
        self.tries = [tries * fade for tries in self.tries] + missing
        for i in range(accepted):
            self.hits[i] += 1
            self.tries[i] += 1
        self.tries[accepted] += rejected

    def refine(self, prior: Sequence[float], weight: float) -> list[float]:
        """The posterior mean of each position from its prior mean; a change at one also shifts those behind it.

        weight: the rounds that the prior counts for.
        """
        refined, shift = list[float](), 1.0
        hits, tries = chain(self.hits, repeat(0.0)), chain(self.tries, repeat(0.0))
        for mean, hit, tried in zip(prior, hits, tries, strict=False):
            value = (hit + weight * min(mean * shift, 1.0)) / (tried + weight)
            refined.append(value)
            shift = value / mean
        return refined


@final
class PathOdds:
    """A calibration of the product of confidences along a path: hits / expected hits by bucket, fading.

    A drafter that is too sure at every node is far too sure of a path, so the product is calibrated as a whole. A
    bucket with little evidence follows the one above.
    """

    def __init__(self, hits: Sequence[float] = (), expected: Sequence[float] = ()):
        self.hits, self.expected = list(hits) or [0.0] * BUCKETS, list(expected) or [0.0] * BUCKETS
        self._ratios = [1.0] * BUCKETS
        self.observe((), ())

    def observe(self, products: Sequence[float], hits: Sequence[bool]) -> None:
        """Count the paths of a round. Buckets that are no longer drafted fade, so that they are tried again."""
        self.hits = [value * FADE for value in self.hits]
        self.expected = [value * FADE for value in self.expected]
        for product, hit in zip(products, hits, strict=True):
            bucket = bisect_right(EDGES, product)
            self.hits[bucket] += hit
            self.expected[bucket] += product
        ratio = 1.0
        for bucket in reversed(range(BUCKETS)):
            ratio = (self.hits[bucket] + WEIGHT * ratio) / (self.expected[bucket] + WEIGHT)
            self._ratios[bucket] = ratio

    def chance(self, product: float) -> float:
        """The calibrated probability of a path with this product."""
        return min(1.0, product * self._ratios[bisect_right(EDGES, product)])

    def min_prob(self, chance: float) -> float:
        """The smallest product whose calibrated probability, and that of all larger ones, is at least `chance`."""
        min_prob = 1.0
        for bucket in range(len(EDGES), -1, -1):
            low = EDGES[bucket - 1] if bucket else 0.0
            wanted = chance / max(self._ratios[bucket], 1e-9)
            if wanted > low:
                min_prob = min(wanted, min_prob)
                break
            min_prob = low
        return min_prob


@final
class Confidence:
    """Two calibrations of one drafter.

    accepted: whether a node is accepted, by the product along its path.
    deeper: whether some token of the next level is accepted, by the product of the best path so far. The accepted
        path may be another one, so this can exceed what the best path itself is worth.
    """

    def __init__(self, accepted: Sequence[Sequence[float]] = (), deeper: Sequence[Sequence[float]] = ()):
        """accepted, deeper: hits and expected hits by bucket."""
        self.accepted, self.deeper = PathOdds(*accepted), PathOdds(*deeper)

    @property
    def columns(self) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
        both = {"accepted": self.accepted, "deeper": self.deeper}
        return {name: (tuple(one.hits), tuple(one.expected)) for name, one in both.items()}

    def observe(self, record: Round, passed: Sequence[float]) -> None:
        """Count every node of a round, and every level that was drafted from a best path with the product `passed`."""
        path, products = set(record.path), path_products(record)
        self.accepted.observe(products[1:], [node in path for node in range(1, len(products))])
        self.deeper.observe(passed, [record.num_accepted > level for level in range(1, len(passed) + 1)])


@final
class Odds:
    """All that is known of the drafters' tokens, by drafter, match class (`DraftOptions.hint`) and request (slot)."""

    def __init__(self, depth: int, given: Profile):
        self._flat = [PRIOR] * depth
        self.counts = {
            source: {hint: Counts(HALF_LIFE, *table) for hint, table in tables.items()}
            for source, tables in given.acceptance.items()
        }  # under "" those of all classes
        self.nodes = dict(given.nodes)  # by source: nodes and levels of its drafts, fading
        self.confidence = {source: Confidence(**columns) for source, columns in given.confidence.items()}
        self._requests: dict[int, dict[tuple[str, int], Counts]] = {}  # by slot

    def expected(self, slot: int, source: str, hint: int, good: float = 0.0, bad: float = 0.0) -> list[float]:
        """a_1, a_2, ... for this request now, after `good` rounds more without a rejected token, and `bad` ones."""
        means, counts = self._flat, self.counts.get(source, {})
        for known in (counts.get(""), counts.get(str(hint))):
            means = means if known is None else known.refine(means, WEIGHT)
        own = self._requests.get(slot, {}).get((source, hint))
        if own is not None:
            means = own.refine(means, REQUEST_WEIGHT)
        if good or bad:
            weight = WEIGHT + (own.tries[0] if own is not None else 0.0)
            means = [(mean * weight + good) / (weight + good + bad) for mean in means]
        return means

    def tries(self, source: str) -> float:
        """Rounds of this drafter that are remembered."""
        counts = self.counts.get(source)
        return counts[""].tries[0] if counts else 0.0

    def nodes_per_level(self, source: str, is_tree: bool) -> float:
        """The nodes that this drafter makes of a level, those included that it leaves out."""
        nodes, levels = self.nodes.setdefault(source, (2 * NODES_PER_LEVEL if is_tree else 2.0, 2.0))
        return nodes / levels

    def observe(
        self, slot: int, record: Round, depth: int, levels: int, passed: Sequence[float], is_over: bool
    ) -> None:
        """Learn from a round that had a budget of `depth`, of which it drafted `levels`.

        passed: the products of confidences of the best paths after which drafting continued.
        is_over: whether the answer ended in this round.
        """
        source, accepted = record.source, record.num_accepted
        useful = min(accepted, record.num_emitted - 1) if is_over else accepted
        known = self.counts.setdefault(source, {})
        for counts in (
            known.setdefault("", Counts(HALF_LIFE)),
            known.setdefault(str(record.hint), Counts(HALF_LIFE)),
            self._requests.setdefault(slot, {}).setdefault((source, record.hint), Counts(REQUEST_HALF_LIFE)),
        ):
            counts.add(useful, useful < depth)
        nodes, all_levels = self.nodes[source]
        self.nodes[source] = nodes * FADE + record.num_nodes, all_levels * FADE + levels
        if record.confidences or source in self.confidence:
            self.confidence.setdefault(source, Confidence()).observe(record, passed)

    def release(self, slot: int) -> None:
        self._requests.pop(slot, None)


def path_products(record: Round) -> list[float]:
    """The product of confidences along the path to each node, root first (1.0); all 1.0 where there are none."""
    products = [1.0]
    if not record.confidences:
        return products * len(record.parents)
    for parent, confidence in zip(record.parents[1:], record.confidences, strict=True):
        products.append(products[parent] * confidence)
    return products
