"""Two answers that should be one: the same, told apart by a rounding tie, or a bug."""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """What a comparison came to."""

    IDENTICAL = "identical"
    NEAR_TIE = "near_tie"  # rounding decided between two tokens that are as good as equal
    BUG = "bug"


@dataclass(frozen=True)
class Measured:
    """The two rival tokens where two answers part, in decision scores: log-scores, plus the shared noise if sampled.

    gap: score of the plain token less that of the speculative one, in the plain pass.
    noise: how far the two scores move between the plain pass and the pass of many rows, the larger of both.
    rounding: the most that rounding can move a score here; noise above it is no rounding.
    """

    gap: float
    noise: float
    rounding: float


@dataclass(frozen=True)
class Divergence:
    """Where two answers part: index in the answer, and the token on each side (None: that side had ended)."""

    position: int
    plain_token: int | None
    speculative_token: int | None


def first_difference(plain: Seq[int], speculative: Seq[int]) -> Divergence | None:
    """The first place where two answers differ, None where they are equal; one may be the other's beginning."""
    for index, (one, other) in enumerate(zip(plain, speculative, strict=False)):
        if one != other:
            return Divergence(index, one, other)
    short = min(len(plain), len(speculative))
    if len(plain) == len(speculative):
        return None
    return Divergence(
        short,
        plain[short] if short < len(plain) else None,
        speculative[short] if short < len(speculative) else None,
    )


def classify(divergence: Divergence | None, measured: Measured | None) -> tuple[Verdict, str]:
    """The verdict and its reason in words.

    A near-tie needs a gap that the noise can close from both sides, gap <= 2 * noise, and noise that rounding can
    explain: else a fault in the pass of many rows, which moves scores a lot, would excuse itself.
    """
    if divergence is None:
        return Verdict.IDENTICAL, "the same tokens"
    if divergence.plain_token is None or divergence.speculative_token is None or measured is None:
        return Verdict.BUG, "one answer ended where the other went on"
    if not (math.isfinite(measured.gap) and math.isfinite(measured.noise)):
        return Verdict.BUG, "a token was emitted that the target forbids"
    if measured.noise <= 0:
        return Verdict.BUG, "both passes give the same scores, so rounding cannot have decided"
    if measured.noise > measured.rounding:
        return Verdict.BUG, "the pass of many rows gives other scores than rounding can explain"
    if abs(measured.gap) > 2 * measured.noise:
        return Verdict.BUG, "the tokens are further apart than rounding can move them"
    return Verdict.NEAR_TIE, "the tokens are closer than rounding moves them"
