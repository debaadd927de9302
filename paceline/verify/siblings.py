"""The ratio rules: which of several siblings stands, and the law the target still owes when none does.

    rule                          drawn how                           one candidate is
    `iid`                  R4     each from q, independently          R1, speculative sampling
    `without_replacement`  R5     each from q less its predecessors   R1
    `point_mass`           R3     not at all, or nobody knows         R2, sample and match

Each takes p and q at the parent, the candidates in the order they were drawn, and a coin. It returns the index of the
candidate that stands and None, or None and the law to draw the recovered token from. With no candidate at all that
law is p: the bonus token.
"""

from collections.abc import Callable, Sequence

from ..errors import DraftError
from .laws import Real, Vector, acceptance, probability, residual, without

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

    After a rejection q loses the token and is renormalised, because that law is the one the next candidate came from.
    Errors: DraftError where a token comes twice.
    """
    for index, token in enumerate(candidates):
        if token in candidates[:index]:
            raise DraftError("siblings drawn without replacement are not distinct", got=f"token {token} twice")
        if coin(acceptance(p, q, token)):
            return index, p
        p, q = residual(p, q), without(q, token)
    return None, p


def point_mass(p: Vector, candidates: Sequence[int], coin: Coin) -> tuple[int | None, Vector]:
    """R3: candidates fixed before the target's randomness, each a law with all its mass on itself.

    A child stands with probability sum of p over the distinct candidates, exactly as if y were drawn from p and matched
    (R2). A repeated token owes nothing by then and is skipped.
    """
    for index, token in enumerate(candidates):
        if coin(probability(p, token)):
            return index, p
        p = without(p, token)
    return None, p
