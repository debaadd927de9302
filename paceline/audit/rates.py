"""Rates and times of a server, with 95% intervals."""

import math
import statistics
from collections.abc import Sequence

from ..measure.summary import speedup


def interval(
    base: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]], seed: int
) -> tuple[float, float | None, float | None]:
    """The ratio of pooled rates and its 95% interval, see `measure.summary.speedup`."""
    found = speedup(base, other, seed)
    return float(found["speedup"] or 0.0), found["speedup_low"], found["speedup_high"]


def median_interval(ordered: Sequence[float]) -> tuple[float, float | None, float | None] | None:
    """The median of ordered values, and order statistics that hold it in at least 95 of 100 cases."""
    if not ordered:
        return None
    size, mass, low = len(ordered), 0.0, -1
    for k in range(size // 2):
        mass += math.comb(size, k) / 2**size
        if mass > 0.025:
            break
        low = k
    if low < 0:
        return statistics.median(ordered), None, None
    return statistics.median(ordered), ordered[low], ordered[size - 1 - low]
