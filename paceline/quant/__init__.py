"""Weight formats of a few bits and the kernels that multiply with them, behind two functions."""

from .fp8 import Fp8Linear, dequantize_fp8, quantize_fp8
from .int4 import Int4Linear, dequantize_int4, quantize_int4
from .int8 import Int8Linear, dequantize_int8, quantize_int8
from .linears import LmHead, QuantReport, Weights, check_weights, quantize_head, quantize_linears, quantize_target
from .packed import PackedLinear, QuantizedLinear, pack_linears

__all__ = [
    "Fp8Linear",
    "Int4Linear",
    "Int8Linear",
    "LmHead",
    "PackedLinear",
    "QuantReport",
    "QuantizedLinear",
    "Weights",
    "check_weights",
    "dequantize_fp8",
    "dequantize_int4",
    "dequantize_int8",
    "pack_linears",
    "quantize_fp8",
    "quantize_head",
    "quantize_int4",
    "quantize_int8",
    "quantize_linears",
    "quantize_target",
]
