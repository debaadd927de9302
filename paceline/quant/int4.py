"""INT4 weights in groups, asymmetric, round to nearest: blocks of the native kernels on CPU, nibbles elsewhere.

A group of `group_size` weights of one output row shares a scale s and a zero point z, both in bfloat16:

    code = round((w - min) / s), s = (max - min) / 15        w' = (code - 8) * s + z,  z = min + 8 s

Weights of 3 and 2 bits use the 8 or 4 codes in the middle (s = (max - min) / 7 or / 3). In blocks, 32 weights have a
scale and a zero point of their own, so that larger groups repeat them.
"""

from dataclasses import replace
from typing import cast, final

import torch
from torch import Tensor, nn

from ..kernels.library import BlockFormat
from ..kernels.packing import Blocks, codes_of, nibbles
from .blocks import BlockLinear
from .packed import CodedLinear, PackedLinear, Place, QuantizedLinear, has_kernels, in_place

GROUP_SIZES = (32, 64, 128, 256)
BITS = (4, 3, 2)
SMALLEST_SCALE = 1e-6  # of a group without any spread
_ROWS = 4096  # quantised at once, to keep the float32 copy small


def grid_of(weight: Tensor, group_size: int, bits: int = 4) -> tuple[Tensor, Tensor]:
    """Scales and zero points from the minimum and maximum of each group, [out, in / group_size] each.

    They are rounded to bfloat16 before any code is chosen, so that the codes fit the scale that is really used.
    """
    groups = weight.float().view(len(weight), -1, group_size)
    low, high = groups.amin(-1), groups.amax(-1)
    half = 1 << bits - 1
    scale = ((high - low) / (2 * half - 1)).clamp_(min=SMALLEST_SCALE).bfloat16().float()
    return scale, (low + half * scale).bfloat16().float()


def fitted_grid(weight: Tensor, group_size: int, bits: int) -> tuple[Tensor, Tensor]:
    """Scales and zero points with a small squared error, by alternating between codes and a linear fit.

    The range becomes smaller if that suits the many small weights. With 2 bits the error is about half that of
    `grid_of`.
    """
    groups = weight.float().view(len(weight), -1, group_size)
    scale, zero = grid_of(weight, group_size, bits)
    best, least = (scale, zero), torch.full_like(scale, torch.inf)
    for _ in range(11):  # the first grid, and ten better ones
        codes = codes_on(weight, scale, zero, bits).view_as(groups).float() - 8
        error = (codes * scale[..., None] + zero[..., None] - groups).square().sum(-1)
        better = error < least
        best = torch.where(better, scale, best[0]), torch.where(better, zero, best[1])
        least = torch.where(better, error, least)
        centred = codes - codes.mean(-1, keepdim=True)
        slope = (centred * groups).sum(-1) / centred.square().sum(-1).clamp_min(1e-6)
        scale = slope.clamp_min(SMALLEST_SCALE).bfloat16().float()
        zero = (groups.mean(-1) - scale * codes.mean(-1)).bfloat16().float()
    return best


def codes_on(weight: Tensor, scale: Tensor, zero: Tensor, bits: int = 4) -> Tensor:
    """The nearest code of each weight [out, in] on these grids [out, in / group_size]; int32 in 0..15."""
    groups, half = weight.float().view(*scale.shape, -1), 1 << bits - 1
    codes = ((groups - zero[..., None]) / scale[..., None]).round_().clamp_(-half, half - 1) + 8
    return codes.int().view(weight.shape)


def int4_params(scale: Tensor, zero: Tensor) -> Tensor:
    """Scales and zero points [out, in / group_size] in the kernels' form, bfloat16 [in / group_size, out, 2]."""
    return torch.stack([scale.t(), zero.t()], dim=-1).bfloat16().contiguous()


def quantize_int4(weight: Tensor, group_size: int, bits: int = 4) -> tuple[Tensor, Tensor]:
    """Weight [out, in] -> codes int32 [out, in] in 0..15, scales and zeros bfloat16 [in / group_size, out, 2].

    bits: 4, or 3 or 2, which use 8 or 4 of the 16 codes.
    """
    scale, zero = grid_of(weight, group_size, bits)
    return codes_on(weight, scale, zero, bits), int4_params(scale, zero)


def int4_linear(
    codes: Tensor, params: Tensor, bits: int, bias: Tensor | None, dtype: torch.dtype, place: Place = in_place
) -> QuantizedLinear:
    """A layer with these codes, int32 [out, in], and params, bfloat16 [in / group_size, out, 2].

    dtype: what its weights are read as.
    """
    if not has_kernels(codes.device):
        return Int4Linear(codes, params, bits, bias, dtype)
    blocks = Blocks.of_codes(BlockFormat[f"INT{bits}"], codes - (8 - (1 << bits - 1)), params)
    return BlockLinear(replace(blocks, data=place(blocks.data)), bias, dtype)


def to_int4(linear: nn.Module, group_size: int, bits: int = 4, place: Place = in_place) -> QuantizedLinear:
    """The layer with weights rounded to 4, 3 or 2 bits."""
    weight, bias = cast("Tensor", linear.weight).detach(), cast("Tensor | None", linear.bias)
    codes, params = zip(*(quantize_int4(rows, group_size, bits) for rows in weight.split(_ROWS)), strict=True)
    return int4_linear(torch.cat(codes), torch.cat(params, 1), bits, bias, weight.dtype, place)


def fits_int4(linear: nn.Linear | PackedLinear | QuantizedLinear, group_size: int) -> bool:
    """True iff groups divide the inputs."""
    return linear.in_features % group_size == 0


@final
class Int4Linear(CodedLinear):
    """A linear layer with INT4 weights. scales: words of a scale and a zero point in bfloat16, int32 [out, groups].

    codes: int32 [out, in]. params: as of `quantize_int4`. dtype: what `weight` is read as.
    """

    form = "INT4"

    def __init__(self, codes: Tensor, params: Tensor, bits: int, bias: Tensor | None, dtype: torch.dtype):
        words = params.transpose(0, 1).contiguous().view(torch.int32)[..., 0]
        super().__init__(codes.shape, nibbles(codes.to(torch.uint8)), words, bias)
        self.group_size, self.bits, self._dtype = self.in_features // len(params), bits, dtype

    @property
    def weight(self) -> Tensor:
        """The dequantised weight [out, in], computed on every read."""
        codes = codes_of(self.codes, self.in_features).view(*self.scales.shape, -1)
        scale, zero = self.scales[..., None].view(torch.bfloat16).float().unbind(-1)
        return ((codes.float() - 8) * scale[..., None] + zero[..., None]).flatten(1).to(self._dtype)
