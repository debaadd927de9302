"""The formats of weights, and how a step of a product reads them.

format              data [out, ...]                                     scales [out, ...]
DENSE               numbers in the dtype of rows                        -
INT8                int8 codes                                          float32, of an output
FP8                 e4m3                                                float32, of an output
INT4                nibbles                                             words: a scale and a zero point, bfloat16
Q4_1                nibbles                                             words: a scale and a minimum, float16
Q4_0, IQ4_NL        nibbles                                             words: the scales of 64 inputs, float16
MXFP4               nibbles                                             the same, bfloat16
Q5_0, Q5_1          nibbles                                             two words: as Q4_1, then the fifth bits
Q8_0                int8 codes                                          as Q4_0
Q4_K                codes of blocks of a file                           four words: the other bytes of blocks
Q5_K                codes of blocks of a file, fifth bits last          the same
Q6_K                codes of blocks of a file                           five words: 16 scales of 8 bits, then d
Q2_K, Q3_K          codes of blocks of a file, upper bits last          five or four words: the other bytes, d last
IQ4_XS              nibbles                                             two words: the other bytes of blocks

Nibbles are 32 bytes for every 64 inputs: the lower four bits are of the first 32, the upper four of the others, as in
the blocks of Q4_K. Words have 32 bits. So whatever a loop reads can be fetched ahead, and 32 inputs are one product.
"""

import os
from typing import Any

import triton
import triton.language as tl
from torch import nn

from ..library import BlockFormat
from .e4m3 import widened
from .structures import Matrix

DENSE, INT8, FP8, INT4 = 0, 1, 2, int(BlockFormat.INT4)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_INT8, _FP8 = tl.constexpr(INT8), tl.constexpr(FP8)
_Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q8_0 = (
    tl.constexpr(int(BlockFormat[f"Q{name}"])) for name in ["4_0", "4_1", "5_0", "5_1", "8_0"]
)
_Q2_K, _Q3_K, _Q4_K, _Q5_K, _Q6_K = (tl.constexpr(int(BlockFormat[f"Q{bits}_K"])) for bits in (2, 3, 4, 5, 6))
_IQ4_NL, _IQ4_XS, _MXFP4 = (tl.constexpr(int(BlockFormat[name])) for name in ("IQ4_NL", "IQ4_XS", "MXFP4"))


@triton.jit
def dot(a, b, sums):
    """Sums + a b, in float32."""
    if INTERPRETED:  # it has no bfloat16 arithmetic, and multiplies by a BLAS whose rows depend on one another
        return sums + tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def _bytes(data, column, inside, at, width):
    """32 bytes of each output [N], from `at` on, as int32 [N, 32]. width: of a row."""
    place = column.to(tl.int64)[:, None] * width + at + tl.arange(0, 32)[None]
    return tl.load(data + place, mask=inside[:, None], other=0).to(tl.int32)


@triton.jit
def _word(scales, column, inside, at, width):
    """A word of each output, int32 [N]."""
    return tl.load(scales + column.to(tl.int64) * width + at, mask=inside, other=0)


@triton.jit
def _half(words, PLACE: tl.constexpr, BFLOAT: tl.constexpr):
    """The first or second of two numbers of 16 bits in each word, float32."""
    if BFLOAT:
        half = (words & -65536 if PLACE else words << 16).to(tl.float32, bitcast=True)
    else:
        half = (words >> 16 * PLACE).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return half


@triton.jit
def _six_bits(scales, column, inside, at, width, J: tl.constexpr):
    """The scale and the minimum of 32 inputs, the J-th of a block of Q4_K or Q5_K."""
    floats = _word(scales, column, inside, at, width)
    low = _word(scales, column, inside, at + 1, width) >> J % 4 * 8
    middle = _word(scales, column, inside, at + 2, width) >> J % 4 * 8
    high = _word(scales, column, inside, at + 3, width) >> J % 4 * 8
    if J < 4:
        scale, least = low & 63, middle & 63
    else:
        scale, least = high & 15 | (low >> 6 & 3) << 4, high >> 4 & 15 | (middle >> 6 & 3) << 4
    return _half(floats, 0, False) * scale.to(tl.float32), _half(floats, 1, False) * -least.to(tl.float32)


@triton.jit
def _fp4(codes):
    """e2m1, float32."""
    bits = (codes & 8) << 12 | (codes & 7) << 9  # of a float16, but for the bias of its exponent
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def _iq4(codes):
    """The table of IQ4_NL, -127 -104 -83 -65  -49 -35 -22 -10  1 13 25 38  53 69 89 113, in words of four, plus 127."""
    low = tl.where((codes & 4) == 0, 0x3E2C1700, 0x75695C4E)
    high = tl.where((codes & 4) == 0, -0x5A677380, -0x0F273B4C)
    words = tl.where((codes & 8) == 0, low, high)
    return ((words >> (codes & 3) * 8 & 255) - 127).to(tl.float32)


