"""FP8 weights (e4m3) with one scale per output, for the kernels of a GPU.

    W = s_w C       x W' = s_w (x C')       C in float8_e4m3fn

Half the bytes of bfloat16; a value keeps 4 significant bits. Codes are widened in registers, so that it needs no card
that multiplies FP8. With inputs of 8 bits, rows are rounded to e4m3, too.
"""

from typing import cast, final

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .packed import CodedLinear, PackedLinear, QuantizedLinear, gpu_kernels

_LARGEST = 448.0  # of e4m3
_PIECE = 4096  # outputs rounded at once, to keep the float32 copy small


def require_fp8(device: torch.device) -> None:
    """Raise `ConfigError` if the device has no kernels for FP8."""
    if gpu_kernels(device) is None:
        expected, fix = "a CUDA device, and Triton", "use weights='int8' or 'int4'"
        raise ConfigError("weights='fp8' cannot be used on this device", got=device.type, expected=expected, fix=fix)


def quantize_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """[R, K] -> codes float8_e4m3fn [R, K] and scales float32 [R, 1]: the largest of a row becomes 448."""
    scales = (values.abs().amax(1, keepdim=True).float() / _LARGEST).clamp_(min=1e-12)
    # Clamped, since FP8 has no infinity: a number that rounding lifts above the largest would become NaN.
    return (values / scales).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scales


def dequantize_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 values [R, K] of the codes."""
    return codes.float() * scales


@final
class Fp8Linear(CodedLinear):
    """A linear layer with FP8 weights. input_bits: 8: its inputs are rounded to FP8, too."""

    form = "FP8"

    def __init__(self, linear: nn.Linear | PackedLinear | QuantizedLinear, input_bits: int = 16):
        weight = cast("Tensor", linear.weight).detach()
        codes, scales = zip(*(quantize_fp8(rows) for rows in weight.split(_PIECE)), strict=True)
        codes, scales = torch.cat(codes).view(torch.uint8), torch.cat(scales)[:, 0]
        super().__init__(weight.shape, codes, scales, linear.bias)
        self.input_bits = input_bits

    @staticmethod
    def fits(linear: nn.Linear | PackedLinear | QuantizedLinear) -> bool:
        """True iff the kernels take this shape."""
        return linear.in_features % 16 == 0

    @property
    def weight(self) -> Tensor:
        """The dequantised weight, bfloat16 [out, in]."""
        return dequantize_fp8(self.codes.view(torch.float8_e4m3fn), self.scales[:, None]).bfloat16()
