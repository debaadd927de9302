"""Weight formats of a few bits and the kernels that multiply with them, behind one function."""

from .int4 import Int4Linear, dequantize_int4, quantize_int4
from .linears import QuantReport, quantize_linears
from .packed import PackedLinear, pack_linears

__all__ = [
    "Int4Linear",
    "PackedLinear",
    "QuantReport",
    "dequantize_int4",
    "pack_linears",
    "quantize_int4",
    "quantize_linears",
]
