"""Exact binomial bounds on a rare event, and a threshold that is valid although it is chosen from the same sample.

Of n independent prompts, k showed the event: the small model was confident and its answer differs. A probability p is
excluded if so few are unlikely under it, P(Bin(n, p) <= k) <= 1 - confidence.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import takewhile
from typing import Annotated, NamedTuple

from pydantic import Field

Share = Annotated[float, Field(gt=0.0, lt=1.0)]
"""A share or a probability, neither 0 nor 1."""
_SLACK = 1 + 1e-9
"""Larger than the rounding error of the sums, so that rounding never makes a bound invalid."""


class Point(NamedTuple):
    """The counts at one threshold."""

    threshold: float
    covered: int  # answers whose confidence is at least the threshold
    differ: int  # covered answers that are not the large model's


def binomial_cdf(k: int, n: int, p: float) -> float:
    """P(Bin(n, p) <= k), by summing its terms from the largest down; relative error about 1e-11 up to n = 1e6."""
    if k < 0:
        return 0.0
    if k >= n or p <= 0.0:
        return 1.0
    if p >= 1.0:
        return 0.0
    if k > n * p:  # sum the tail whose first term is the largest
        return max(0.0, 1.0 - binomial_cdf(n - k - 1, n, 1.0 - p))
    first = math.exp(math.log(math.comb(n, k)) + k * math.log(p) + (n - k) * math.log1p(-p))
    terms = [first]
    for i in range(k, 0, -1):
        terms.append(terms[-1] * i * (1.0 - p) / ((n - i + 1) * p))
        if terms[-1] < 1e-20 * first:
            break  # the others are smaller still
    return min(1.0, math.fsum(terms))


def holds(k: int, n: int, limit: float, confidence: float) -> bool:
    """Whether k of n excludes, at this confidence, every probability above `limit`."""
    return n > 0 and binomial_cdf(k, n, limit) * _SLACK <= 1.0 - confidence


def upper_bound(k: int, n: int, confidence: float) -> float:
    """The largest probability that k of n does not exclude (Clopper and Pearson 1934); 1 without a sample."""
    if k >= n:
        return 1.0
    low, high = k / n, 1.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if holds(k, n, middle, confidence) else (middle, high)
    return high


def prompts_needed(k: int, limit: float, confidence: float) -> int:
    """The smallest n with `holds(k, n, ...)`: the number of prompts needed if k of them show the event."""
    enough = max(1, k)
    while not holds(k, enough, limit, confidence):
        enough *= 2
    return bisect_left(range(enough), True, key=lambda n: holds(k, n, limit, confidence))


def last_that_holds(points: Sequence[Point], n: int, limit: float, confidence: float) -> Point | None:
    """The lowest valid threshold among points with descending thresholds fixed before the data; None: none is valid.

    Each threshold is a hypothesis, "more than `limit` of all prompts get another answer", tested at the level
    1 - confidence, from the strictest threshold down; the first that is not rejected ends it (fixed-sequence testing;
    Angelopoulos et al. 2110.01052, "Learn then Test"; Bates et al. 2101.02703). A wrong threshold is chosen only if
    the first true hypothesis on the way is rejected, which has a probability of at most 1 - confidence, however many
    thresholds there are.
    """
    good = list(takewhile(lambda point: holds(point.differ, n, limit, confidence), points))
    return good[-1] if good else None
