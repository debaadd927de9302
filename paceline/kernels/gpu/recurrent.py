"""Recurrent layers, see `recurrent.h`: a state is walked token by token, in the order of the text.

The state holds the columns before `bases`; those since then wait as rows in a ring. A pass first moves the state on by
`steps`. Each node of a tree then walks from there by itself: over what still waits, and along its own path. In a chain
one walk does both. A step is computed by one program for a head and 16 columns of its values, with the same sums in
every walk: so bits are those of plain decoding.

    mix     a row: convolution with the rows before it, norms of q and k, decays     waiting rows, rows of the pass
    walk    the state                                                                 heads, 16 values each, nodes
    close   a row: gate, norm; what later passes read goes into the ring

Sources: Gated DeltaNet (arXiv 2412.06464), Mamba-2 (2405.21060).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .products import activate
from .rows import added
from .structures import Inputs, Recurrent

WIDE = 16  # columns of a block of a state, and what channels and heads are padded to
DELTA_RULE, STATE_SPACE, SHORT_CONV = range(3)
_EACH = 256  # channels of a program


@triton.jit
def _made(
    sums, parts, apart, width, bias, scales, row, at, mask, HAS_BIAS: tl.constexpr, HAS_SCALES: tl.constexpr
):  # fmt: skip
    """Outputs of the input matrices in a row."""
    x = added(sums, parts, apart, row.to(tl.int64) * width + at, mask)
    if HAS_BIAS:
        x += tl.load(bias + at, mask=mask, other=0.0)
    if HAS_SCALES:
        x *= tl.load(scales + at, mask=mask, other=0.0)
    return x


@triton.jit
def _channels(
    sums, parts, apart, width, bias, scales, row, at, mask, channels_at, times_at,
    IS_PRODUCT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Channels of a row, as the ring keeps them."""
    x = _made(sums, parts, apart, width, bias, scales, row, channels_at + at, mask, HAS_BIAS, HAS_SCALES)
    if IS_PRODUCT:
        x *= _made(sums, parts, apart, width, bias, scales, row, times_at + at, mask, HAS_BIAS, HAS_SCALES)
    return x


