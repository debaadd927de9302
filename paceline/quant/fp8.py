"""FP8 weights (e4m3) with one scale per output; activations are rounded to FP8 too, with one scale per row.

    x = s_x X     W = s_w C     x W' = s_x s_w (X C')        X, C in float8_e4m3fn, sums in float32 on tensor cores

Half the bytes of bfloat16 and no unpacking; a value keeps 4 significant bits. Tested with the same calls on CPU
tensors; it needs a card of compute capability 8.9 or later (Ada, Hopper, Blackwell).
"""

from typing import cast, final

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .packed import PackedLinear, QuantizedLinear

_LARGEST = 448.0  # of e4m3
_CAPABILITY = (8, 9)
_PIECE = 4096  # outputs rounded at once, to keep the float32 copy small


def require_fp8(device: torch.device) -> None:
    """Raise `ConfigError` if the device has no kernels for FP8."""
    capability, got = (0, 0), device.type
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        got = f"{torch.cuda.get_device_name(device)}, compute capability {capability[0]}.{capability[1]}"
    if capability < _CAPABILITY:
        expected, fix = "a CUDA card of compute capability 8.9 or later", "use weights='int8' or 'int4'"
        raise ConfigError("weights='fp8' cannot be used on this device", got=got, expected=expected, fix=fix)


def quantize_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """[R, K] -> codes float8_e4m3fn [R, K] and scales float32 [R, 1]: the largest of a row becomes 448."""
    scales = (values.abs().amax(1, keepdim=True).float() / _LARGEST).clamp_(min=1e-12)
    # Clamped, since FP8 has no infinity: a number that rounding lifts above the largest would become NaN.
    return (values / scales).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scales


def dequantize_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 values [R, K] of the codes."""
    return codes.float() * scales


@final
class Fp8Linear(QuantizedLinear):
    """A linear layer with FP8 weights, which rounds its activations to FP8."""

    def __init__(self, linear: nn.Linear | PackedLinear | QuantizedLinear):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        weight = cast("Tensor", linear.weight).detach()
        pieces = [quantize_fp8(rows) for rows in weight.split(_PIECE)]
        self.codes = nn.Buffer(torch.cat([codes for codes, _ in pieces]), persistent=False)
        self.scales = nn.Buffer(torch.cat([scales for _, scales in pieces]), persistent=False)

    @staticmethod
    def fits(linear: nn.Linear | PackedLinear | QuantizedLinear) -> bool:
        """True iff the kernels take this shape."""
        return linear.in_features % 16 == 0 and linear.out_features % 16 == 0

    @property
    def weight(self) -> Tensor:
        """The dequantised weight, bfloat16 [out, in]."""
        return dequantize_fp8(self.codes, self.scales).bfloat16()

    def product(self, rows: Tensor) -> Tensor:
        codes, scales = quantize_fp8(rows)
        # [R, K] in rows, [K, out] in columns: the only layout that the kernel takes
        return torch.ops.aten._scaled_mm(
            codes, self.codes.t(), scale_a=scales, scale_b=self.scales.t(), out_dtype=torch.bfloat16
        )
