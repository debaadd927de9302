"""Products of few rows with large matrices, of which each weight is read once.

A sum over the inputs is taken in steps of a size that the shape of the matrix fixes, by the same instruction for every
number of rows (never Hopper's wgmma), and large sums are cut into parts that are added in their order by whoever
reads them. So the bits of a row depend on nothing but the row and the matrix; how many rows and outputs a program
computes is free.

    program (tile of outputs, tile of rows, part of the inputs)       sums [parts, rows, outputs]
"""

from collections.abc import Sequence
from itertools import groupby

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..library import BlockFormat
from .formats import DENSE, FP8, INT8, accumulate, scaled
from .structures import Matrix

_ENOUGH = 128  # tiles of sixteen outputs that keep a GPU busy; a constant, since the bits depend on it
_ENOUGH_CODES = 1024  # of codes, which are fewer bytes and take longer to unpack
_FEWEST_STEPS = 4  # of a part of the inputs


@triton.jit
def activate(x, KIND: tl.constexpr):
    """SiLU, the tanh form of GELU, or the square of ReLU (`abi.h`)."""
    if KIND == 0:
        return x / (1.0 + tl.exp(-x))
    if KIND == 1:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1.0 + (1.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0)))
    positive = tl.maximum(x, 0.0)
    return positive * positive


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x, out, w0, w1, w2, s0, s1, s2, n0, n1, n2, tiles0, tiles1, rows, width,
    K: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Sums [parts, rows, width] of up to three matrices with the same inputs and format, side by side."""
    tile = tl.program_id(0)
    if tile < tiles0:
        w, s, n, first, at = w0, s0, n0, tile * N, 0
    elif tile < tiles0 + tiles1:
        w, s, n, first, at = w1, s1, n1, (tile - tiles0) * N, n0
    else:
        w, s, n, first, at = w2, s2, n2, (tile - tiles0 - tiles1) * N, n0 + n1
    row = tl.program_id(1) * M + tl.arange(0, M)
    column = first + tl.arange(0, N)
    begin = tl.program_id(2) * STEPS
    sums = tl.zeros((M, N), tl.float32)
    for step in range(begin, tl.minimum(begin + STEPS, (K + STEP - 1) // STEP)):
        sums = accumulate(sums, x, row, rows, w, s, column, n, step * STEP, K, STEP, FORMAT, GROUP)
    sums = scaled(sums, s, column, column < n, FORMAT)
    place = (tl.program_id(2) * rows + row).to(tl.int64) * width + at
    tl.store(out + place[:, None] + column[None], sums, mask=(row < rows)[:, None] & (column < n)[None])


@triton.jit(do_not_specialize=["rows"])
def _finish(
    x, out, gate, gate_scales, gate_bias, up, up_scales, up_bias, is_mask, gate_more, up_more,
    n, rows, gate_times, out_times, softcap,
    K: tl.constexpr, STEP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    GATE_FORMAT: tl.constexpr, GATE_GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_MORE: tl.constexpr,
):  # fmt: skip
    """Whole sums [rows, n], as the next product or the caller reads them: activation(gate x) * up x, or up x."""
    row = tl.program_id(1) * M + tl.arange(0, M)
    column = tl.program_id(0) * N + tl.arange(0, N)
    there = column < n
    sums = tl.zeros((M, N), tl.float32)
    gates = tl.zeros((M, N), tl.float32)
    for step in range(0, (K + STEP - 1) // STEP):
        sums = accumulate(sums, x, row, rows, up, up_scales, column, n, step * STEP, K, STEP, FORMAT, GROUP)
        if IS_GATED:
            gates = accumulate(
                gates, x, row, rows, gate, gate_scales, column, n, step * STEP, K, STEP, GATE_FORMAT, GATE_GROUP
            )
    place = row.to(tl.int64)[:, None] * n + column[None]
    inside = (row < rows)[:, None] & there[None]
    sums = scaled(sums, up_scales, column, there, FORMAT)
    if IS_GATED:
        gates = scaled(gates, gate_scales, column, there, GATE_FORMAT)
    if HAS_BIAS:
        sums += tl.load(up_bias + column, mask=there, other=0.0)[None]
    if HAS_MORE:
        takes = tl.load(is_mask + row, mask=row < rows, other=0)[:, None] != 0
        sums = tl.where(takes, sums + tl.load(up_more + place, mask=inside, other=0.0), sums)
        gates = tl.where(takes, gates + tl.load(gate_more + place, mask=inside, other=0.0), gates)
    if IS_GATED:
        if HAS_BIAS:
            gates += tl.load(gate_bias + column, mask=there, other=0.0)[None]
        sums = activate(gates * gate_times, ACTIVATION) * sums
    elif ACTIVATION >= 0:
        sums = activate(sums, ACTIVATION)
    sums *= out_times
    if HAS_CAP:
        sums = softcap * (1.0 - 2.0 / (tl.exp(2.0 * (sums / softcap)) + 1.0))
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)


def step_of(matrix: Matrix, dtype: torch.dtype) -> int:
    """The inputs that are added at once, from the shape and format of a matrix alone."""
    in_blocks = matrix.format not in (DENSE, INT8, FP8)
    if in_blocks and BlockFormat(matrix.format).inputs == 256:
        return 256
    if dtype is torch.float32:
        return 64 if in_blocks else 32
    return 128 if matrix.ins % 128 == 0 and matrix.ins >= 1024 else 64


def parts_of(matrices: Sequence[Matrix], dtype: torch.dtype) -> int:
    """How many parts the sums over the inputs are cut into, from the shapes of matrices that are multiplied at once."""
    steps = -(-matrices[0].ins // max(step_of(matrix, dtype) for matrix in matrices))
    tiles = sum(-(-matrix.outs // 16) for matrix in matrices)
    enough = _ENOUGH if any(matrix.format == DENSE for matrix in matrices) else _ENOUGH_CODES
    return max(1, min(-(-enough // tiles), steps // _FEWEST_STEPS))


def _tiles(rows: int, outs: int, step: int, has_codes: bool, matrices: int = 1) -> tuple[int, int, dict[str, int]]:
    """Rows and outputs of a program, and how it is compiled. They do not change bits.

    matrices: how many a program reads at once; what it holds fits into the 99 KB of the smallest card.
    """
    if has_codes and step == 256:  # unpacking takes many registers
        m, n, warps = (16, 32, 4) if rows <= 16 else (32, (64 if rows <= 64 else 128) // matrices, 8)
        return m, n, {"num_warps": warps, "num_stages": 3 - (rows > 16)}
    if has_codes:  # no two warps unpack the same weights
        m, n, warps = (16, 32, 4) if rows <= 16 else (32, 64, 4) if rows <= 64 else (32, 128, 8)
        return m, n, {"num_warps": warps, "num_stages": (3 if matrices > 1 else 4) - (rows > 16)}
    if rows <= 16:
        return 16, 16 if outs <= 8192 else 32, {"num_warps": 4, "num_stages": 4}
    if rows <= 64:
        return 32, 64 // matrices, {"num_warps": 4, "num_stages": 4}
    return 32, 128 // matrices, {"num_warps": 8, "num_stages": 3}


def multiply(x: Tensor, matrices: Sequence[Matrix]) -> Tensor:
    """float32 [parts, R, outs of all]: the sums of x [R, in], biases not included."""
    rows, ins, width = len(x), matrices[0].ins, sum(matrix.outs for matrix in matrices)
    parts, at = parts_of(matrices, x.dtype), 0
    out = torch.empty(parts, rows, width, device=x.device)
    for (_, form, share), group in groupby(
        enumerate(matrices), lambda pair: (pair[0] // 3, pair[1].format, pair[1].group)
    ):
        same = [matrix for _, matrix in group]
        step = step_of(same[0], x.dtype)
        m, n, how = _tiles(rows, width, step, form != DENSE)
        outs = [matrix.outs for matrix in same]
        tiles = [-(-count // n) for count in outs]
        three = (same + same[-1:] * 2)[:3]
        _multiply[sum(tiles), -(-rows // m), parts](
            _rounded(x, same[0]), out[..., at:], *(matrix.data for matrix in three),
            *(_given(m.scales, m) for m in three), *[*outs, 0, 0][:3], *[*tiles, 0][:2], rows, width,
            ins, step, -(-(-(-ins // step)) // parts), m, n, form, share, **how,
        )  # fmt: skip
        at += sum(outs)
    return out


def _rounded(x: Tensor, matrix: Matrix) -> Tensor:
    """Rows as products read them: with 8 bits rounded to e4m3 times a power of two, which 16 bits hold."""
    if matrix.format != FP8 or matrix.input_bits != 8:
        return x
    most = x.abs().amax(1, keepdim=True).float().clamp_(min=2.0**-100)
    scale = torch.exp2((most / 448).log2_().ceil_())
    return ((x / scale).clamp_(-448, 448).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def _given(tensor: Tensor | None, matrix: Matrix) -> Tensor | None:
    """The tensor, or another one in the place of an argument that is not read."""
    return matrix.data if tensor is None else tensor


def finish(
    x: Tensor,
    up: Matrix,
    gate: Matrix | None = None,
    activation: int = -1,
    out: Tensor | None = None,
    gate_times: float = 1.0,
    times: float = 1.0,
    softcap: float = 0.0,
    more: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """[R, outs] from x [R, in], biases included: activation(gate x) * up x, activation(up x), or up x.

    out: where it goes, in its dtype; None: a tensor in the dtype of x.
    more: bool [R], and what is added to the products with `up` and `gate` in these rows, float32 [R, outs].
    """
    rows, ins = x.shape
    out = torch.empty(rows, up.outs, dtype=x.dtype, device=x.device) if out is None else out
    gates = up if gate is None else gate
    step = max(step_of(up, x.dtype), step_of(gates, x.dtype))
    m, n, how = _tiles(rows, up.outs, step, up.format != DENSE, 1 if gate is None else 2)
    is_mask, up_more, gate_more = more or (x, x, x)
    _finish[-(-up.outs // n), -(-rows // m)](
        _rounded(x, up), out, gates.data, _given(gates.scales, gates), _given(gates.bias, gates),
        up.data, _given(up.scales, up), _given(up.bias, up), is_mask, gate_more, up_more,
        up.outs, rows, gate_times, times, softcap or 1.0,
        ins, step, m, n, up.format, up.group, gates.format, gates.group,
        activation, gate is not None, up.bias is not None, softcap > 0, more is not None, **how,
    )  # fmt: skip
    return out


def product(matrix: Matrix, x: Tensor) -> Tensor:
    """[..., in] -> [..., out], in the dtype of `x`, for modules that are called by themselves."""
    rows = x.reshape(-1, matrix.ins).contiguous()
    rows = rows.float() if x.dtype is torch.float64 else rows
    return finish(rows, matrix).to(x.dtype).view(*x.shape[:-1], matrix.outs)
