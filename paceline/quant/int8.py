"""INT8 weights: blocks of 32 (Q8_0) for the native kernels on CPU, one scale per output elsewhere."""

from dataclasses import replace
from typing import cast, final

import torch
from torch import Tensor, nn

from ..kernels.library import BlockFormat
from .block_rounding import round_matrix
from .blocks import BlockLinear
from .packed import CodedLinear, PackedLinear, Place, QuantizedLinear, has_kernels, in_place

_PIECE = 4096  # outputs rounded at once, to keep the float32 copy small


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [out, in] -> codes int8 [out, in] in -127..127 and scales float32 [out]."""
    pieces: list[tuple[Tensor, Tensor]] = []
    for rows in weight.detach().split(_PIECE):
        scales = (rows.abs().amax(1).float() / 127).clamp_(min=1e-12)
        pieces.append(((rows / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales))
    return torch.cat([codes for codes, _ in pieces]), torch.cat([scales for _, scales in pieces])


def dequantize_int8(codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 weights [out, in] of the codes."""
    return codes.float() * scales[:, None]


def to_int8(linear: nn.Module, place: Place = in_place) -> QuantizedLinear:
    """The layer with weights rounded to 8 bits."""
    weight, bias = cast("Tensor", linear.weight).detach(), cast("Tensor | None", linear.bias)
    if not has_kernels(weight.device):
        return Int8Linear(weight, bias)
    blocks = round_matrix(BlockFormat.Q8_0, weight, "of a linear layer")
    return BlockLinear(replace(blocks, data=place(blocks.data)), bias, weight.dtype)


def fits_int8(linear: nn.Linear | PackedLinear | QuantizedLinear) -> bool:
    """True iff blocks divide the inputs."""
    return linear.in_features % 32 == 0


@final
class Int8Linear(CodedLinear):
    """A linear layer with INT8 weights, rounded from `weight` [out, in]."""

    form = "INT8"

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__(weight.shape, *quantize_int8(weight), bias)
        self._dtype = weight.dtype

    @property
    def weight(self) -> Tensor:
        """The dequantised weight [out, in], computed on every read."""
        return dequantize_int8(self.codes, self.scales).to(self._dtype)
