"""INT4 weights in groups, asymmetric, round to nearest; multiplied by ATen's own kernels on CPU and CUDA.

A group of `group_size` weights of one output row shares a scale s and a zero point z, both in bfloat16:

    code = round((w - min) / s), s = (max - min) / 15        w' = (code - 8) * s + z,  z = min + 8 s
"""

import torch
from torch import Tensor, nn

from .packed import PackedLinear

GROUP_SIZES = (32, 64, 128, 256)
_INNER_K_TILES = 8  # of the CUDA kernel's layout
_ROWS = 4096  # quantised at once: the float32 copy of a whole output head would be the peak of memory


def quantize_int4(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Weight [out, in] -> codes int32 [out, in] in 0..15, scales and zeros bfloat16 [in / group_size, out, 2]."""
    out_features, in_features = weight.shape
    groups = weight.float().view(out_features, in_features // group_size, group_size)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    # Rounded to bfloat16 before the codes are chosen, so that the codes fit the scale that is really used.
    scale = ((high - low) / 15).clamp_(min=1e-6).bfloat16().float()
    zero = (low + 8 * scale).bfloat16().float()
    codes = ((groups - zero) / scale + 8).round_().clamp_(0, 15).int().view(out_features, in_features)
    params = torch.stack([scale.squeeze(-1).t(), zero.squeeze(-1).t()], dim=-1)
    return codes, params.bfloat16().contiguous()


def dequantize_int4(codes: Tensor, params: Tensor, group_size: int) -> Tensor:
    """The float32 weights [out, in] that the codes stand for: the oracle of the packed kernels."""
    scale, zero = params.float().unbind(-1)
    scale, zero = (t.t().repeat_interleave(group_size, dim=1) for t in (scale, zero))
    return (codes.float() - 8) * scale + zero


def _pack(codes: Tensor) -> Tensor:
    """Codes int32 [out, in] in the layout of the device's kernel, whose first dimension goes over blocks of rows."""
    if codes.device.type == "cuda":
        # The CUDA layout takes two codes a byte, the even one in the high half.
        pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
        return torch.ops.aten._convert_weight_to_int4pack(pairs, _INNER_K_TILES)
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)


class Int4Linear(nn.Module):
    """A linear layer with packed INT4 weights; activations are multiplied in bfloat16."""

    def __init__(self, linear: nn.Linear | PackedLinear, group_size: int):
        super().__init__()
        self.in_features, self.out_features, self.group_size = linear.in_features, linear.out_features, group_size
        pieces: list[tuple[Tensor, Tensor]] = []
        for rows in linear.weight.detach().split(_ROWS):
            codes, params = quantize_int4(rows, group_size)
            pieces.append((_pack(codes), params))
        self.packed: Tensor
        self.params: Tensor
        self.register_buffer("packed", torch.cat([packed for packed, _ in pieces]), persistent=False)
        self.register_buffer("params", torch.cat([params for _, params in pieces], dim=1), persistent=False)
        self.bias = linear.bias

    @staticmethod
    def fits(linear: nn.Linear | PackedLinear, group_size: int) -> bool:
        """True iff the kernels take this shape."""
        return linear.in_features % group_size == 0 and linear.out_features % 16 == 0

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the dtype of `x`."""
        rows = x.reshape(-1, self.in_features).bfloat16()
        if rows.device.type == "cuda":
            out = torch.ops.aten._weight_int4pack_mm(rows, self.packed, self.group_size, self.params)
        else:
            out = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, self.group_size, self.params)
        out = out.to(x.dtype).view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        return self.packed.nbytes + self.params.nbytes
