"""Chi-square tests of counts: against a known distribution, and of two samples against each other."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

LEAST = 5.0
"""Cells are merged until each expects so many: below that the statistic has another distribution."""


class ChiSquare(NamedTuple):
    """A statistic and its degrees of freedom; those of independent samples add up."""

    value: float = 0.0
    freedom: int = 0

    @property
    def p_value(self) -> float:
        """The probability of a statistic at least as large; 1 without degrees of freedom."""
        return tail(self.value, self.freedom)


def total(parts: Sequence[ChiSquare]) -> ChiSquare:
    """One test of several independent samples."""
    return ChiSquare(sum(part.value for part in parts), sum(part.freedom for part in parts))


def against(seen: Mapping[int, int], probs: Sequence[float]) -> ChiSquare:
    """Counts of cells against their probabilities, after merging the rarest cells until each expects enough."""
    size = sum(seen.values())
    statistic, cells, count, due = 0.0, 0, 0, 0.0
    order = sorted(range(len(probs)), key=lambda cell: probs[cell])
    left = size * sum(probs)
    for cell in order:
        count, due = count + seen.get(cell, 0), due + size * probs[cell]
        left -= size * probs[cell]
        if due >= LEAST and (left >= LEAST or cell == order[-1]):
            statistic += (count - due) ** 2 / due
            cells, count, due = cells + 1, 0, 0.0
    return ChiSquare(statistic, max(cells - 1, 0))


def at_least(seen: Mapping[int, int], floors: Sequence[float]) -> ChiSquare:
    """Counts of cells against probabilities of which only lower bounds are known: those that fit the counts best.

    The statistic is at most that of the true probabilities, so a false alarm is no more likely.
    """
    size = max(sum(seen.values()), 1)

    def fitting(scale: float) -> list[float]:
        return [max(floor, scale * seen.get(cell, 0) / size) for cell, floor in enumerate(floors)]

    return against(seen, fitting(_solved(lambda scale: 1 - sum(fitting(scale)), 1.0)))


def between(cells: Sequence[tuple[int, int]]) -> ChiSquare:
    """Two samples, of which each cell has a pair of counts, against each other."""
    sizes = [sum(pair[side] for pair in cells) for side in (0, 1)]
    if len(cells) < 2 or not all(sizes):
        return ChiSquare()
    both, statistic = sum(sizes), 0.0
    for pair in cells:
        for count, size in zip(pair, sizes, strict=True):
            due = sum(pair) * size / both
            statistic += (count - due) ** 2 / due if due else 0.0
    return ChiSquare(statistic, len(cells) - 1)


def tail(statistic: float, freedom: int) -> float:
    """The upper tail of the chi-square distribution, by its finite sum."""
    if freedom < 1 or statistic <= 0:
        return 1.0
    half, odd = statistic / 2, freedom % 2
    first = math.log(half) / 2 - math.lgamma(1.5) if odd else 0.0
    term, result = first - half, math.erfc(math.sqrt(half)) if odd else 0.0
    for step in range((freedom - odd) // 2):
        result += math.exp(term)
        term += math.log(half) - math.log(step + 1 + odd / 2)
    return min(result, 1.0)


def least_shift(pairs: float, freedom: int, false_alarm: float, power: float = 0.9) -> float:
    """The shift of probability that a test notices with this power, if it leaves a cell of a half.

    pairs: n m / (n + m) for two samples of n and m, n for one of n against a known distribution.
    """
    limit = _solved(lambda x: tail(x, freedom) - false_alarm, freedom + 1000.0)
    quantile = _solved(lambda x: math.erfc(x / math.sqrt(2)) / 2 - (1 - power), 10.0)
    # The non-central distribution, as a normal one of its mean and variance.
    excess = _solved(lambda x: limit - (freedom + x - quantile * math.sqrt(2 * (freedom + 2 * x))), 1e6)
    return min(1.0, math.sqrt(excess / (4 * pairs))) if pairs else 1.0


def _solved(falling, high: float) -> float:
    """Where a falling function is zero, between 0 and `high`."""
    low = 0.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return low
