"""Small distributions to test on: random pairs (p, q) with every awkward case, and targets that depend on the path."""

import random
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
from enumeration import exact

PathDistribution = Callable[[tuple[int, ...]], np.ndarray]
"""The tokens so far -> the distribution of the next."""


def random_distribution(rng: random.Random, size: int, zeros: float = 0.25) -> np.ndarray:
    """Small integer weights, so that ties are common; about a quarter of them zero."""
    while True:
        weights = [0 if rng.random() < zeros else rng.randint(1, 6) for _ in range(size)]
        if any(weights):
            return exact(weights)


def one_hot(size: int, token: int) -> np.ndarray:
    return exact([int(token == other) for other in range(size)])


def pairs(count: int, seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Random (p, q) over 3 to 5 tokens; one in two is a special case."""
    rng = random.Random(seed)
    for index in range(count):
        size = 3 + index % 3
        p, q = random_distribution(rng, size), random_distribution(rng, size)
        yield {
            0: lambda p=p: (p, p),
            1: lambda p=p, q=q, size=size: (exact([*p, *[0] * size]), exact([*[0] * size, *q])),  # disjoint supports
            2: lambda q=q, size=size: (one_hot(size, rng.randrange(size)), q),
            3: lambda p=p, size=size: (p, one_hot(size, rng.randrange(size))),
            4: lambda size=size: (exact([1] * size), exact([1] * size)),
        }.get(index % 10, lambda p=p, q=q: (p, q))()


def path_distribution(seed: int, size: int, zeros: float = 0.25) -> PathDistribution:
    """A distribution of the next token for every path: all different."""

    def p(path: tuple[int, ...]) -> np.ndarray:
        return random_distribution(random.Random(f"{seed} {path}"), size, zeros)

    return p


def product_distribution(
    p: PathDistribution, length: int, prefix: tuple[int, ...] = ()
) -> dict[tuple[int, ...], Fraction]:
    """p(x1) p(x2 | x1) ...: the distribution of plain decoding."""
    found = {prefix: Fraction(1)}
    for _ in range(length):
        found = {(*path, x): w * m for path, w in found.items() for x, m in enumerate(p(path).tolist()) if m > 0}
    return found
