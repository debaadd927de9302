"""What the confidence along a path is worth: how often such paths stand, and how often the text goes on behind them.

A drafter that is too sure at every node is far too sure of a path, so the product is calibrated as a whole: in each
bucket of products, hits over hits expected, where little evidence leans on the bucket above.
"""

from bisect import bisect_right
from collections.abc import Sequence as Seq
from typing import final

from ..core.outputs import Round
from .profile import ODDS_BUCKETS

EDGES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.7, 0.9)
assert len(EDGES) + 1 == ODDS_BUCKETS
HIGHEST = 0.3
"""The first token is drafted whatever it takes, so a tree is never pruned to nothing for a doubt of the calibration."""
_WEIGHT = 4.0  # expected hits that the bucket above counts for: nodes of one tree are not independent evidence
_FADE = 0.5 ** (1 / 256)  # a round; calibration is the drafter's, not the text's


@final
class PathOdds:
    """hits / expected by bucket of the product of confidences, fading."""

    def __init__(self, hits: Seq[float] = (), expected: Seq[float] = ()):
        size = len(EDGES) + 1
        self.hits, self.expected = list(hits) or [0.0] * size, list(expected) or [0.0] * size
        self._ratios: list[float] | None = None

    def fade(self) -> None:
        """A round has passed. Buckets that are no longer drafted fade too, so that they are tried again."""
        self.hits = [hits * _FADE for hits in self.hits]
        self.expected = [expected * _FADE for expected in self.expected]
        self._ratios = None

    def add(self, product: float, stood: bool) -> None:
        """One path."""
        bucket = bisect_right(EDGES, product)
        self.hits[bucket] += stood
        self.expected[bucket] += product
        self._ratios = None

    def _of_buckets(self) -> list[float]:
        if self._ratios is None:
            ratio, ratios = 1.0, list[float]()
            for hits, expected in zip(reversed(self.hits), reversed(self.expected), strict=True):
                ratio = (hits + _WEIGHT * ratio) / (expected + _WEIGHT)
                ratios.append(ratio)
            self._ratios = ratios[::-1]
        return self._ratios

    def chance(self, product: float) -> float:
        """That what `add` was told of such paths comes true."""
        return min(1.0, product * self._of_buckets()[bisect_right(EDGES, product)])

    def min_prob(self, chance: float) -> float:
        """The smallest product that is worth `chance`, the larger ones being worth no less."""
        ratios, min_prob = self._of_buckets(), 1.0
        for bucket in range(len(EDGES), -1, -1):
            low = EDGES[bucket - 1] if bucket else 0.0
            wanted = chance / max(ratios[bucket], 1e-9)
            if wanted > low:
                min_prob = min(wanted, min_prob)
                break
            min_prob = low
        return min(min_prob, HIGHEST)


@final
class TreeOdds:
    """Of one drafter. paths: whether a node stands. ahead: whether a level is worth drafting, by the best path so far.

    The walk may leave the best path, so `ahead` may exceed what the path itself is worth.
    """

    def __init__(self, paths: PathOdds | None = None, ahead: PathOdds | None = None):
        self.paths, self.ahead = paths or PathOdds(), ahead or PathOdds()

    def observe(self, record: Round, products: Seq[float], passed: Seq[float]) -> None:
        """Every node of a round, and every level that was drafted after looking at the best path so far (`passed`)."""
        self.paths.fade()
        self.ahead.fade()
        walk = set(record.path)
        for node in range(1, len(products)):
            self.paths.add(products[node], node in walk)
        for level, best in enumerate(passed, start=1):
            self.ahead.add(best, record.num_accepted > level)
