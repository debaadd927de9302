"""Counter-based randomness: every number is a pure function of (seed, absolute position, purpose, index).

There is no state, so the noise of a request depends neither on other rows of the batch, nor on how many tokens a round
emitted, nor on the device. Numbers come from SplitMix64 (Steele, Lea, Flood 2014): a 64-bit mix of a key plus a Weyl
sequence.
"""

from enum import IntEnum
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor


def _signed(value: int) -> int:
    """A 64-bit pattern as torch's signed int64."""
    return value - (1 << 64) if value >= 1 << 63 else value


_WEYL = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


class Purpose(IntEnum):
    """Disjoint streams: no number is ever used for two decisions."""

    TARGET = 1  # the target's own draw at a position, the shared noise of rule R7
    DRAFT = 2  # tokens sampled by a drafter under a ratio rule
    ACCEPT = 3  # acceptance tests
    RECOVER = 4  # the token drawn from the residual, and the bonus token


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift (torch's is arithmetic)."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix_(x: Tensor) -> Tensor:
    """Mix in place: for a whole vocabulary, new tensors would cost more than the arithmetic."""
    x.bitwise_xor_(_shift_right(x, 30)).mul_(_MIX_1)
    x.bitwise_xor_(_shift_right(x, 27)).mul_(_MIX_2)
    return x.bitwise_xor_(_shift_right(x, 31))


@lru_cache(maxsize=8)
def _weyl(count: int, device: torch.device) -> Tensor:
    """1, 2, ..., count times the Weyl constant. Never written to."""
    with torch.inference_mode(False):
        return torch.arange(1, count + 1, dtype=torch.int64, device=device) * _WEYL


def uniforms(
    seeds: Int[Tensor, " B"], positions: Int[Tensor, "B N"], purpose: Purpose, columns: int | Int[Tensor, " C"]
) -> Float[Tensor, "B N C"]:
    """float64 numbers in the open interval (0, 1), C for each row and position.

    seeds: the 64-bit seed of each row.
    positions: the absolute positions of the tokens that the numbers decide.
    columns: how many, or which of them.
    """
    weyl = _weyl(columns, seeds.device) if isinstance(columns, int) else (columns + 1) * _WEYL
    key = _mix_(_mix_(seeds.unsqueeze(1) + positions * _WEYL) ^ (_signed(int(purpose) * _MIX_2 % (1 << 64))))
    bits = _mix_(key.unsqueeze(-1) + weyl)
    bits = bits.bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1)  # 52 bits and a half are exact in float64
    return bits.double().add_(0.5).mul_(2.0**-52)


def gumbel(
    seeds: Int[Tensor, " B"], positions: Int[Tensor, "B N"], purpose: Purpose, columns: int | Int[Tensor, " C"]
) -> Float[Tensor, "B N C"]:
    """float32 standard Gumbel noise: argmax(log p + gumbel) is a draw from p. Arguments as of `uniforms`."""
    exponential = uniforms(seeds, positions, purpose, columns).log_().neg_().float()
    return exponential.clamp_(min=1e-38).log_().neg_()


def inverse_cdf(weights: Float[Tensor, "*R V"], uniform: Float[Tensor, "*R 1"]) -> Int[Tensor, "*R"]:
    """The first token whose cumulative weight reaches `uniform` times the total: never one of weight zero."""
    cumulative = weights.double().cumsum(-1)
    return torch.searchsorted(cumulative, uniform * cumulative[..., -1:]).squeeze(-1)
