"""Weight formats of a few bits and the kernels that multiply with them, behind two functions."""

from .fp8 import Fp8Linear
from .int4 import Int4Linear
from .int8 import Int8Linear
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
    "pack_linears",
    "quantize_head",
    "quantize_linears",
    "quantize_target",
]
