"""What the tests of quantised layers share."""

from torch import Tensor

from paceline.quant.int4 import dequantize_int4, quantize_int4


def round_to_bits(weight: Tensor, bits: int, group_size: int) -> Tensor:
    """The float32 weights [out, in] that `bits` (4, 3 or 2) leave of these."""
    return dequantize_int4(*quantize_int4(weight, group_size, bits), group_size)
