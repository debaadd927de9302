"""FP8 numbers of four exponent and three mantissa bits as bytes: on every card, by operations on integers.

A float32 has eight exponent bits and 23 mantissa bits: with the same bits at their upper ends, an e4m3 number is
2 ^ 120 times as large.
"""

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)


@triton.jit
def widened(codes, DTYPE: tl.constexpr):
    """The numbers of bytes, exact in a 16-bit type."""
    bits = (codes.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000  # the sign, and the seven bits below 27
    return (bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0).to(DTYPE)


@triton.jit
def rounded(x):
    """The bytes of the nearest numbers, of two that are as near the even one; beyond 448 the largest."""
    size = tl.minimum(tl.abs(x), LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # seven exponent bits less, three of the mantissa kept
    small = ((size + 16384.0 - 16384.0) * 512.0).to(tl.int32)  # float32 numbers near 2 ^ 14 are 2 ^ -9 apart
    codes = tl.where(size < 0.015625, small, normal)
    return (codes | tl.where(x < 0.0, 0x80, 0)).to(tl.uint8)
