"""Exact distributions: run a program once for every way its random decisions can fall, and add up the probabilities."""

from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from typing import final

import numpy as np
from torch import Tensor

from paceline.verify.rejection import Chance, Real, Vector

Weights = dict[Hashable, Real]


@final
class Scripted(Chance):
    """Follows a script of decisions, then takes the first way of each new one and notes the others."""

    def __init__(self, script: tuple[int, ...]):
        self.script, self.taken, self.weight = script, 0, Fraction(1)
        self.branches: list[tuple[int, ...]] = []

    def _pick(self, options: list[tuple[int, Real]]) -> int:
        options = [(value, weight) for value, weight in options if weight > 0]
        if self.taken == len(self.script):
            self.branches += [(*self.script, other) for other in range(1, len(options))]
            self.script = (*self.script, 0)
        value, weight = options[self.script[self.taken]]
        self.taken += 1
        self.weight *= weight
        return value

    def coin(self, probability: Real) -> bool:
        return bool(self._pick([(1, probability), (0, 1 - probability)]))

    def draw(self, weights: Vector) -> int:
        numbers = weights.tolist()
        total = sum(numbers)
        return self._pick([(token, number / total) for token, number in enumerate(numbers)])


def output_distribution(program: Callable[[Chance], Hashable]) -> Weights:
    """The distribution of what `program` returns: exact where its probabilities are fractions."""
    found: Weights = {}
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        chance = Scripted(scripts.pop())
        outcome = program(chance)
        found[outcome] = found.get(outcome, 0) + chance.weight
        scripts += chance.branches
    return found


def distance(one: Weights, other: Weights) -> Real:
    """Total variation."""
    return sum(abs(one.get(key, 0) - other.get(key, 0)) for key in {*one, *other}) / 2


def exact(weights: Sequence[int | Fraction]) -> np.ndarray:
    """Weights as fractions that add up to 1, as the rules of `verify` take them."""
    total = sum(map(Fraction, weights))
    return np.array([Fraction(weight) / total for weight in weights], dtype=object)


def as_weights(p: np.ndarray | Tensor) -> Weights:
    return {token: mass for token, mass in enumerate(p.tolist()) if mass > 0}
