"""The mathematics of the lossless rules, and the ratio rules for the children of one node.

    rule                          drawn how                           one candidate is
    `iid`                  R4     each from q, independently          R1, speculative sampling
    `without_replacement`  R5     each from q less its predecessors   R1
    `point_mass`           R3     not at all, or unknown              R2, sample and match

p is the target's distribution and q the draft's; both are non-negative and sum to 1. Everything runs unchanged on
float64 tensors, as the verifiers use it, and on numpy arrays of `fractions.Fraction`, as the tests enumerate it: what
is proved exactly is what runs. Proofs: docs/exactness.md.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TypeVar, final

import numpy as np
import torch
from jaxtyping import Float64, Shaped
from torch import Tensor

from ..core.rng import Purpose, inverse_cdf, uniforms
from ..errors import DraftError

Vector = TypeVar("Vector", Float64[Tensor, " V"], Shaped[np.ndarray, " V"])
"""A distribution over V tokens: float64 numbers, or exact fractions."""

Real = int | float | Fraction


def probability(p: Vector, token: int) -> Real:
    """p(token) as a Python number."""
    value = p[token]
    return value.item() if isinstance(value, Tensor) else value


def acceptance(p: Vector, q: Vector, token: int) -> Real:
    """min(1, p(x) / q(x)): the chance that a token x drawn from q is accepted. Leviathan et al. 2211.17192,
    algorithm 1.

    Errors: DraftError where q(x) = 0, since such a token cannot have been drawn from q.
    """
    mass = probability(q, token)
    if mass <= 0:
        raise DraftError(
            "a drafted token has probability zero under its own distribution q",
            got=f"token {token}, q = {mass}",
            fix="hand over the very q the token was drawn from, or declare Law.POINT_MASS",
        )
    return min(1, probability(p, token) / mass)


def residual(p: Vector, q: Vector) -> Vector:
    """norm(max(p - q, 0)): the distribution of the token after a rejected draw from q. 2211.17192, eq. 4.

    Where p = q no rejection can happen; p itself is returned, so that rounding cannot make a NaN.
    """
    owed = p - q
    return _normalised(owed * (owed > 0), otherwise=p)


def without(p: Vector, token: int) -> Vector:
    """The distribution p with one token taken out, renormalised; p itself where nothing else has mass.

    On q it is the next draw without replacement; on p it is the residual against a point mass on `token`, since
    max(p - 1[x = token], 0) is p with that entry at zero.
    """
    rest = p * 1  # a copy, in both kinds of arithmetic
    rest[token] = 0
    return _normalised(rest, otherwise=p)


def _normalised(weights: Vector, otherwise: Vector) -> Vector:
    mass = weights.sum()
    if mass > 0:
        return weights / mass  # pyright: ignore[reportReturnType]  # numpy does not say what object arrays divide to
    return otherwise


class Chance(ABC):
    """The random decisions of one position: verifiers take counter-based noise, the tests every branch in turn."""

    @abstractmethod
    def coin(self, probability: Real) -> bool:
        """True with this probability, independently of every earlier answer."""

    @abstractmethod
    def draw(self, weights: Vector) -> int:
        """A token with probability in proportion to its weight."""


@final
class Keyed(Chance):
    """Draws from (seed, absolute position): one acceptance number per sibling, one number to recover.

    The two purposes are disjoint streams, and a position is decided once, so no number is used twice.

    seed: the seed of the request.
    position: the position of the token being decided.
    siblings: the most acceptance numbers of a position.
    """

    def __init__(self, seed: int, position: int, siblings: int):
        self._seed, self._position = torch.tensor([seed]), torch.tensor([[position]])
        self._coins = iter([float(u) for u in self._numbers(Purpose.ACCEPT, siblings)] if siblings else [])

    def _numbers(self, purpose: Purpose, count: int) -> Float64[Tensor, " C"]:
        return uniforms(self._seed, self._position, purpose, count)[0, 0]

    def coin(self, probability: Real) -> bool:
        """U <= probability: a certain token is always accepted and an impossible one never, for U in (0, 1]."""
        return next(self._coins) <= probability

    def draw(self, weights: Vector) -> int:
        """Inverse of the cumulative distribution at U."""
        assert isinstance(weights, Tensor)
        return int(inverse_cdf(weights, self._numbers(Purpose.RECOVER, 1)))


Coin = Callable[[Real], bool]


def iid(p: Vector, q: Vector, candidates: Sequence[int], coin: Coin) -> tuple[int | None, Vector]:
    """R1 for one candidate (Leviathan et al. 2211.17192, Chen et al. 2302.01318), R4 for several.

    R4 is the multi-step sampling of SpecInfer (Miao et al. 2305.09781, algorithm 2): the same q every time, against
    what p still owes. A token may be offered twice.
    """
    for index, token in enumerate(candidates):
        if coin(acceptance(p, q, token)):
            return index, p
        p = residual(p, q)
    return None, p


def without_replacement(p: Vector, q: Vector, candidates: Sequence[int], coin: Coin) -> tuple[int | None, Vector]:
    """R5: recursive rejection sampling (Jeon et al. 2402.14160; EAGLE, Li et al. 2401.15077).

    After a rejection q loses the token and is renormalised, because that distribution is the one the next candidate
    came from. Errors: DraftError where a token comes twice.
    """
    for index, token in enumerate(candidates):
        if token in candidates[:index]:
            raise DraftError("siblings drawn without replacement are not distinct", got=f"token {token} twice")
        if coin(acceptance(p, q, token)):
            return index, p
        p, q = residual(p, q), without(q, token)
    return None, p


def point_mass(p: Vector, candidates: Sequence[int], coin: Coin) -> tuple[int | None, Vector]:
    """R3: candidates fixed before the target's randomness, each a distribution with all its mass on itself.

    The same as drawing y from p and looking for it among them (R2). A repeated token has no mass left and is skipped.
    """
    for index, token in enumerate(candidates):
        if coin(probability(p, token)):
            return index, p
        p = without(p, token)
    return None, p
