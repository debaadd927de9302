"""Where the random decisions of a ratio rule come from.

Two questions are asked: does a token stand (`coin`), and which token is emitted instead (`draw`). The verifiers answer
from counter-based noise; the law tests answer with every branch in turn, which turns the same code into an exact
enumeration of its own output law.
"""

from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from ..core.rng import Purpose, uniforms
from .laws import Real, Vector


class Chance(ABC):
    """Answers the random questions of one position, in the order they are asked."""

    @abstractmethod
    def coin(self, probability: Real) -> bool:
        """True with this probability, independently of every earlier answer."""

    @abstractmethod
    def draw(self, weights: Vector) -> int:
        """A token with probability in proportion to its weight."""


@final
class Keyed(Chance):
    """Answers from (seed, absolute position): one acceptance number per sibling, one number to recover.

    seed: of the request. position: of the token being decided. siblings: the most coins that may be asked for.
    The two purposes are disjoint streams, and a position is decided once, so no number answers two questions.
    """

    def __init__(self, seed: int, position: int, siblings: int):
        self._seed, self._position = torch.tensor([seed]), torch.tensor([[position]])
        self._coins = iter(self._numbers(Purpose.ACCEPT, siblings))

    def _numbers(self, purpose: Purpose, count: int) -> list[float]:
        return [float(u) for u in uniforms(self._seed, self._position, purpose, count)[0, 0]] if count else []

    def coin(self, probability: Real) -> bool:
        """U <= probability: a certain token always stands and an impossible one never, for U in (0, 1]."""
        return next(self._coins) <= probability

    def draw(self, weights: Vector) -> int:
        """Inverse of the cumulative law at U."""
        assert isinstance(weights, Tensor)
        return inverse_cdf(weights, self._numbers(Purpose.RECOVER, 1)[0])


def inverse_cdf(weights: Float64[Tensor, " V"], u: float) -> int:
    """The first token whose cumulative weight reaches u times the total; never one of weight zero, for u in (0, 1]."""
    cumulative = weights.cumsum(0)
    return int(torch.searchsorted(cumulative, u * cumulative[-1]))
