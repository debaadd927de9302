"""How likely drafted tokens are to stand, learnt from the nodes that verification visited and from no others.

A token behind a rejected one was never judged: counting it as wrong would teach that late tokens are bad, counting it
as right that they are good. Every estimate below is a Beta posterior mean (hits + w m) / (tries + w) with fading
counts, where the prior mean m comes from the next wider level:

    all rounds of a drafter  ->  its rounds with this hint  ->  those of this very request

Each level leaves out what the next one counts itself: evidence must not be its own prior.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence as Seq
from typing import final

from ..core.outputs import Round

PRIOR = 0.7
"""Acceptance of a drafter nobody has seen yet: hopeful enough to be tried."""
WEIGHT = 3.0
"""Rounds that a prior counts for."""
HALF_LIFE, REQUEST_HALF_LIFE = 64.0, 16.0  # rounds of the drafter


@final
class Counts:
    """Hits and tries of each position, fading with every round added."""

    __slots__ = ("_fade", "hits", "tries")

    def __init__(self, half_life: float, hits: Seq[float] = (), tries: Seq[float] = ()):
        self.hits, self.tries = list(hits), list(tries)
        self._fade = 0.5 ** (1 / half_life)

    def add(self, accepted: int, rejected: bool) -> None:
        """`accepted` positions stood; then one more was tried and failed, if `rejected`."""
        fade, missing = self._fade, accepted + 1 - len(self.tries)
        if missing > 0:
            self.hits += [0.0] * missing
            self.tries += [0.0] * missing
        for i in range(len(self.tries)):
            stood = i < accepted
            self.hits[i] = self.hits[i] * fade + stood
            self.tries[i] = self.tries[i] * fade + (stood or (rejected and i == accepted))

    def refine(self, prior: list[float], less: "Counts | None" = None) -> list[float]:
        """The posterior of each position given the prior of each; what one position shows shifts those behind it.

        less: a part of these counts that is left out.
        """
        hits, tries = self.hits, self.tries
        if less is not None:
            both = range(min(len(tries), len(less.tries)))
            tries = [max(0.0, tries[i] - less.tries[i]) for i in both] + tries[len(both) :]
            hits = [min(max(0.0, hits[i] - less.hits[i]), tries[i]) for i in both] + hits[len(both) :]
        refined, shift, known = list[float](), 1.0, len(tries)
        for i, mean in enumerate(prior):
            shifted = min(mean * shift, 1.0)
            value = (hits[i] + WEIGHT * shifted) / (tries[i] + WEIGHT) if i < known else shifted
            refined.append(value)
            shift = value / mean if mean > 0 else 1.0
        return refined


@final
class Acceptance:
    """a_i, the chance that the i-th drafted token stands given that those before it did."""

    def __init__(self, depth: int):
        self._flat = [PRIOR] * depth
        self.sources: dict[str, Counts] = {}
        self.classes: dict[tuple[str, int], Counts] = {}  # by (source, hint)
        # by slot: what the request has lately shown, and its part in the counts of the class
        self._requests: dict[int, dict[tuple[str, int], tuple[Counts, Counts]]] = {}

    def expected(self, slot: int, source: str, hint: int) -> list[float]:
        """a_1, a_2, ... for this request now."""
        own_class = self.classes.get((source, hint))
        lately, part = self._requests.get(slot, {}).get((source, hint), (None, None))
        means = self._flat
        if source in self.sources:
            means = self.sources[source].refine(means, less=own_class)
        if own_class is not None:
            means = own_class.refine(means, less=part)
        return means if lately is None else lately.refine(means)

    def of_source(self, source: str) -> list[float]:
        """a_1, a_2, ... over all requests."""
        return self.sources[source].refine(self._flat) if source in self.sources else self._flat

    def observe(self, slot: int, record: Round) -> None:
        """Count the nodes on the walk of one round."""
        accepted, rejected = judged(record)
        key = (record.source, record.hint)
        mine = self._requests.setdefault(slot, {})
        if key not in mine:
            mine[key] = Counts(REQUEST_HALF_LIFE), Counts(HALF_LIFE)
        for counts in (
            self.sources.setdefault(record.source, Counts(HALF_LIFE)),
            self.classes.setdefault(key, Counts(HALF_LIFE)),
            *mine[key],
        ):
            counts.add(accepted, rejected)

    def tries(self, source: str) -> float:
        """Rounds of this drafter that are remembered."""
        counts = self.sources.get(source)
        return counts.tries[0] if counts is not None and counts.tries else 0.0

    def release(self, slot: int) -> None:
        """Forget the request in this slot."""
        self._requests.pop(slot, None)


def judged(record: Round) -> tuple[int, bool]:
    """(positions that stood, whether the walk then met candidates and refused them)."""
    last = record.path[-1] if record.path else 0
    return record.num_accepted, last in record.parents


@final
class Calibration:
    """What a drafter's confidence is worth: acceptance by bucket of confidence; before evidence, the confidence."""

    EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)

    def __init__(self, hits: Seq[float] = (), tries: Seq[float] = ()):
        size = len(self.EDGES) + 1
        self.hits, self.tries = list(hits) or [0.0] * size, list(tries) or [0.0] * size
        self._fade = 0.5 ** (1 / HALF_LIFE)

    def chance(self, confidence: float) -> float:
        """That a token stands, its predecessors standing."""
        bucket = bisect_right(self.EDGES, confidence)
        return (self.hits[bucket] + WEIGHT * confidence) / (self.tries[bucket] + WEIGHT)

    def chance_of_all(self, confidences: Seq[float]) -> float:
        """That a whole chain stands."""
        return math.prod(self.chance(c) for c in confidences)

    def observe(self, record: Round) -> None:
        """Every candidate under the root or an accepted node was judged, up to the one that stood."""
        walk = {0, *record.path}
        for node, (parent, confidence) in enumerate(zip(record.parents[1:], record.confidences, strict=True), start=1):
            if parent in walk:
                bucket = bisect_right(self.EDGES, confidence)
                self.hits[bucket] = self.hits[bucket] * self._fade + (node in walk)
                self.tries[bucket] = self.tries[bucket] * self._fade + 1
