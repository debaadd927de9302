"""The mathematics of losslessness: four pure functions, on which every rule that uses q is built.

They run unchanged on float64 tensors, as the verifiers use them, and on numpy arrays of `fractions.Fraction`, as the
law tests enumerate them: what is proved exactly is what runs. Proofs: docs/exactness.md. Throughout, p is the target's
law and q the draft's; both are non-negative and sum to 1.
"""

from fractions import Fraction
from typing import TypeVar

import numpy as np
from jaxtyping import Float64, Shaped
from torch import Tensor

from ..errors import DraftError

Vector = TypeVar("Vector", Float64[Tensor, " V"], Shaped[np.ndarray, " V"])
"""A law over V tokens: float64 numbers, or exact fractions."""

Real = int | float | Fraction


def probability(p: Vector, token: int) -> Real:
    """p(token) as a Python number."""
    value = p[token]
    return value.item() if isinstance(value, Tensor) else value


def acceptance(p: Vector, q: Vector, token: int) -> Real:
    """min(1, p(x) / q(x)): the chance that a token x drawn from q stands. Leviathan et al. 2211.17192, algorithm 1.

    Errors: DraftError where q(x) = 0, since such a token cannot have been drawn from q.
    """
    mass = probability(q, token)
    if mass <= 0:
        raise DraftError(
            "a drafted token has probability zero under the law it is said to come from",
            got=f"token {token}, q = {mass}",
            fix="hand over the very q the token was drawn from, or declare Law.POINT_MASS",
        )
    return min(1, probability(p, token) / mass)


def residual(p: Vector, q: Vector) -> Vector:
    """norm(max(p - q, 0)): what p still owes once a token drawn from q was rejected. 2211.17192, eq. 4.

    Where p = q no rejection can happen and nothing is owed; p itself is returned, so that rounding cannot make a NaN.
    """
    owed = p - q
    return _normalised(owed * (owed > 0), otherwise=p)


def without(p: Vector, token: int) -> Vector:
    """The law p with one token taken out, renormalised; p itself where nothing else has mass.

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
