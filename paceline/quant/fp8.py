"""FP8 weights (e4m3), one scale an output; activations are rounded to FP8 as well, with one scale a row.

    x = s_x X     W = s_w C     x W' = s_x s_w (X C')        X, C in float8_e4m3fn, sums in float32 on tensor cores

Half the bytes of bfloat16 and no unpacking; a value keeps 4 significant bits. Tested on CPU tensors with the same
calls; not run yet on a card that has it (compute capability 8.9 or later: Ada, Hopper, Blackwell).
"""

from typing import final

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .packed import PackedLinear, QuantizedLinear

_LARGEST = 448.0  # of e4m3
_CAPABILITY = (8, 9)
_PIECE = 4096  # outputs rounded at once: the float32 copy of a whole layer would be the peak of memory


def require_fp8(device: torch.device) -> None:
    """Raises `ConfigError` where no kernel multiplies FP8 by FP8."""
    found, got = (0, 0), device.type
    if device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        got = f"{torch.cuda.get_device_name(device)}, compute capability {found[0]}.{found[1]}"
    if found < _CAPABILITY:
        expected, fix = "a CUDA card of compute capability 8.9 or later", "use weights='int8' or 'int4'"
        raise ConfigError("weights='fp8' cannot be used on this device", got=got, expected=expected, fix=fix)


def quantize_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """[R, K] -> codes float8_e4m3fn [R, K] and scales float32 [R, 1]: the largest of a row becomes 448."""
    scales = (values.abs().amax(1, keepdim=True).float() / _LARGEST).clamp_(min=1e-12)
    # Clamped: what rounding lifts above the largest number would become NaN, for FP8 has no infinity.
    return (values / scales).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scales


def dequantize_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 values [R, K] that the codes stand for: the oracle of the kernels."""
    return codes.float() * scales


@final
class Fp8Linear(QuantizedLinear):
    """A linear layer with FP8 weights, which rounds its activations to FP8."""

    def __init__(self, linear: nn.Linear | PackedLinear):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        pieces = [quantize_fp8(rows) for rows in linear.weight.detach().split(_PIECE)]
        self.codes = nn.Buffer(torch.cat([codes for codes, _ in pieces]), persistent=False)
        self.scales = nn.Buffer(torch.cat([scales for _, scales in pieces]), persistent=False)

    @staticmethod
    def fits(linear: nn.Linear | PackedLinear) -> bool:
        """True iff the kernels take this shape."""
        return linear.in_features % 16 == 0 and linear.out_features % 16 == 0

    @property
    def weight(self) -> Tensor:
        """The values of the codes, in bfloat16 [out, in]: a draft of this model is rounded from them."""
        return dequantize_fp8(self.codes, self.scales).bfloat16()

    def product(self, rows: Tensor) -> Tensor:
        codes, scales = quantize_fp8(rows)
        # [R, K] in rows, [K, out] in columns: the only layout that the kernel takes
        return torch.ops.aten._scaled_mm(
            codes, self.codes.t(), scale_a=scales, scale_b=self.scales.t(), out_dtype=torch.bfloat16
        )
