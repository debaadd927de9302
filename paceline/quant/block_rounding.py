"""Rounds weights to the block formats of llama.cpp's files, in the bytes that the files hold.

A block is d * scale * code + e * min, see `kernels/block_formats.h`. Scales are found as ggml finds them: a few
candidates around the largest weight, each improved by a linear fit to the codes that it gives, with large weights
counting more. Those of 16 bits are then fitted once more to the codes and integers that the weights became.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ConfigError
from ..kernels.library import BlockFormat
from .packed import blocks_of

_Array: TypeAlias = NDArray[Any]
_PIECE = 1 << 16  # weights that are rounded at once: what is computed of them stays in the caches of a core
_TINY = np.float32(1e-30)
_STEPS = 4  # candidates on each side
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True)
class _Grid:
    """What codes stand for: the integers low .. high, or `values`.

    sub: weights that share a scale. scales: the lowest and highest integer scale, None: the block has one of 16 bits.
    reach: candidates for a scale put the largest weight up to so far before and behind the end of the codes.
    """

    low: int
    high: int
    sub: int = 32
    scales: tuple[int, int] | None = None
    reach: float = 1
    values: tuple[int, ...] = ()

    @cached_property
    def _nearest(self) -> _Array:
        """The nearest code of each half from `low` on: they change at whole and half numbers."""
        middles = np.arange(2 * self.low, 2 * self.high + 1) / 2 + 0.25
        return np.abs(np.array(self.values) - middles[:, None]).argmin(1).astype(np.uint8)

    def nearest(self, x: _Array) -> _Array:
        """The value of the nearest code of each number, which are overwritten."""
        if not self.values:
            return np.clip(np.rint(x, out=x), self.low, self.high, out=x)
        return np.array(self.values, np.float32).take(self.codes(np.clip(x, self.low, self.high, out=x)))

    def codes(self, v: _Array) -> _Array:
        """The codes of values."""
        if self.values:
            return self._nearest.take(np.floor(2 * v).astype(np.int16) - 2 * self.low)
        return (v if self.low == -127 else v - self.low).astype(np.int16).astype(np.uint8)  # Q8_0 has signed ones

    @property
    def shifts(self) -> list[float]:
        """Where candidates put the largest weight, relative to the end of the codes."""
        return [self.reach * step / _STEPS for step in range(-_STEPS, _STEPS + 1)] if self.reach else []


_GRIDS = {
    BlockFormat.Q4_0: _Grid(-8, 7),
    BlockFormat.Q4_1: _Grid(0, 15),
    BlockFormat.Q5_0: _Grid(-16, 15),
    BlockFormat.Q5_1: _Grid(0, 31),
    BlockFormat.Q8_0: _Grid(-127, 127, reach=0),
    BlockFormat.Q2_K: _Grid(0, 3, 16, (0, 15)),
    BlockFormat.Q3_K: _Grid(-4, 3, 16, (-32, 31)),
    BlockFormat.Q4_K: _Grid(0, 15, 32, (0, 63)),
    BlockFormat.Q5_K: _Grid(0, 31, 32, (0, 63)),
    BlockFormat.Q6_K: _Grid(-32, 31, 16, (-128, 127)),
    BlockFormat.IQ4_NL: _Grid(-127, 113, reach=14, values=_IQ4),
    BlockFormat.IQ4_XS: _Grid(-127, 113, 32, (-32, 31), reach=14, values=_IQ4),
    BlockFormat.MXFP4: _Grid(-12, 12, reach=0, values=_FP4),
}


@dataclass(frozen=True)
class _Rounded:
    """Blocks: codes uint8 [B, weights], d and e float32 [B], integer scales and mins [B, subs] where there are any."""

    codes: _Array
    d: _Array
    e: _Array
    scales: _Array
    mins: _Array


def round_rows(form: BlockFormat, weight: Tensor, name: str) -> Tensor:
    """The bytes of these outputs in a file, uint8 [out, bytes], from [out, in], a multiple of the block.

    Raises `ConfigError` for numbers that the format cannot hold. name: of the weights, for the error.
    """
    rows = max(1, _PIECE // weight.shape[1])

    def round_piece(first: int) -> _Array:
        piece = weight[first : first + rows].float().numpy()
        with np.errstate(all="ignore"):  # blocks that are all zeros
            rounded = _round(form, piece.reshape(-1, form.inputs))
            if not (np.isfinite(piece).all() and np.isfinite(rounded.d).all() and np.isfinite(rounded.e).all()):
                raise ConfigError(
                    f"the weights {name!r} cannot be rounded to {form.name}", got=f"up to {np.abs(piece).max():g}",
                    expected="numbers that scales of float16 reach", fix="leave weights out",
                )  # fmt: skip
            return np.concatenate(_PARTS[form](rounded), 1).reshape(len(piece), -1)

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        pieces = list(threads.map(round_piece, range(0, len(weight), rows)))
    return torch.from_numpy(np.concatenate(pieces))


def round_matrix(form: BlockFormat, weight: Tensor, name: str) -> Any:
    """The same for the kernels of its device, see `blocks_of`."""
    rows = round_rows(form, weight.cpu(), name)
    return blocks_of(form, (weight.shape[0], weight.shape[1]), lambda some: rows[some], weight.device)


def _round(form: BlockFormat, blocks: _Array) -> _Rounded:
    """Round [B, weights]."""
    grid, subs = _GRIDS[form], form.inputs // _GRIDS[form].sub
    # Weights of a sub-block lie along the first dimension, so that sums over it are sums of vectors.
    x = np.ascontiguousarray(blocks.reshape(-1, grid.sub).T)
    w = np.abs(x)
    w += np.sqrt(np.square(x).mean(0))
    if form.has_mins:
        scale, low = _fit_line(grid, x, w, np.inf if grid.scales is None else 0)
    else:
        scale, low = _power_of_two(grid, x, w) if form is BlockFormat.MXFP4 else _fit_scale(grid, x, w), None
    d, q = _integers(scale.reshape(-1, subs), grid.scales)
    e, m = np.zeros_like(d), np.zeros_like(q)
    if low is not None:
        e, m = _integers(low.reshape(-1, subs), grid.scales and (0, grid.scales[1]))
    x, w = x.reshape(grid.sub, -1, subs), w.reshape(grid.sub, -1, subs)
    v = _values(grid, x, d * q, e * m)
    if grid.scales is not None:
        d, e = _refit(x, w, v * q, m, d, e)
        v = _values(grid, x, d * q, e * m)
    codes = grid.codes(v).transpose(1, 2, 0).reshape(-1, form.inputs)
    return _Rounded(codes, d[:, 0], e[:, 0], q.astype(np.int16), m.astype(np.int16))


def _values(grid: _Grid, x: _Array, scale: _Array, low: _Array) -> _Array:
    return grid.nearest((x - low) * np.where(scale == 0, 0, 1 / scale))


def _half(x: _Array) -> _Array:
    return x.astype(np.float16).astype(np.float32)


def _integers(scale: _Array, bounds: tuple[int, int] | None) -> tuple[_Array, _Array]:
    """Scales [B, subs] as a number of 16 bits [B, 1] times integers within bounds, the largest at the further one.

    bounds: None where there are no integers.
    """
    if bounds is None:
        return _half(scale), np.ones_like(scale)
    low, high = bounds
    largest = np.take_along_axis(scale, np.abs(scale).argmax(1)[:, None], 1)
    d = _half(largest / (low if low < 0 else high))
    return d, np.clip(np.rint(np.where(d == 0, 0, scale / d)), low, high)


def _fit_scale(grid: _Grid, x: _Array, w: _Array) -> _Array:
    """The scale with the least weighted squared error among the candidates, of each column of x [sub, G]."""
    peak = np.take_along_axis(x, np.abs(x).argmax(0)[None], 0)[0]
    if not grid.shifts:
        return np.abs(peak) / grid.high
    inverse, wx = np.where(peak == 0, 0, 1 / peak), w * x
    best, most = np.zeros_like(peak), np.zeros_like(peak)
    for shift in grid.shifts:
        v = grid.nearest(x * (inverse * np.float32(grid.low + shift)))
        xv, vv = (wx * v).sum(0), (w * v * v).sum(0) + _TINY
        gain = xv * xv / vv
        better = gain > most
        np.copyto(best, xv / vv, where=better)
        np.copyto(most, gain, where=better)
    return best


def _fit_line(grid: _Grid, x: _Array, w: _Array, at_most: float) -> tuple[_Array, _Array]:
    """The scale and the lowest value likewise. at_most: of the lowest value."""
    low = np.minimum(x.min(0), np.float32(at_most))
    span = np.maximum(x.max(0) - low, 0)
    inverse, wx, above = np.where(span == 0, 0, 1 / span), w * x, x - low
    sw, sx = w.sum(0), wx.sum(0)
    best, offset, least = span / grid.high, low.copy(), np.full_like(low, np.inf)
    for shift in grid.shifts:
        v = grid.nearest(above * (inverse * np.float32(grid.high + shift)))
        wv = w * v
        sv, vv, xv = wv.sum(0), (wv * v).sum(0), (wx * v).sum(0)
        room = sw * vv - sv * sv
        s, o = (sw * xv - sx * sv) / room, (vv * sx - sv * xv) / room
        s, o = np.where(o > at_most, xv / (vv + _TINY), s), np.minimum(o, np.float32(at_most))
        error = s * (s * vv - 2 * xv + 2 * o * sv) + o * (o * sw - 2 * sx)  # less that of zeros
        better = (error < least) & (room > 0) & (s > 0)
        for held, values in ((best, s), (offset, o), (least, error)):
            np.copyto(held, values, where=better)
    return best, offset


def _refit(x: _Array, w: _Array, a: _Array, b: _Array, d: _Array, e: _Array) -> tuple[_Array, _Array]:
    """Numbers d and e [B, 1] with d * a + e * b near to x. a: [sub, B, subs], b: [B, subs]."""
    wa = w * a
    aa, ax = (wa * a).sum((0, 2))[:, None], (wa * x).sum((0, 2))[:, None]
    if not b.any():
        return np.where(aa > 0, _half(ax / (aa + _TINY)), d), e
    wb = w * b
    ab, bb, bx = ((wb * factor).sum((0, 2))[:, None] for factor in (a, b, x))
    room = aa * bb - ab * ab
    fits = room > 1e-6 * aa * bb
    return np.where(fits, _half((ax * bb - bx * ab) / room), d), np.where(fits, _half((bx * aa - ax * ab) / room), e)


def _power_of_two(grid: _Grid, x: _Array, w: _Array) -> _Array:
    """The best of three powers of two, of which a byte holds the exponent."""
    top = np.floor(np.log2(np.abs(x).max(0) + _TINY)) - 3
    best, least = top, np.full_like(top, np.inf)
    for more in (-1, 0, 1):
        scale = np.exp2(np.clip(top + more, -127, 126))
        error = (w * np.square(grid.nearest(x / scale) * scale - x)).sum(0)
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    return best


def _join(codes: _Array, shift: int, axis: int) -> _Array:
    """Several codes in a byte: those along an axis, which goes."""
    parts = [code << shift * i for i, code in enumerate(np.moveaxis(codes, axis, 0))]
    return reduce(np.bitwise_or, parts).reshape(len(codes), -1).astype(np.uint8)


def _floats(*numbers: _Array) -> _Array:
    return np.stack(numbers, 1).astype(np.float16).view(np.uint8)


def _nibbles(codes: _Array, together: int = 16) -> _Array:
    """Four bits of so many codes, and of as many after them."""
    return _join((codes & 15).reshape(len(codes), -1, 2, together), 4, 2)


def _pairs(codes: _Array) -> _Array:
    """Two bits of four times 32 codes."""
    return _join((codes & 3).reshape(-1, 2, 4, 32), 2, 2)


def _fifth(codes: _Array) -> _Array:
    """The upper bits of 32 codes."""
    return _join((codes >> 4).reshape(-1, 4, 8), 1, 2)


def _six_bits(r: _Rounded) -> _Array:
    """Eight scales and mins of six bits in twelve bytes."""
    (s, t), (m, n) = np.split(r.scales, 2, 1), np.split(r.mins, 2, 1)
    return np.concatenate([s | t >> 4 << 6, m | n >> 4 << 6, t & 15 | (n & 15) << 4], 1).astype(np.uint8)


def _parts_of_q3_k(r: _Rounded) -> list[_Array]:
    s = r.scales + 32
    low, high = _join((s & 15).reshape(-1, 2, 8), 4, 1), _join((s >> 4).reshape(-1, 4, 4), 2, 1)
    return [_join((r.codes >> 2).reshape(-1, 8, 32), 1, 1), _pairs(r.codes), low, high, _floats(r.d)]


def _parts_of_q6_k(r: _Rounded) -> list[_Array]:
    return [_nibbles(r.codes, 64), _pairs(r.codes >> 4), r.scales.astype(np.int8).view(np.uint8), _floats(r.d)]


def _parts_of_iq4_xs(r: _Rounded) -> list[_Array]:
    s = r.scales + 32
    high, low = _join((s >> 4).reshape(-1, 2, 4), 2, 2), _join((s & 15).reshape(-1, 4, 2), 4, 2)
    return [_floats(r.d), high, low, _nibbles(r.codes)]


_PARTS: dict[BlockFormat, Callable[[_Rounded], list[_Array]]] = {
    BlockFormat.Q4_0: lambda r: [_floats(r.d), _nibbles(r.codes)],
    BlockFormat.Q4_1: lambda r: [_floats(r.d, r.e), _nibbles(r.codes)],
    BlockFormat.Q5_0: lambda r: [_floats(r.d), _fifth(r.codes), _nibbles(r.codes)],
    BlockFormat.Q5_1: lambda r: [_floats(r.d, r.e), _fifth(r.codes), _nibbles(r.codes)],
    BlockFormat.Q8_0: lambda r: [_floats(r.d), r.codes],
    BlockFormat.Q2_K: lambda r: [(r.scales | r.mins << 4).astype(np.uint8), _pairs(r.codes), _floats(r.d, -r.e)],
    BlockFormat.Q3_K: _parts_of_q3_k,
    BlockFormat.Q4_K: lambda r: [_floats(r.d, -r.e), _six_bits(r), _nibbles(r.codes, 32)],
    BlockFormat.Q5_K: lambda r: [
        _floats(r.d, -r.e), _six_bits(r), _join((r.codes >> 4).reshape(-1, 8, 32), 1, 1), _nibbles(r.codes, 32)
    ],
    BlockFormat.Q6_K: _parts_of_q6_k,
    BlockFormat.IQ4_NL: lambda r: [_floats(r.d), _nibbles(r.codes)],
    BlockFormat.IQ4_XS: _parts_of_iq4_xs,
    BlockFormat.MXFP4: lambda r: [(np.log2(r.d) + 128).astype(np.uint8)[:, None], _nibbles(r.codes)],
}  # fmt: skip
"""Where the bytes of a file have what; see ggml-common.h of ggml."""