@triton.jit
def _mix(
    sums, parts, apart, width, bias, scales, ring_rows, ring, mixed, starts, bases, slots, places, tree_paths,
    batch, nodes, conv, conv_bias, step_bias, decay, channels_at, times_at, step_at, beta_at, q_at, k_at,
    beta_scale, least_step, most_step,
    CHANNELS: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, TAPS: tl.constexpr,
    KEYS: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr, SIZE: tl.constexpr, HEADS_SIZE: tl.constexpr,
    PATH: tl.constexpr,
    KIND: tl.constexpr, IS_CHAIN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_CONV_BIAS: tl.constexpr,
):  # fmt: skip
    """Some channels of a row, which waits in the ring or is of this pass, or the decays and factors of its heads."""
    place, piece = tl.program_id(0), tl.program_id(1)
    pieces: tl.constexpr = (CHANNELS + GROUPS * EACH - 1) // (GROUPS * EACH)
    ring_width: tl.constexpr = PADDED + 2 * PADDED_HEADS
    is_waiting = place < batch * ring
    row = place - batch * ring
    b = tl.where(is_waiting, place // ring, row // nodes)
    start = tl.load(starts + b)
    held = tl.load(bases + b) - start  # columns count from the root of this pass
    own = held + place % ring
    if is_waiting & (own >= 0):
        return
    if not is_waiting:
        own = tl.load(places + row * 4 + 3) - start
    kept = ring_rows + tl.load(slots + b).to(tl.int64) * ring * ring_width
    to = mixed + place.to(tl.int64) * ring_width
    if piece < pieces:
        first = (piece * GROUPS + tl.arange(0, GROUPS)) * EACH
        lane = tl.arange(0, SIZE)
        at = first[:, None] + lane[None]
        mask = (lane < EACH)[None] & (at < CHANNELS)
        x = tl.zeros((GROUPS, SIZE), tl.float32)
        if HAS_CONV_BIAS:
            x = tl.load(conv_bias + at, mask=mask, other=0.0)
        for tap in tl.static_range(TAPS):
            column = own - (TAPS - 1 - tap)
            if column >= 0:
                node = column
                if not IS_CHAIN:
                    node = tl.load(tree_paths + row * PATH + column)
                read = _channels(
                    sums, parts, apart, width, bias, scales, b * nodes + node, at, mask, channels_at, times_at,
                    KIND == 2, HAS_BIAS, HAS_SCALES,
                )  # fmt: skip
            else:
                column += start
                read = tl.load(kept + column % ring * ring_width + at, mask=mask & (column >= 0), other=0.0)
            x = tl.fma(read, tl.load(conv + tap * PADDED + at, mask=mask, other=0.0), x)
        if KIND != 2:
            x = activate(x, 0)
        if KIND == 0:
            is_q = (first >= q_at) & (first < q_at + KEYS)
            is_k = (first >= k_at) & (first < k_at + KEYS)
            scale = 1.0 / tl.sqrt(tl.sum(tl.where(mask, x * x, 0.0), 1) + 1e-6)
            scale = tl.where(is_q, scale / tl.sqrt(EACH * 1.0), tl.where(is_k, scale, 1.0))
            x *= scale[:, None]
        tl.store(to + at, x, mask=mask)
    else:
        head = tl.arange(0, HEADS_SIZE)
        there = head < HEADS
        beta = tl.zeros((HEADS_SIZE,), tl.float32)
        if is_waiting:
            column = (own + start) % ring
            step = tl.load(kept + column * ring_width + PADDED + head, mask=there, other=0.0)
            if KIND == 0:
                beta = tl.load(kept + column * ring_width + PADDED + PADDED_HEADS + head, mask=there, other=0.0)
        else:
            step = _made(sums, parts, apart, width, bias, scales, row, step_at + head, there, HAS_BIAS, HAS_SCALES)
            if KIND == 0:
                beta = _made(sums, parts, apart, width, bias, scales, row, beta_at + head, there, HAS_BIAS, HAS_SCALES)
        step += tl.load(step_bias + head, mask=there, other=0.0)
        power = tl.exp(tl.minimum(step, 20.0))
        above = 1.0 + power  # log(1 + power), to the last digits of a small power
        small = tl.where(above == 1.0, power, tl.log(above) * (power / tl.where(above == 1.0, 1.0, above - 1.0)))
        step = tl.where(step > 20.0, step, small)
        step = tl.minimum(tl.maximum(step, least_step), most_step)
        tl.store(to + PADDED + head, tl.exp(step * tl.load(decay + head, mask=there, other=0.0)), mask=there)
        factor = step
        if KIND == 0:
            factor = beta_scale / (1.0 + tl.exp(-beta))
        tl.store(to + PADDED + PADDED_HEADS + head, factor, mask=there)


@triton.jit
def _walk(
    mixed, states, out, skip, starts, bases, steps, slots, sizes, places, tree_paths, batch, nodes, ring,
    q_at, k_at, v_at,
    HEADS: tl.constexpr, SHARE: tl.constexpr, KEY: tl.constexpr, SIZE: tl.constexpr, VALUE: tl.constexpr,
    PADDED: tl.constexpr, PADDED_HEADS: tl.constexpr, PATH: tl.constexpr,
    IS_DELTA: tl.constexpr, HAS_SKIP: tl.constexpr, MOVES: tl.constexpr, IS_CHAIN: tl.constexpr,
):  # fmt: skip
    """Walk 16 columns of the state of a head. MOVES: the state itself moves on; else up to one node of a tree."""
    blocks: tl.constexpr = (VALUE + 15) // 16
    width: tl.constexpr = PADDED + 2 * PADDED_HEADS
    head, block, b = tl.program_id(0) // blocks, tl.program_id(0) % blocks, tl.program_id(1)
    waiting = tl.load(starts + b) - tl.load(bases + b)
    moves = tl.load(steps + b)
    row = b * nodes + tl.program_id(2)
    first = 0
    last = moves
    if IS_CHAIN:
        last = waiting + tl.load(sizes + b)
    elif not MOVES:
        if (tl.program_id(2) < moves - waiting) | (tl.program_id(2) >= tl.load(sizes + b)):
            return  # text that the state has taken in, or what pads a tree
        first = moves
        last = waiting + tl.load(places + row * 4 + 3) - tl.load(starts + b) + 1
    key, lane = tl.arange(0, SIZE), tl.arange(0, 16)
    in_key, value = key < KEY, block * 16 + lane
    in_value = value < VALUE
    held = (tl.load(slots + b).to(tl.int64) * HEADS + head) * blocks + block
    place = states + held * KEY * 16 + key[:, None] * 16 + lane[None]
    state = tl.load(place, mask=in_key[:, None], other=0.0)
    bonus = 0.0
    if HAS_SKIP:
        bonus = tl.load(skip + head)
    key_at = head // SHARE * KEY + key
    for step in tl.range(first, last, num_stages=3):
        node = step - waiting
        if not MOVES:
            node = tl.load(tree_paths + row * PATH + tl.maximum(node, 0))
        at = tl.where(step < waiting, b * ring + step, batch * ring + b * nodes + node)
        x = mixed + at.to(tl.int64) * width
        k = tl.load(x + k_at + key_at, mask=in_key, other=0.0)
        q = tl.load(x + q_at + key_at, mask=in_key, other=0.0)
        v = tl.load(x + v_at + head * VALUE + value, mask=in_value, other=0.0)
        decay = tl.load(x + PADDED + head)
        factor = tl.load(x + PADDED + PADDED_HEADS + head)
        change = v * factor
        if IS_DELTA:
            change = (v - tl.sum(state * k[:, None], 0) * decay) * factor
        state = tl.fma(k[:, None].broadcast_to(SIZE, 16), change[None].broadcast_to(SIZE, 16), state * decay)
        y = tl.sum(state * q[:, None], 0)
        if HAS_SKIP:
            y = tl.fma(v, bonus, y)
        wanted = (step >= waiting) if MOVES else (step == last - 1)
        tl.store(out + ((b * nodes + node).to(tl.int64) * HEADS + head) * VALUE + value, y, mask=in_value & wanted)
        if MOVES & (step == moves - 1):
            tl.store(place, state, mask=in_key[:, None])


@triton.jit
def _close(
    sums, parts, apart, width, bias, scales, ring_rows, ring, walked, stride, out, starts, bases, steps, slots, places,
    nodes, weight, eps, channels_at, times_at, step_at, beta_at, gate_at,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, GROUP_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, TAPS: tl.constexpr,
    EACH: tl.constexpr, HEADS_SIZE: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr, IS_SHARED: tl.constexpr,
    GATE_FIRST: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """A group of the outputs of a row, as the next product reads them, or a part of the row for the ring."""
    row, piece = tl.program_id(0), tl.program_id(1)
    pieces: tl.constexpr = (CHANNELS + EACH - 1) // EACH
    ring_width: tl.constexpr = PADDED + 2 * PADDED_HEADS
    if piece < GROUPS:
        lane = tl.arange(0, GROUP_SIZE)
        mask = lane < GROUP
        at = piece * GROUP + lane
        y = tl.load(walked + row.to(tl.int64) * stride + at, mask=mask, other=0.0)
        gate = _made(sums, parts, apart, width, bias, scales, row, gate_at + at, mask, HAS_BIAS, HAS_SCALES)
        if KIND != 2:
            gate = activate(gate, 0)
        if GATE_FIRST:
            y *= gate
        if NORM:
            y *= 1.0 / tl.sqrt(tl.sum(y * y, 0) / GROUP + eps)
            if HAS_WEIGHT:
                y *= tl.load(weight + (lane if IS_SHARED else at), mask=mask, other=0.0)
        if not GATE_FIRST:
            y *= gate
        tl.store(out + row.to(tl.int64) * GROUPS * GROUP + at, y.to(out.dtype.element_ty), mask=mask)
    else:
        b, column = row // nodes, tl.load(places + row * 4 + 1)
        if column < tl.maximum(tl.load(bases + b) + tl.load(steps + b) - (TAPS - 1), 0):
            return
        to = ring_rows + (tl.load(slots + b).to(tl.int64) * ring + column % ring) * ring_width
        if piece < GROUPS + pieces:
            channel = (piece - GROUPS) * EACH + tl.arange(0, EACH)
            inside = channel < CHANNELS
            x = _channels(
                sums, parts, apart, width, bias, scales, row, channel, inside, channels_at, times_at,
                KIND == 2, HAS_BIAS, HAS_SCALES,
            )  # fmt: skip
            tl.store(to + channel, x, mask=inside)
        else:
            head = tl.arange(0, HEADS_SIZE)
            there = head < HEADS
            step = _made(sums, parts, apart, width, bias, scales, row, step_at + head, there, HAS_BIAS, HAS_SCALES)
            tl.store(to + PADDED + head, step, mask=there)
            if KIND == 0:
                step = _made(sums, parts, apart, width, bias, scales, row, beta_at + head, there, HAS_BIAS, HAS_SCALES)
                tl.store(to + PADDED + PADDED_HEADS + head, step, mask=there)


def walk(
    layer: Recurrent, sums: Tensor, states: Tensor, ring_rows: Tensor, inputs: Inputs, places: Tensor,
    paths: Tensor | None, dtype: torch.dtype, ends: bool,
) -> Tensor | None:  # fmt: skip
    """What the layer's last product reads, [R, outs] in `dtype`; states and rings move on. ends: only this happens.

    sums: of the layer's inputs, see `products.multiply`. states, ring_rows: see `abi.h`. places, paths: of `rows.plan`.
    """
    starts, slots, bases, steps = inputs.starts, inputs.slots, inputs.bases, inputs.steps
    (parts, rows, width), batch, ring, r = sums.shape, len(starts), ring_rows.shape[1], layer
    nodes, tree, device = rows // batch, starts if paths is None else paths, sums.device
    path, is_chain = 1 if paths is None else paths.shape[2], paths is None or nodes == 1
    padded, padded_heads = (-(-size // WIDE) * WIDE for size in (r.channels, r.heads))
    matrices = r.inputs[: r.num_inputs]
    bias = None
    if any(matrix.bias is not None for matrix in matrices):
        bias = torch.cat([torch.zeros(m.outs, device=device) if m.bias is None else m.bias for m in matrices])
    fill = lambda tensor: sums if tensor is None else tensor  # noqa: E731
    made = (sums, parts, sums.stride(0), width, fill(bias), fill(r.scales), ring_rows, ring)
    layout = (r.channels, padded, r.heads, padded_heads, r.taps)
    heads_size, has = triton.next_power_of_2(max(1, r.heads)), (bias is not None, r.scales is not None)
    mixed = torch.empty(batch * ring + rows, padded + 2 * padded_heads, device=device)
    each = r.key_dim if r.kind == DELTA_RULE else _EACH
    size = triton.next_power_of_2(each)
    several = max(1, _EACH // size)
    _mix[batch * ring + rows, -(-r.channels // (several * each)) + (r.heads > 0)](
        *made, mixed, starts, bases, slots, places, tree, batch, nodes,
        r.conv, fill(r.conv_bias), fill(r.step_bias), fill(r.decay),
        r.channels_at, r.times_at, r.step_at, r.beta_at, r.q_at, r.k_at, r.beta_scale, r.least_step, r.most_step,
        *layout, r.key_heads * r.key_dim, several, each, size, heads_size, path,
        r.kind, is_chain, *has, r.conv_bias is not None, num_warps=2,
    )  # fmt: skip
    outs = r.heads * r.value_dim or r.channels
    walked = mixed[batch * ring :]
    if r.heads:
        walked = torch.empty(rows, outs, device=device)
        size = triton.next_power_of_2(r.key_dim)
        for moves in (True,) if is_chain else (True, False):
            _walk[r.heads * -(-r.value_dim // WIDE), batch, 1 if moves else nodes](
                mixed, states, walked, fill(r.skip), starts, bases, steps, slots, inputs.sizes, places, tree,
                batch, nodes, ring, r.q_at, r.k_at, r.v_at,
                r.heads, r.heads // r.key_heads, r.key_dim, size, r.value_dim, padded, padded_heads, path,
                r.kind == DELTA_RULE, r.skip is not None, moves, is_chain, num_warps=1 if size <= 128 else 4,
            )  # fmt: skip
    out = None if ends else torch.empty(rows, outs, dtype=dtype, device=device)
    group = r.norm_size or outs
    groups = 0 if ends else outs // group
    _close[rows, groups + -(-r.channels // _EACH) + (r.heads > 0)](
        *made, walked, walked.stride(0), fill(out), starts, bases, steps, slots, places, nodes,
        fill(r.norm.weight), r.norm.eps, r.channels_at, r.times_at, r.step_at, r.beta_at, r.gate_at,
        groups, group, triton.next_power_of_2(group), *layout, _EACH, heads_size, r.kind,
        r.norm.kind > 0, bool(r.norm_shared), bool(r.gate_first), *has, r.norm.weight is not None,
        num_warps=1 if group <= 512 else 4,
    )  # fmt: skip
    return out
