"""INT8 weights, symmetric, one scale per output; activations keep 16 bits, so that only the weights are rounded.

If the processor multiplies bytes and adds in int32 (VNNI), the native kernel splits a row of activations into two rows
of bytes, the high part and the remainder:

    y = 127 x / max|x|     hi = round(y)     lo = round(254 (y - hi))     x W' = max|x| / 127 (hi W' + lo W' / 254)

Otherwise it uses integers of 16 bits, or converts the codes to float32. Without the native library ATen multiplies,
with activations in bfloat16.
"""

from typing import cast, final

import torch
from torch import Tensor, nn

from ..kernels.packing import pack, unpack
from .packed import PackedLinear, PackedMatrix, Place, QuantizedLinear, device_of, has_kernels, in_place

_PIECE = 4096  # outputs rounded at once, to keep the float32 copy small
_MAX_INPUTS = (1 << 31) // (128 * 127) - 1  # more could overflow int32


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


@final
class Int8Linear(QuantizedLinear):
    """A linear layer with INT8 weights; activations keep 16 bits, or are bfloat16 where ATen multiplies.

    packed: the codes in the native kernels' order, or plain [out, in] for ATen.
    sums: the sum of each output's codes, int32 [out], for the native kernels.
    """

    def __init__(self, linear: nn.Linear | PackedLinear | QuantizedLinear, place: Place = in_place):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        weight = cast("Tensor", linear.weight).detach()
        codes, scales = quantize_int8(weight)
        self._dtype = weight.dtype
        native = has_kernels(weight.device)
        self.packed = nn.Buffer(place(pack(codes)) if native else codes, persistent=False)
        self.scales = nn.Buffer(scales, persistent=False)
        self.sums = nn.Buffer(codes.sum(1, dtype=torch.int32), persistent=False) if native else None

    @staticmethod
    def fits(linear: nn.Linear | PackedLinear | QuantizedLinear) -> bool:
        """True iff there is a kernel for this layer on its device."""
        device = device_of(linear)
        if has_kernels(device):
            return linear.in_features <= _MAX_INPUTS
        if device.type not in ("cpu", "cuda"):
            return False
        key = device.type.upper()
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_weight_int8pack_mm", key)
        return has_kernel and linear.in_features % 32 == 0  # the CPU kernel reads past the end of other rows

    @property
    def codes(self) -> Tensor:
        """The codes, int8 [out, in], unpacked on every read."""
        return self.packed if self.sums is None else unpack(self.packed, self.out_features, self.in_features)

    @property
    def weight(self) -> Tensor:
        """The dequantised weight [out, in], computed on every read."""
        return dequantize_int8(self.codes, self.scales).to(self._dtype)

    @property
    def matrix(self) -> PackedMatrix | None:
        if self.sums is None:
            return None
        return PackedMatrix(self.out_features, self.in_features, self.packed, self.bias, self.scales, self.sums)

    def product(self, rows: Tensor) -> Tensor:
        return torch.ops.aten._weight_int8pack_mm(rows.bfloat16(), self.packed, self.scales.bfloat16())
