"""What happens to rows between two products: parts are added, then norms, the residual stream, rotary positions.

A row, or one head of it, is computed by a program of its own, whose sums are taken in an order that its width fixes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .e4m3 import rounded
from .formats import group
from .structures import Inputs, Layer, Matrix, Norm


@triton.jit
def added(sums, parts, stride, place, mask):
    """The sum of the parts of a product, in their order."""
    total = tl.load(sums + place, mask=mask, other=0.0)
    for part in range(1, parts):
        total += tl.load(sums + tl.cast(part, tl.int64) * stride + place, mask=mask, other=0.0)
    return total


@triton.jit
def normed(x, weight, bias, at, mask, size, eps, KIND: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """RMS norm (KIND 1) or layer norm (2) over the masked numbers of a vector; 0: the vector itself."""
    if KIND == 2:
        x = tl.where(mask, x - tl.sum(x, 0) / size, 0.0)
    if KIND > 0:
        x = x / tl.sqrt(tl.sum(x * x, 0) / size + eps)
        if HAS_WEIGHT:
            x *= tl.load(weight + at, mask=mask, other=0.0)
        if HAS_BIAS:
            x += tl.load(bias + at, mask=mask, other=0.0)
    return x


@triton.jit(do_not_specialize=["rows"])
def _settle(
    stream, sums, sums_bias, more, out, last, parts, rows, width, out_width,
    post_weight, post_bias, post_eps, next_weight, next_bias, next_eps, times, scalar,
    SIZE: tl.constexpr, HAS_SUMS: tl.constexpr, HAS_SUMS_BIAS: tl.constexpr, HAS_MORE: tl.constexpr,
    HAS_OUT: tl.constexpr, HAS_LAST: tl.constexpr,
    POST: tl.constexpr, POST_WEIGHT: tl.constexpr, POST_BIAS: tl.constexpr,
    NEXT: tl.constexpr, NEXT_WEIGHT: tl.constexpr, NEXT_BIAS: tl.constexpr,
):  # fmt: skip
    """A row: stream = (stream + times post(sums + bias)) * scalar + more; out = next(stream)."""
    row = tl.program_id(0)
    at = tl.arange(0, SIZE)
    mask = at < width
    place = row.to(tl.int64) * width + at
    x = tl.load(stream + place, mask=mask, other=0.0)
    if HAS_SUMS:
        y = added(sums, parts, tl.cast(rows, tl.int64) * width, place, mask)
        if HAS_SUMS_BIAS:
            y += tl.load(sums_bias + at, mask=mask, other=0.0)
        x += times * normed(y, post_weight, post_bias, at, mask, width, post_eps, POST, POST_WEIGHT, POST_BIAS)
        x *= scalar
    if HAS_MORE:
        x += tl.load(more + place, mask=mask, other=0.0)
    if HAS_SUMS or HAS_MORE:
        tl.store(stream + place, x, mask=mask)
    if HAS_OUT:
        x = normed(x, next_weight, next_bias, at, mask, width, next_eps, NEXT, NEXT_WEIGHT, NEXT_BIAS)
        tl.store(out + row.to(tl.int64) * out_width + at, x.to(out.dtype.element_ty), mask=mask)
    if HAS_LAST:
        tl.store(last + place, x, mask=mask)


def settle(
    stream: Tensor,
    sums: Tensor | None = None,
    bias: Tensor | None = None,
    post: Norm | None = None,
    following: Norm | None = None,
    out: Tensor | None = None,
    times: float = 1.0,
    scalar: float = 1.0,
    more: Tensor | None = None,
    last: Tensor | None = None,
) -> Tensor | None:
    """Add a product to the residual stream, float32 [R, E], in place; then norm the stream for the next one.

    stream = (stream + times * post(sums + bias)) * scalar + more, then out = following(stream).

    sums: of `products.multiply`, [parts, R, E]. out: [R, E], rows may be apart; it is returned. last: `out` in float32.
    """
    rows, width = stream.shape
    size = triton.next_power_of_2(width)
    post, following = post or Norm(), following or Norm()
    fill = lambda tensor: stream if tensor is None else tensor  # noqa: E731
    _settle[(rows,)](
        stream, fill(sums), fill(bias), fill(more), fill(out), fill(last), 1 if sums is None else len(sums),
        rows, width, width if out is None else out.stride(0),
        fill(post.weight), fill(post.bias), post.eps, fill(following.weight), fill(following.bias), following.eps,
        times, scalar, size, sums is not None, bias is not None, more is not None, out is not None, last is not None,
        post.kind, post.weight is not None, post.bias is not None,
        following.kind, following.weight is not None, following.bias is not None,
        num_warps=4 if size <= 4096 else 8,
    )  # fmt: skip
    return out


@triton.jit
def _normed_head(
    x, y, sums, parts, stride, begin, bias, weight, eps, head, heads, at, other, mask,
    D: tl.constexpr, WHOLE: tl.constexpr, ALL: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """RMS norm of a head, whose numbers `at` and `other` are x and y; WHOLE: over all heads, which start at `begin`."""
    if WHOLE:
        every = tl.arange(0, ALL)
        there = every < heads * D
        whole = added(sums, parts, stride, begin + every, there)
        if HAS_BIAS:
            whole += tl.load(bias + every, mask=there, other=0.0)
        scale = 1.0 / tl.sqrt(tl.sum(whole * whole, 0) / (heads * D) + eps)
    else:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
    first = head * D if WHOLE else 0
    x *= scale * tl.load(weight + first + at, mask=mask, other=0.0)
    y *= scale * tl.load(weight + first + other, mask=mask, other=0.0)
    return x, y


@triton.jit(do_not_specialize=["rows"])
def _rotate(
    sums, parts, rows, width, places, q, gates, keys, values, q_bias, k_bias, v_bias,
    q_weight, k_weight, v_weight, q_eps, k_eps, v_eps, cos, sin, capacity,
    heads, kv_heads,
    D: tl.constexpr, SIZE: tl.constexpr, ROTATED: tl.constexpr, WHOLE: tl.constexpr, ALL: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, V_NORM: tl.constexpr, V_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, JOINED: tl.constexpr, GATED: tl.constexpr, HAS_V: tl.constexpr, ROW_TABLES: tl.constexpr,
):  # fmt: skip
    """One head of a row of q, k or v: bias, norm, rotation; queries go to `q`, the others into the cache."""
    row, head = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, SIZE)
    mask = at < D
    stride = tl.cast(rows, tl.int64) * width
    step: tl.constexpr = 2 * D if GATED else D  # of the heads of q
    is_q = head < heads
    is_k = (head >= heads) & (head < heads + kv_heads)
    kv = tl.where(is_k, head - heads, head - heads - kv_heads)
    k_at = heads * step
    v_at = k_at + (kv_heads * D if HAS_V else 0)
    first = tl.where(is_q, head * step, tl.where(is_k, k_at, v_at) + kv * D)
    base = row.to(tl.int64) * width
    half: tl.constexpr = ROTATED // 2
    rotates = at < ROTATED
    other = tl.where(rotates, tl.where(at < half, at + half, at - half), at)
    x = added(sums, parts, stride, base + first + at, mask)
    y = added(sums, parts, stride, base + first + other, mask)
    if HAS_BIAS:
        if JOINED or is_q:
            x += tl.load(q_bias + first + at, mask=mask, other=0.0)
            y += tl.load(q_bias + first + other, mask=mask, other=0.0)
        elif is_k:
            x += tl.load(k_bias + kv * D + at, mask=mask, other=0.0)
            y += tl.load(k_bias + kv * D + other, mask=mask, other=0.0)
        else:
            x += tl.load(v_bias + kv * D + at, mask=mask, other=0.0)
            y += tl.load(v_bias + kv * D + other, mask=mask, other=0.0)
    if is_q:
        if Q_NORM:
            x, y = _normed_head(
                x, y, sums, parts, stride, base, q_bias, q_weight, q_eps, head, heads, at, other, mask,
                D, WHOLE, ALL, HAS_BIAS,
            )  # fmt: skip
    elif is_k:
        if K_NORM:
            x, y = _normed_head(
                x, y, sums, parts, stride, base + k_at, k_bias, k_weight, k_eps, kv, kv_heads, at, other, mask,
                D, WHOLE, ALL, HAS_BIAS,
            )  # fmt: skip
    else:
        if V_NORM:
            x /= tl.sqrt(tl.sum(x * x, 0) / D + v_eps)
            if V_WEIGHT:
                x *= tl.load(v_weight + at, mask=mask, other=0.0)
    if ROTATED > 0:
        if is_q | is_k:
            table = row if ROW_TABLES else tl.load(places + row * 4 + 2)
            turn = table.to(tl.int64) * ROTATED + at
            c = tl.load(cos + turn, mask=rotates, other=1.0)
            s = tl.load(sin + turn, mask=rotates, other=0.0)
            x = x * c + tl.where(at < half, -y, y) * s
    if is_q:
        tl.store(q + (row.to(tl.int64) * heads + head) * D + at, x.to(q.dtype.element_ty), mask=mask)
        if GATED:
            gate = added(sums, parts, stride, base + first + D + at, mask)
            if HAS_BIAS:
                gate += tl.load(q_bias + first + D + at, mask=mask, other=0.0)
            tl.store(gates + (row.to(tl.int64) * heads + head) * D + at, gate, mask=mask)
    else:
        x = tl.where(x == x, x, 0.0)  # finite: an overflow in a rejected row must not reach others as 0 * NaN
        largest: tl.constexpr = 65504.0 if keys.dtype.element_ty == tl.float16 else 3.3895313892515355e38
        x = tl.minimum(tl.maximum(x, -largest), largest)
        slot = tl.load(places + row * 4).to(tl.int64)
        column = tl.load(places + row * 4 + 1)
        mask &= column >= 0
        to = ((slot * kv_heads + kv) * capacity + column) * D + at
        stored = rounded(x) if keys.dtype.element_ty == tl.uint8 else x.to(keys.dtype.element_ty)
        if is_k:
            tl.store(keys + to, stored, mask=mask)
        else:
            tl.store(values + to, stored, mask=mask)


def rotate(
    layer: Layer,
    sums: Tensor,
    places: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    by_row: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Queries [R, heads, D] in this dtype, and gates in float32; keys and values go into the cache.

    sums: of q, k and v, see `products.multiply`. places: see `plan`.
    keys, values: [slots, kv_heads, capacity, D], uint8 for e4m3.
    cos, sin: float32 [positions, rotary_dim], or [R, rotary_dim] where they are given `by_row`.
    """
    parts, rows, width = sums.shape
    heads, kv_heads, d = layer.heads, layer.kv_heads, layer.head_dim
    q = torch.empty(rows, heads, d, dtype=dtype, device=sums.device)
    gates = torch.empty(rows, heads, d, device=sums.device) if layer.is_gated else None
    joined = layer.q.outs > (2 if layer.is_gated else 1) * heads * d
    has_k = joined or layer.k.data is not None
    norms, v = (layer.q_norm, layer.k_norm, layer.v_norm), layer.k if layer.v.data is None else layer.v
    fill = lambda tensor: sums if tensor is None else tensor  # noqa: E731
    every = triton.next_power_of_2(max(heads, kv_heads) * d) if layer.norm_whole else 1
    _rotate[(rows, heads + (2 * kv_heads if has_k else 0))](
        sums, parts, rows, width, places, q, fill(gates), keys, values,
        *(fill(matrix.bias) for matrix in (layer.q, layer.k, v)), *(fill(norm.weight) for norm in norms),
        *(norm.eps for norm in norms), cos, sin, keys.shape[2], heads, kv_heads,
        d, triton.next_power_of_2(d), layer.rotary_dim, bool(layer.norm_whole), every,
        *(norm.kind > 0 for norm in norms), layer.v_norm.weight is not None,
        layer.q.bias is not None, joined, bool(layer.is_gated), joined or layer.v.data is not None, by_row,
        num_warps=1 if not layer.norm_whole else 4,
    )  # fmt: skip
    return q, gates


