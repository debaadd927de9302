"""Attention of the nodes of trees over the columns of a cache, in the order of the text.

A row reads the committed columns, then its path, as plain decoding would read them: in chunks of `CHUNK` columns by
their place in the text. A second kernel joins the chunks in their order. So bits depend on neither the other rows nor
the shape of the tree. Rows that read the same columns share a program:

    columns   0 ... 255 | 256 ... 511 | 512 ... L-1, path          L committed columns; a node's path comes after them
    programs  16 rows of any nodes each | the heads of one node each (of a chain, as before: all paths are one)
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .e4m3 import widened
from .formats import dot
from .structures import Inputs, Layer

CHUNK = 256
ROWS = 16  # of a program
_BYTES = 1 << 28  # of the chunks of rows, before they are joined


@triton.jit
def _reach(row, places, ends, firsts, window, HAS_ENDS: tl.constexpr, HAS_FIRSTS: tl.constexpr):
    """The first and the last column that a row reads, by their place in the text."""
    last = tl.load(places + row * 4 + 3)
    low = tl.maximum(last - window + 1, 0)
    if HAS_ENDS:
        last = tl.maximum(last, tl.load(ends + row) - 1)
    if HAS_FIRSTS:
        low = tl.minimum(low, tl.load(firsts + row))
    return low, last


@triton.jit(do_not_specialize=["nodes", "chunks", "width"])
def _read(
    q, keys, values, starts, slots, places, tree_paths, ends, firsts, tops, totals, results, nodes, heads, kv_heads,
    capacity, chunks, width, window, scale, softcap,
    D: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr,
    IS_CHAIN: tl.constexpr, HAS_CAP: tl.constexpr, HAS_ENDS: tl.constexpr, HAS_FIRSTS: tl.constexpr,
):  # fmt: skip
    """For 16 rows and a chunk of columns: the largest score, the sum of exponentials, and the sum of values."""
    chunk, tile = tl.program_id(0), tl.program_id(1)
    batch, kv = tl.program_id(2) // kv_heads, tl.program_id(2) % kv_heads
    group = heads // kv_heads
    start = tl.load(starts + batch)
    first = chunk * SPAN
    lane = tl.arange(0, 16)
    alone = False
    if not IS_CHAIN:
        alone = first + SPAN > start
    each = (group + 15) // 16  # programs of a node, where it has its own
    node = tl.where(alone, tile // each, (tile * 16 + lane) // group)
    member = tl.where(alone, tile % each * 16 + lane, (tile * 16 + lane) % group)
    there = (node < nodes) & (member < group)
    row = batch * nodes + tl.where(there, node, 0)
    head = kv * group + tl.where(there, member, 0)
    low, last = _reach(row, places, ends, firsts, window, HAS_ENDS, HAS_FIRSTS)
    stop = tl.minimum(first + SPAN, tl.max(tl.where(there, last, -1), 0) + 1)
    at = tl.arange(0, SIZE)
    in_head = at < D
    queries = tl.load(
        q + (row.to(tl.int64) * heads + head)[:, None] * D + at[None], mask=there[:, None] & in_head[None], other=0.0
    )
    slot = tl.load(slots + batch).to(tl.int64)
    base = (slot * kv_heads + kv) * capacity
    path = tree_paths + (batch * nodes + tl.minimum(tile // each, nodes - 1)) * width
    top = tl.full((16,), -float("inf"), tl.float32)
    total = tl.zeros((16,), tl.float32)
    result = tl.zeros((16, SIZE), tl.float32)
    begin = tl.maximum(first, tl.min(tl.where(there, low, 2147483647), 0) // COLUMNS * COLUMNS)
    for begins in range(begin, stop, COLUMNS):
        column = begins + tl.arange(0, COLUMNS)
        exists = column < stop
        held = column
        if not IS_CHAIN:
            behind = tl.maximum(column - start, 0)
            node_of = tl.load(path + behind, mask=exists & (column >= start) & (behind < width), other=0)
            held = tl.where(column < start, column, start + node_of)
        place = (base + held)[:, None] * D + at[None]
        k = tl.load(keys + place, mask=exists[:, None] & in_head[None], other=0)
        v = tl.load(values + place, mask=exists[:, None] & in_head[None], other=0)
        if keys.dtype.element_ty == tl.uint8:
            k, v = widened(k, q.dtype.element_ty), widened(v, q.dtype.element_ty)
        scores = dot(queries, tl.trans(k), tl.zeros((16, COLUMNS), tl.float32)) * scale
        if HAS_CAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * (scores / softcap)) + 1.0))
        seen = exists[None] & (column[None] <= last[:, None]) & (column[None] >= low[:, None]) & there[:, None]
        scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        decay = tl.exp(top - safe)
        weights = tl.exp(scores - safe[:, None])
        total = total * decay + tl.sum(weights, 1)
        result = dot(weights.to(v.dtype), v, result * decay[:, None])
        top = higher
    to = (row.to(tl.int64) * heads + head) * chunks + chunk
    tl.store(tops + to, top, mask=there)
    tl.store(totals + to, total, mask=there)
    tl.store(results + to[:, None] * D + at[None], result, mask=there[:, None] & in_head[None])


@triton.jit(do_not_specialize=["chunks"])
def _join(
    tops, totals, results, places, gates, ends, firsts, out, heads, chunks, window,
    D: tl.constexpr, SIZE: tl.constexpr, SPAN: tl.constexpr, GATED: tl.constexpr,
    HAS_ENDS: tl.constexpr, HAS_FIRSTS: tl.constexpr,
):  # fmt: skip
    """The attention of one head of a row, from those chunks that it reads."""
    row, head = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, SIZE)
    mask = at < D
    low, last = _reach(row, places, ends, firsts, window, HAS_ENDS, HAS_FIRSTS)
    top = -float("inf")
    total = 0.0
    result = tl.zeros((SIZE,), tl.float32)
    base = (row.to(tl.int64) * heads + head) * chunks
    for chunk in range(low // SPAN, last // SPAN + 1):
        its_top = tl.load(tops + base + chunk)
        higher = tl.maximum(top, its_top)
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        decay, share = tl.exp(top - safe), tl.exp(its_top - safe)
        total = total * decay + tl.load(totals + base + chunk) * share
        result = result * decay + tl.load(results + (base + chunk) * D + at, mask=mask, other=0.0) * share
        top = higher
    result = result / tl.where(total > 0.0, total, 1.0)  # what pads a tree may read nothing
    place = (row.to(tl.int64) * heads + head) * D + at
    if GATED:
        result = result / (1.0 + tl.exp(-tl.load(gates + place, mask=mask, other=0.0)))
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


def attend(
    layer: Layer, q: Tensor, gates: Tensor | None, keys: Tensor, values: Tensor, inputs: Inputs,
    places: Tensor, paths: Tensor | None, ends: Tensor | None, firsts: Tensor | None,
) -> Tensor:  # fmt: skip
    """[R, heads D] in the dtype of the queries [R, heads, D].

    places, paths: see `rows.plan`. ends, firsts: as in `abi.h`, int32 [R].
    """
    (rows, heads, d), kv_heads = q.shape, layer.kv_heads
    starts, batch = inputs.starts, len(inputs.starts)
    nodes, group = rows // batch, heads // kv_heads
    chunks = -(-inputs.longest // CHUNK)
    most = max(ROWS, _BYTES // (4 * heads * chunks * d))  # rows whose chunks are held at once
    if paths is None and rows > most:
        cut = lambda tensor, rows: None if tensor is None else tensor[rows]  # noqa: E731
        parts = list[Tensor]()
        for b in range(batch):
            one = replace(inputs, starts=starts[b : b + 1], slots=inputs.slots[b : b + 1])
            for begin in range(b * nodes, (b + 1) * nodes, most):
                some = slice(begin, min(begin + most, (b + 1) * nodes))
                mine = (cut(tensor, some) for tensor in (places, None, ends, firsts))
                parts.append(attend(layer, q[some], cut(gates, some), keys, values, one, *mine))
        return torch.cat(parts)
    tiles = -(-nodes * group // ROWS) if paths is None else nodes * -(-group // ROWS)
    tops, totals = torch.empty(2, rows, heads, chunks, device=q.device).unbind()
    results = torch.empty(rows, heads, chunks, d, device=q.device)
    size = triton.next_power_of_2(max(d, 16))
    columns = 64 if size <= 128 and q.dtype.itemsize == 2 else 32 if size <= 256 else 16
    window, fill = layer.window or 1 << 30, lambda tensor: starts if tensor is None else tensor
    _read[chunks, tiles, batch * kv_heads](
        q, keys, values, starts, inputs.slots, places, fill(paths), fill(ends), fill(firsts), tops, totals, results,
        nodes, heads, kv_heads, keys.shape[2], chunks, 1 if paths is None else paths.shape[2], window, layer.scale,
        layer.softcap or 1.0, d, size, columns, CHUNK, paths is None, layer.softcap > 0, ends is not None,
        firsts is not None, num_warps=4 if size <= 256 else 8, num_stages=2,
    )  # fmt: skip
    out = torch.empty(rows, heads * d, dtype=q.dtype, device=q.device)
    _join[rows, heads](
        tops, totals, results, places, q if gates is None else gates, fill(ends), fill(firsts), out, heads, chunks,
        window, d, size, CHUNK, gates is not None, ends is not None, firsts is not None, num_warps=1,
    )  # fmt: skip
    return out
