"""INT8 weights, symmetric, one scale an output; activations keep 16 bits, so that only the weights are rounded.

Where the processor multiplies bytes by bytes and adds in int32 (VNNI), the native kernel takes a row of activations as
two rows of bytes, a coarse one and what it leaves over:

    y = 127 x / max|x|     hi = round(y)     lo = round(254 (y - hi))     x W' = max|x| / 127 (hi W' + lo W' / 254)

Elsewhere it widens the codes to float32. Without the native library ATen multiplies, with activations in bfloat16.
"""

from typing import final

import torch
from torch import Tensor, nn

from ..kernels.packing import pack, unpack
from .packed import Described, PackedLinear, Place, QuantizedLinear, anywhere, device_of, has_kernels

_PIECE = 4096  # outputs rounded at once: the float32 copy of a whole output head would be the peak of memory
_MAX_INPUTS = (1 << 31) // (128 * 127) - 1  # more could overflow int32


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [out, in] -> codes int8 [out, in] in -127..127 and scales float32 [out]."""
    pieces: list[tuple[Tensor, Tensor]] = []
    for rows in weight.detach().split(_PIECE):
        scales = (rows.abs().amax(1).float() / 127).clamp_(min=1e-12)
        pieces.append(((rows / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales))
    return torch.cat([codes for codes, _ in pieces]), torch.cat([scales for _, scales in pieces])


def dequantize_int8(codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 weights [out, in] that the codes stand for: the oracle of the kernels."""
    return codes.float() * scales[:, None]


@final
class Int8Linear(QuantizedLinear):
    """A linear layer with INT8 weights; activations keep 16 bits, or are bfloat16 where ATen multiplies.

    packed: the codes in the native kernels' order, or plain [out, in] for ATen.
    sums: the sum of each output's codes, int32 [out], for the native kernels.
    """

    def __init__(self, linear: nn.Linear | PackedLinear, place: Place = anywhere):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        weight = linear.weight.detach()
        codes, scales = quantize_int8(weight)
        self._dtype = weight.dtype
        native = has_kernels(weight.device)
        self.packed = nn.Buffer(place(pack(codes)) if native else codes, persistent=False)
        self.scales = nn.Buffer(scales, persistent=False)
        self.sums = nn.Buffer(codes.sum(1, dtype=torch.int32), persistent=False) if native else None

    @staticmethod
    def fits(linear: nn.Linear | PackedLinear) -> bool:
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
        """int8 [out, in], made anew on every read."""
        return self.packed if self.sums is None else unpack(self.packed, self.out_features, self.in_features)

    @property
    def weight(self) -> Tensor:
        """The plain weight [out, in] that the codes stand for, made anew on every read."""
        return dequantize_int8(self.codes, self.scales).to(self._dtype)

    @property
    def matrix(self) -> Described | None:
        if self.sums is None:
            return None
        return Described(self.out_features, self.in_features, self.packed, self.bias, self.scales, self.sums)

    def product(self, rows: Tensor) -> Tensor:
        return torch.ops.aten._weight_int8pack_mm(rows.bfloat16(), self.packed, self.scales.bfloat16())
