"""Moves and copies columns of all layers of a cache by one launch."""

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["slot", "start", "count"])
def _move(first, numbers, slot, start, capacity, count, SIZE: tl.constexpr, MOST: tl.constexpr):
    """One head of the keys or values of a layer. numbers: nodes; of each tensor where it is, its heads and size."""
    which, head = tl.program_id(0), tl.program_id(1)
    own = numbers + count + which * 3
    heads, d = tl.load(own + 1), tl.load(own + 2)
    if head < heads:
        base = first + tl.load(own) + (slot * heads + head) * capacity * d
        to, at = tl.arange(0, MOST), tl.arange(0, SIZE)
        mask = (to < count)[:, None] & (at < d)[None]
        node = tl.load(numbers + to, mask=to < count, other=0)
        x = tl.load(base + (start + node)[:, None] * d + at[None], mask=mask, other=0)
        tl.debug_barrier()  # all is read before anything is written
        tl.store(base + (start + 1 + to)[:, None] * d + at[None], x, mask=mask)


@triton.jit(do_not_specialize=["slot", "begin", "count"])
def _copy(first, numbers, out, slot, begin, capacity, count, SIZE: tl.constexpr, MOST: tl.constexpr):
    """One head of a tensor. numbers: of each tensor where it is, its heads and their size, and its place in `out`."""
    which, head = tl.program_id(0), tl.program_id(1)
    own = numbers + which * 4
    heads, d = tl.load(own + 1), tl.load(own + 2)
    if head < heads:
        base = first + tl.load(own) + ((slot * heads + head) * capacity + begin) * d
        to = out + tl.load(own + 3) + head * count * d
        at = tl.arange(0, SIZE)
        for column in range(0, count, MOST):
            row = column + tl.arange(0, MOST)
            place, mask = row[:, None] * d + at[None], (row < count)[:, None] & (at < d)[None]
            tl.store(to + place, tl.load(base + place, mask=mask, other=0), mask=mask)


def _placed(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Of each tensor how many numbers lie between it and the first, its heads, and their size."""
    first, size = tensors[0].data_ptr(), tensors[0].element_size()
    return [[(tensor.data_ptr() - first) // size, tensor.shape[1], tensor.shape[3]] for tensor in tensors]


def _staged(numbers: list[int], like: Tensor) -> Tensor:
    return torch.tensor(numbers, pin_memory=like.is_cuda).to(like.device, non_blocking=True)


def move_columns(tensors: Sequence[Tensor], slot: int, start: int, nodes: Sequence[int]) -> None:
    """As `kv_cache.move_columns`, of tensors of one dtype."""
    first, places = tensors[0], _placed(tensors)
    numbers = _staged([*nodes, *itertools.chain(*places)], first)
    heads, widest = (max(sizes) for sizes in list(zip(*places, strict=True))[1:])
    _move[len(tensors), heads](
        first, numbers, slot, start, first.shape[2], len(nodes), triton.next_power_of_2(widest),
        triton.next_power_of_2(len(nodes)), num_warps=4,
    )  # fmt: skip


def copy_columns(tensors: Sequence[Tensor], slot: int, begin: int, end: int) -> list[Tensor]:
    """As `kv_cache.copy_columns`, of tensors of one dtype; the copies share memory."""
    first, places, count = tensors[0], _placed(tensors), end - begin
    sizes = [heads * count * d for _, heads, d in places]
    starts = itertools.accumulate(sizes[:-1], initial=0)
    numbers = _staged([*itertools.chain(*([*place, at] for place, at in zip(places, starts, strict=True)))], first)
    out = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
    heads, widest = (max(sizes) for sizes in list(zip(*places, strict=True))[1:])
    _copy[len(tensors), heads](
        first, numbers, out, slot, begin, first.shape[2], count, triton.next_power_of_2(widest), 16, num_warps=4
    )
    parts = zip(out.split(sizes), places, strict=True)
    return [part.view(heads, count, d) for part, (_, heads, d) in parts]