@triton.jit(do_not_specialize=["nodes", "old", "width", "max_position"])
def _plan(
    starts, slots, offsets, sizes, parents, places, tree_paths, nodes, old, width, max_position,
    IS_CHAIN: tl.constexpr,
):  # fmt: skip
    """Of a node: its slot, its column, its position, and the column that it has in plain decoding; its path."""
    node, batch = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts + batch)
    depth = old + node
    if not IS_CHAIN:
        total = old + nodes
        depth = 0
        above = tl.load(parents + batch * total + old + node)
        while above >= 0:
            depth += 1
            above = tl.load(parents + batch * total + above)
        at = old + node
        path = tree_paths + (batch * nodes + node) * width
        for left in range(0, depth + 1):
            tl.store(path + depth - left, at)
            at = tl.load(parents + batch * total + at)
    place = places + (batch * nodes + node) * 4
    tl.store(place, tl.load(slots + batch))
    is_there = node < tl.load(sizes + batch)
    tl.store(place + 1, tl.where(is_there, start + old + node, -1))
    tl.store(place + 2, tl.minimum(start + depth, max_position) + tl.load(offsets + batch))
    tl.store(place + 3, tl.where(is_there, start + depth, start - 1))


def plan(inputs: Inputs, nodes: int, old: int, max_position: int) -> tuple[Tensor, Tensor | None]:
    """Where the nodes of a pass are: int32 [R, 4] slot, column, position, and column in plain decoding; their paths.

    Behind the size of a tree the column is -1: nothing is written, and only committed columns are read.
    paths: int32 [B, N, old + N], None of chains.
    """
    starts, parents, width = inputs.starts, inputs.parents, old + nodes
    places = torch.empty(len(starts) * nodes, 4, dtype=torch.int32, device=starts.device)
    paths = None if parents is None else torch.empty(len(starts), nodes, width, dtype=torch.int32, device=starts.device)
    most = (1 << 31) - 1 - width if max_position < 0 else max_position
    _plan[nodes, len(starts)](
        starts, inputs.slots, inputs.offsets, inputs.sizes, starts if parents is None else parents, places,
        starts if paths is None else paths, nodes, old, width, most, parents is None, num_warps=1,
    )  # fmt: skip
    return places, paths