@triton.jit
def _halves(one, other):
    """Numbers of the first and the last sixteen of 32 inputs, [N] each, as [N, 32]."""
    return tl.where(tl.arange(0, 32)[None] < 16, one[:, None], other[:, None])


@triton.jit
def _q2_k(data, scales, column, inside, block, J: tl.constexpr, BLOCKS: tl.constexpr):
    codes = _bytes(data, column, inside, block * 64 + J // 4 * 32, BLOCKS * 64) >> J % 4 * 2 & 3
    words = _word(scales, column, inside, block * 5 + J // 2, BLOCKS * 5) >> J % 2 * 16
    floats = _word(scales, column, inside, block * 5 + 4, BLOCKS * 5)
    d, e = _half(floats, 0, False), -_half(floats, 1, False)
    scale = _halves((words & 15).to(tl.float32) * d, (words >> 8 & 15).to(tl.float32) * d)
    return codes.to(tl.float32) * scale + _halves(
        (words >> 4 & 15).to(tl.float32) * e, (words >> 12 & 15).to(tl.float32) * e
    )


@triton.jit
def _q3_k(data, scales, column, inside, block, J: tl.constexpr, BLOCKS: tl.constexpr):
    codes = _bytes(data, column, inside, block * 96 + J // 4 * 32, BLOCKS * 96) >> J % 4 * 2 & 3
    codes |= (_bytes(data, column, inside, block * 96 + 64, BLOCKS * 96) >> J & 1) << 2
    low = _word(scales, column, inside, block * 4 + J % 4 // 2, BLOCKS * 4) >> J % 2 * 16 + J // 4 * 4
    high = _word(scales, column, inside, block * 4 + 2, BLOCKS * 4) >> J % 2 * 16 + J // 2 * 2
    d = _half(_word(scales, column, inside, block * 4 + 3, BLOCKS * 4), 0, False)
    one = ((low & 15 | (high & 3) << 4) - 32).to(tl.float32) * d
    other = ((low >> 8 & 15 | (high >> 8 & 3) << 4) - 32).to(tl.float32) * d
    return (codes - 4).to(tl.float32) * _halves(one, other)


@triton.jit
def _q6_k(data, scales, column, inside, block, J: tl.constexpr, BLOCKS: tl.constexpr):
    at = block * 192 + J // 4 * 64
    low = _bytes(data, column, inside, at + J % 2 * 32, BLOCKS * 192) >> J % 4 // 2 * 4 & 15
    high = _bytes(data, column, inside, at + 128 - J // 4 * 32, BLOCKS * 192) >> J % 4 * 2 & 3
    words = _word(scales, column, inside, block * 5 + J // 2, BLOCKS * 5)
    d = _half(_word(scales, column, inside, block * 5 + 4, BLOCKS * 5), 0, False)
    one = (words << 24 - J % 2 * 16 >> 24).to(tl.float32) * d
    other = (words << 16 - J % 2 * 16 >> 24).to(tl.float32) * d
    return ((low | high << 4) - 32).to(tl.float32) * _halves(one, other)


@triton.jit
def group(
    data, scales, column, inside, first, J: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Weights of outputs [N], for 32 inputs, the J-th of those from `first` on: float32 [N, 32].

    first: a multiple of 64, of 256 for formats with such blocks. inside: [N], where there are such outputs.
    """
    if K % 256 > 0:
        inside = inside & (first + 32 * J < K)
    BLOCKS: tl.constexpr = K // 256
    if FORMAT == _Q6_K:
        weights = _q6_k(data, scales, column, inside, first // 256, J, BLOCKS)
    elif FORMAT == _Q3_K:
        weights = _q3_k(data, scales, column, inside, first // 256, J, BLOCKS)
    elif FORMAT == _Q2_K:
        weights = _q2_k(data, scales, column, inside, first // 256, J, BLOCKS)
    elif FORMAT == _Q8_0:
        words = _word(scales, column, inside, first // 64 + J // 2, (K + 63) // 64)
        codes = _bytes(data, column, inside, first + J * 32, K)
        weights = codes.to(tl.float32) * _half(words, J % 2, False)[:, None]
    else:
        if FORMAT == _Q5_K:
            at = first // 256 * 160
            codes = _bytes(data, column, inside, at + J // 2 * 32, BLOCKS * 160) >> J % 2 * 4 & 15
            codes |= (_bytes(data, column, inside, at + 128, BLOCKS * 160) >> J & 1) << 4
        else:
            codes = _bytes(data, column, inside, first // 2 + J // 2 * 32, (K + 63) // 64 * 32) >> J % 2 * 4 & 15
        if FORMAT == _Q4_K or FORMAT == _Q5_K:
            scale, least = _six_bits(scales, column, inside, first // 256 * 4, BLOCKS * 4, J)
        elif FORMAT == _IQ4_XS:
            words = _word(scales, column, inside, first // 256 * 2, BLOCKS * 2)
            low = _word(scales, column, inside, first // 256 * 2 + 1, BLOCKS * 2) >> J * 4 & 15
            scale = _half(words, 0, False) * ((low | (words >> 16 + J * 2 & 3) << 4) - 32).to(tl.float32)
            least = scale
        elif FORMAT == _Q4_0 or FORMAT == _IQ4_NL or FORMAT == _MXFP4:
            words = _word(scales, column, inside, first // 64 + J // 2, (K + 63) // 64)
            scale = _half(words, J % 2, FORMAT == _MXFP4)
            least = -8.0 * scale
        elif FORMAT == _Q5_0 or FORMAT == _Q5_1:
            words = _word(scales, column, inside, first // 16 + J * 2, K // 16)
            fifth = _word(scales, column, inside, first // 16 + J * 2 + 1, K // 16)
            codes |= (fifth[:, None] >> tl.arange(0, 32)[None] & 1) << 4
            scale = _half(words, 0, False)
            least = -16.0 * scale if FORMAT == _Q5_0 else _half(words, 1, False)
        else:
            words = _word(scales, column, inside, (first + 32 * J) // GROUP, K // GROUP)
            scale = _half(words, 0, FORMAT != _Q4_1)
            least = _half(words, 1, FORMAT != _Q4_1) - (0.0 if FORMAT == _Q4_1 else 8.0) * scale
        if FORMAT == _IQ4_NL or FORMAT == _IQ4_XS:
            weights = _iq4(codes) * scale[:, None]
        elif FORMAT == _MXFP4:
            weights = _fp4(codes) * scale[:, None]
        else:
            weights = codes.to(tl.float32) * scale[:, None] + least[:, None]
    return weights


@triton.jit
def accumulate(
    sums, x, row, rows, w, scales, column, n, first,
    K: tl.constexpr, STEP: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Sums + x w' over the inputs first .. first + STEP - 1, of rows [M] of x and outputs [N] of w, see `scaled`."""
    place, some, inside = x + row.to(tl.int64)[:, None] * K + first, (row < rows)[:, None], column < n
    if FORMAT <= _FP8:
        k = tl.arange(0, STEP)[None]
        there = first + k < K
        left = tl.load(place + k, mask=some & there, other=0.0)
        weights = tl.load(w + column.to(tl.int64)[:, None] * K + first + k, mask=inside[:, None] & there, other=0)
        if FORMAT == _INT8:
            weights = weights.to(tl.float32).to(left.dtype)
        elif FORMAT == _FP8:
            weights = widened(weights, left.dtype)
        sums = dot(left, tl.trans(weights), sums)
    else:
        for j in tl.static_range(STEP // 32):
            there = some & (first + 32 * j < K) if K % STEP > 0 else some
            left = tl.load(place + 32 * j + tl.arange(0, 32)[None], mask=there, other=0.0)
            weights = group(w, scales, column, inside, first, j, K, FORMAT, GROUP)
            sums = dot(left, tl.trans(weights.to(left.dtype)), sums)
    return sums


@triton.jit
def scaled(sums, scales, column, inside, FORMAT: tl.constexpr):
    """Sums [M, N] times what all weights of an output share."""
    if FORMAT == _INT8 or FORMAT == _FP8:
        sums *= tl.load(scales + column, mask=inside, other=0.0)[None]
    return sums


def matrix_of(linear: Any) -> Matrix:
    """The weights of a linear layer. Raises AttributeError for a layer whose format has no kernels."""
    if type(linear) is nn.Linear and linear.weight.is_contiguous():
        bias = None if linear.bias is None else linear.bias.detach().float()
        return Matrix(linear.weight.detach(), bias=bias, outs=linear.out_features, ins=linear.in_features, format=DENSE)
    if not isinstance(matrix := getattr(linear, "matrix", None), Matrix):
        raise AttributeError(f"no kernels for {type(linear).__name__}")
    return matrix
