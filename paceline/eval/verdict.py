"""Two answers that should be one: the same, told apart by a rounding tie, or a bug."""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum

TIE = 4.0
"""Gaps that rounding can close, in units of the noise of one score."""
TYPICAL, WORST = 2.0, 4.0
"""Deviations that rounding explains, see `Deviation`; sound engines were seen at up to 1.4 and 2.4."""


class Verdict(Enum):
    """What a comparison came to."""

    IDENTICAL = "identical"
    NEAR_TIE = "near_tie"  # rounding decided between two tokens that are as good as equal
    BUG = "bug"


@dataclass(frozen=True)
class Deviation:
    """How far the scores that an answer was decoded with are from the reference's, in units of the noise.

    typical: root mean square over the positions; about 1 where only rounding differs. worst: of one position, in units
    of the noise where that is largest. regret: the most by which the reference prefers another token to the one that
    was taken, in units of the noise there. typical and worst are None where the answer came without log-probabilities.
    """

    typical: float | None
    worst: float | None
    regret: float

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains it; a NaN is not explained."""
        pairs = ((self.typical, TYPICAL), (self.worst, WORST), (self.regret, TIE))
        return all(value is None or value <= limit for value, limit in pairs)


@dataclass(frozen=True)
class Measured:
    """Two answers held against the reference (`checks.reference`), as far as they have the same past.

    noise: how far rounding moves a score at the last position (root mean square), measured between passes of the
    reference alone. gap: reference score of the plain token less that of the speculative one where the answers part,
    None where they do not. Both in the scores that decide: log-scores, over the temperature if sampled.
    """

    noise: float
    gap: float | None
    plain: Deviation
    speculative: Deviation


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


def classify(
    divergence: Divergence | None, measured: Measured | None, invariant: bool, same_scores: bool = True
) -> tuple[Verdict, str]:
    """The verdict and its reason in words.

    With invariant numerics no bit may differ, so there are no ties. same_scores: whether both sides took their tokens
    from the same log-probabilities, bit for bit, before they part. With fast numerics a near-tie needs a gap that
    rounding can close. With both, scores that are further from the reference than rounding can move them are a bug,
    also where the tokens are the same.
    """
    if invariant and divergence is not None:
        return Verdict.BUG, "with invariant numerics every difference is one"
    if invariant and not same_scores:
        return Verdict.BUG, "the same tokens from other scores, and with invariant numerics no bit may differ"
    for side, deviation in (
        () if measured is None else (("plain", measured.plain), ("speculative", measured.speculative))
    ):
        if not deviation.is_rounding:
            return Verdict.BUG, f"the {side} scores are further from the reference than rounding can move them"
    if divergence is None:
        return Verdict.IDENTICAL, "the same tokens"
    if divergence.plain_token is None or divergence.speculative_token is None or measured is None:
        return Verdict.BUG, "one answer ended where the other went on"
    if measured.gap is None or not (math.isfinite(measured.gap) and math.isfinite(measured.noise)):
        return Verdict.BUG, "a token was emitted that the target forbids"
    if abs(measured.gap) > TIE * measured.noise:
        return Verdict.BUG, "the tokens are further apart than rounding can move them"
    return Verdict.NEAR_TIE, "the tokens are closer than rounding moves them"
