"""Chi-square, for what cannot be enumerated. Seeds are fixed, so a test's verdict never changes by chance."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping

import torch

FALSE_ALARM = 1e-6
"""The chance that right code would have failed a test, had its seeds been drawn anew."""


def chi_square_p(observed: Iterable[Hashable], expected: Mapping[Hashable, float]) -> float:
    """p-value of a sample against a distribution; cells are merged until each expects 5 or more."""
    counts = Counter(observed)
    total = sum(counts.values())
    if any(key not in expected for key in counts):
        return 0.0
    cells: list[list[float]] = []
    for key in sorted(expected, key=lambda key: expected[key]):
        cell = [float(counts[key]), total * float(expected[key])]
        if cells and cells[-1][1] < 5:
            cells[-1] = [one + other for one, other in zip(cells[-1], cell, strict=True)]
        else:
            cells.append(cell)
    if len(cells) == 1:
        return 1.0
    statistic = sum((seen - due) ** 2 / due for seen, due in cells)
    return tail(statistic, len(cells) - 1)


def tail(statistic: float, freedom: int) -> float:
    """P(chi-square with this many degrees of freedom > statistic)."""
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), torch.tensor(statistic / 2.0).double()))
