"""INT8 weights, symmetric, one scale an output; activations keep 16 bits, so that only the weights are rounded.

The CPU kernel that stays fast beyond one row multiplies bytes by bytes and adds in int32. A row of activations goes
through it as two rows of bytes, a coarse one and what it leaves over:

    y = 127 x / max|x|     hi = round(y)     lo = round(254 (y - hi))     x W' = max|x| / 127 (hi W' + lo W' / 254)

Integers add up to the same in any order: a row's bits cannot depend on how many rows share its pass.
(With one byte a value the pass is 10% to 40% shorter, and ten times further from the bfloat16 model in KL.)
"""

import warnings
from functools import cache
from typing import final

import torch
from torch import Tensor, nn

from .packed import PackedLinear

_PIECE = 4096  # outputs rounded at once: the float32 copy of a whole output head would be the peak of memory
_ROWS = 128  # multiplied at once: the two rows of each stay in the processor's cache
_MAX_INPUTS = (1 << 31) // (128 * 127) - 1  # more could overflow int32
_SMALLEST = 1e-30  # of a row of zeros, which has no scale


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
class _ByteKernel:
    """Packed codes for the product of bytes; copies of a module tree share it, as they share tensors."""

    def __init__(self, codes: Tensor, scales: Tensor):
        zeros = torch.zeros(len(codes), dtype=torch.long)
        with warnings.catch_warnings():  # PyTorch announces that quantized tensors will go one day
            warnings.simplefilter("ignore")
            wrapped = torch._make_per_channel_quantized_tensor(codes, scales.double() / 127, zeros, 0)  # pyright: ignore[reportPrivateImportUsage]
        self._packed = torch.ops.quantized.linear_prepack(wrapped, None)
        self._factors = torch.tensor([127.0, 127.0 * 254.0]).view(2, 1, 1)

    def __deepcopy__(self, memo: dict[int, object]) -> "_ByteKernel":
        return self

    def codes(self) -> Tensor:
        """int8 [out, in], unpacked anew on every call."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.ops.quantized.linear_unpack(self._packed)[0].int_repr()

    def product(self, rows: Tensor) -> Tensor:
        """[R, in] -> float32 [R, out]."""
        top = torch.linalg.vector_norm(rows, float("inf"), -1, True, dtype=torch.float32).clamp_min_(_SMALLEST)
        planes = (rows * (self._factors / top)).float()  # [2, R, in]: y and 254 y
        hi, lo = planes.unbind()
        lo.sub_(hi.round_(), alpha=254)
        sums = self.bytes_product(planes.view(-1, rows.shape[1])).view(2, len(rows), -1)
        hi, lo = sums.unbind()
        return hi.add_(lo, alpha=1 / 254).mul_(top)

    def bytes_product(self, rows: Tensor) -> Tensor:
        """Round rows to -128..127 and multiply; the scales of the weights are divided by 127."""
        return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(rows, 1.0, 128, self._packed)


@cache
def has_byte_kernel() -> bool:
    """True iff this processor's kernel adds bytes exactly: without VNNI instructions, pairs of products saturate."""
    codes = torch.full((16, 64), 127, dtype=torch.int8)
    rows = torch.full((2, 64), 127.0)
    rows[1] = -128.0
    try:
        got = _ByteKernel(codes, torch.full((16,), 127.0)).bytes_product(rows)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return torch.equal(got, (rows @ codes.float().T))


@final
class Int8Linear(nn.Module):
    """A linear layer with INT8 weights; activations keep 16 bits, or are bfloat16 where bytes do not add exactly."""

    def __init__(self, linear: nn.Linear | PackedLinear):
        super().__init__()
        weight = linear.weight.detach()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        codes, scales = quantize_int8(weight)
        self._dtype = weight.dtype
        self._kernel = _ByteKernel(codes, scales) if weight.device.type == "cpu" and has_byte_kernel() else None
        self.codes: Tensor | None
        self.scales: Tensor
        self.register_buffer("codes", codes if self._kernel is None else None, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    @staticmethod
    def fits(linear: nn.Linear | PackedLinear) -> bool:
        """True iff there is a kernel for this layer on its device."""
        device = _device(linear)
        if device == "cpu" and has_byte_kernel():
            return linear.in_features <= _MAX_INPUTS
        if device not in ("cpu", "cuda"):
            return False
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_weight_int8pack_mm", device.upper())
        return has_kernel and linear.in_features % 32 == 0  # the CPU kernel reads past the end of other rows

    @property
    def weight(self) -> Tensor:
        """The plain weight [out, in] that the codes stand for, made anew on every read."""
        codes = self.codes if self._kernel is None else self._kernel.codes()
        assert codes is not None
        return dequantize_int8(codes, self.scales).to(self._dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the dtype of `x`."""
        rows = x.reshape(-1, self.in_features)
        if 0 < len(rows) <= _ROWS:
            out = self._product(rows)
        else:
            out = x.new_empty(len(rows), self.out_features)
            for piece, target in zip(rows.split(_ROWS), out.split(_ROWS), strict=True):
                if len(piece):
                    target.copy_(self._product(piece))
        return out.view(*x.shape[:-1], self.out_features)

    def _product(self, rows: Tensor) -> Tensor:
        if self._kernel is not None:
            out = self._kernel.product(rows.float() if rows.dtype is torch.float64 else rows)
        else:
            assert self.codes is not None
            out = torch.ops.aten._weight_int8pack_mm(rows.bfloat16(), self.codes, self.scales.bfloat16())
        return (out if self.bias is None else out.add_(self.bias)).to(rows.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.in_features * self.out_features + self.scales.nbytes


def _device(linear: nn.Linear | PackedLinear) -> str:
    held = linear.packed if isinstance(linear, PackedLinear) else linear.weight  # a packed layer unpacks to answer
    return held.device.type
