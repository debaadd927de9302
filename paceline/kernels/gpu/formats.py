"""The formats of weights, and how a step of a product reads them.

format      data                                scales
DENSE       [out, in], in the dtype of rows     -
"""

import os
from typing import Any

import triton
import triton.language as tl
from torch import nn

from .structures import Matrix

DENSE = 0
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def dot(a, b, sums):
    """Sums + a b, in float32."""
    if INTERPRETED:  # it has no bfloat16 arithmetic, and multiplies by a BLAS whose rows depend on one another
        return sums + tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def accumulate(
    sums, x, row, rows, w, scales, column, n, first, K: tl.constexpr, STEP: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """Sums + x w' over the inputs first .. first + STEP - 1, of rows [M] of x and outputs [N] of w."""
    k = first + tl.arange(0, STEP)
    left = tl.load(x + row.to(tl.int64)[:, None] * K + k[None], mask=(row < rows)[:, None] & (k < K)[None], other=0.0)
    weights = tl.load(
        w + column.to(tl.int64)[:, None] * K + k[None], mask=(column < n)[:, None] & (k < K)[None], other=0.0
    )
    return dot(left, tl.trans(weights), sums)


def matrix_of(linear: Any) -> Matrix:
    """The weights of a linear layer. Raises AttributeError for a layer whose format has no kernels."""
    weight = getattr(linear, "weight", None)
    if type(linear) is not nn.Linear or not weight.is_contiguous():
        raise AttributeError(f"no kernels for {type(linear).__name__}")
    bias = None if linear.bias is None else linear.bias.detach().float()
    return Matrix(weight.detach(), bias=bias, outs=linear.out_features, ins=linear.in_features, format=DENSE)
