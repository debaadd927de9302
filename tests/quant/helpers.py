"""What the tests of quantised layers share."""

from torch import Tensor

from paceline.quant.int4 import quantize_int4


def dequantize_int4(codes: Tensor, params: Tensor, group_size: int) -> Tensor:
    """The float32 weights [out, in] that the codes stand for: the oracle of the packed kernels."""
    scale, zero = params.float().unbind(-1)
    scale, zero = (t.t().repeat_interleave(group_size, dim=1) for t in (scale, zero))
    return (codes.float() - 8) * scale + zero


def round_to_bits(weight: Tensor, bits: int, group_size: int) -> Tensor:
    """The float32 weights [out, in] that `bits` (4, 3 or 2) leave of these."""
    return dequantize_int4(*quantize_int4(weight, group_size, bits), group_size)
