"""What a drafter's confidences are worth: a calibration of the product of confidences along a path.

A drafter that is too sure at every node is far too sure of a path, so the product is calibrated as a whole. In each
bucket of products the ratio of hits to expected hits is learnt; a bucket with little evidence follows the one above.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import final

from ..core.round import Round

EDGES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.7, 0.9)
BUCKETS = len(EDGES) + 1
HIGHEST = 0.3
"""The largest `min_prob` above the price: a tree is never pruned to nothing because of a doubtful calibration."""
_WEIGHT = 4.0  # expected hits that the bucket above counts for; where evidence is independent, tries
_MIDDLES = [(low + high) / 2 for low, high in pairwise((0.0, *EDGES, 1.0))]
_FADE = 0.5 ** (1 / 256)  # per round; calibration belongs to the drafter, not to the text


@final
class PathOdds:
    """hits / expected hits by bucket of the product of confidences, fading.

    independent: whether each count is evidence by itself, as the nodes of one tree are not. Then a drafter that is
        right more often than it says is also expected to be so on longer paths, where the ratio grows with every token.
    """

    def __init__(self, hits: Seq[float] = (), expected: Seq[float] = (), *, independent: bool = False):
        self.independent = independent
        self.hits, self.expected = list(hits) or [0.0] * BUCKETS, list(expected) or [0.0] * BUCKETS
        self._ratios: list[float] | None = None

    def fade(self) -> None:
        """Let a round pass. Buckets that are no longer drafted fade too, so that they are tried again."""
        self.hits = [hits * _FADE for hits in self.hits]
        self.expected = [expected * _FADE for expected in self.expected]
        self._ratios = None

    def add(self, product: float, hit: bool) -> None:
        bucket = bisect_right(EDGES, product)
        self.hits[bucket] += hit
        self.expected[bucket] += product
        self._ratios = None

    def _of_buckets(self) -> list[float]:
        if self._ratios is None:
            ratio, ratios = 1.0, list[float]()
            for bucket in reversed(range(BUCKETS)):
                weight = _WEIGHT
                if self.independent:
                    weight *= _MIDDLES[bucket]
                    if ratio > 1:  # and so not in the first bucket
                        ratio **= min(2.0, math.log(_MIDDLES[bucket]) / math.log(_MIDDLES[bucket + 1]))
                ratio = (self.hits[bucket] + weight * ratio) / (self.expected[bucket] + weight)
                ratios.append(ratio)
            self._ratios = ratios[::-1]
        return self._ratios

    def chance(self, product: float) -> float:
        """The calibrated probability of a path with this product."""
        return min(1.0, product * self._of_buckets()[bisect_right(EDGES, product)])

    def min_prob(self, chance: float) -> float:
        """The smallest product whose calibrated probability, and that of all larger ones, is at least `chance`."""
        ratios, min_prob = self._of_buckets(), 1.0
        for bucket in range(len(EDGES), -1, -1):
            low = EDGES[bucket - 1] if bucket else 0.0
            wanted = chance / max(ratios[bucket], 1e-9)
            if wanted > low:
                min_prob = min(wanted, min_prob)
                break
            min_prob = low
        return min(min_prob, max(chance, HIGHEST))


@final
class Confidence:
    """Two calibrations of one drafter.

    accepted: whether a node is accepted, by the product along its path.
    deeper: whether some token of the next level is accepted, by the product of the best path so far. The accepted
        path may be another one, so this can exceed what the best path itself is worth.
    """

    def __init__(self, accepted: Seq[Seq[float]] = (), deeper: Seq[Seq[float]] = ()):
        """accepted, deeper: hits and expected hits by bucket, as `columns` gives them."""
        self.accepted, self.deeper = PathOdds(*accepted), PathOdds(*deeper, independent=True)

    @property
    def columns(self) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
        both = {"accepted": self.accepted, "deeper": self.deeper}
        return {name: (tuple(one.hits), tuple(one.expected)) for name, one in both.items()}

    def observe(self, record: Round, passed: Seq[float]) -> None:
        """Count every node of a round, and every level that was drafted from a best path with the product `passed`."""
        self.accepted.fade()
        self.deeper.fade()
        path, products = set(record.path), path_products(record)
        for node in range(1, len(products)):
            self.accepted.add(products[node], node in path)
        for level, best in enumerate(passed, start=1):
            self.deeper.add(best, record.num_accepted > level)


def path_products(record: Round) -> list[float]:
    """The product of confidences along the path to each node, root first (1.0); all 1.0 where there are none."""
    products = [1.0]
    if not record.confidences:
        return products * len(record.parents)
    for parent, confidence in zip(record.parents[1:], record.confidences, strict=True):
        products.append(products[parent] * confidence)
    return products