@triton.jit
def _keep(rows, places, states, width, columns, stride, SIZE: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, SIZE)
    slot, column = tl.load(places + row * 4).to(tl.int64), tl.load(places + row * 4 + 1)
    x = tl.load(rows + row.to(tl.int64) * width + at, mask=at < width, other=0.0)
    to = (slot * columns + column) * stride + at
    tl.store(states + to, x.to(states.dtype.element_ty), mask=(at < width) & (column >= 0))


def keep(rows: Tensor, places: Tensor, states: Tensor, columns: int, stride: int) -> None:
    """Store float32 [R, E] in the slots and columns of the nodes. columns, stride: as in `abi.h`."""
    size = triton.next_power_of_2(rows.shape[1])
    _keep[(len(rows),)](rows, places, states, rows.shape[1], columns, stride, size, num_warps=4)


@triton.jit
def _embed(table, ids, out, vocabulary, width, scale, SIZE: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, SIZE)
    mask = at < width
    token = tl.load(ids + row).to(tl.int64)
    x = tl.load(table + token * width + at, mask=mask & (token < vocabulary), other=0.0).to(tl.float32) * scale
    tl.store(out + row.to(tl.int64) * width + at, x, mask=mask)


@triton.jit(do_not_specialize=["count"])
def _unpack(
    data, scales, ids, out, count, vocabulary, times,
    K: tl.constexpr, STEP: tl.constexpr, N: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    at, first = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1) * STEP
    there = at < count
    token = tl.load(ids + at, mask=there, other=0)
    known = there & (token < vocabulary)
    for j in tl.static_range(STEP // 32):
        k = first + 32 * j + tl.arange(0, 32)
        weights = group(data, scales, token, known, first, j, K, FORMAT, GROUP) * times
        tl.store(out + at.to(tl.int64)[:, None] * K + k[None], weights, mask=there[:, None] & (k < K)[None])


def embed(table: Tensor | Matrix, ids: Tensor, out: Tensor, scale: float) -> None:
    """Fill float32 [R, E] with rows of a table [V, E], by their ids int32 [R], times `scale`.

    Blocks are unpacked. Tokens without a row get zeros: ids on the device are not checked.
    """
    count, width = out.shape
    if isinstance(table, Matrix):
        _unpack[-(-count // 16), -(-width // 256)](
            table.data, table.scales, ids, out, count, table.outs, scale, width, 256, 16, table.format, table.group,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        return
    size = triton.next_power_of_2(width)
    _embed[(count,)](table, ids, out, len(table), width, scale, size, num_warps=4 if size <= 4096 else 8)
