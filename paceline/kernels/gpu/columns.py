"""Moves the columns of accepted tokens next to their root, in all layers of a cache by one launch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["slot", "start", "count"])
def _move(first, numbers, slot, start, capacity, count, SIZE: tl.constexpr, MOST: tl.constexpr):
    """One head of the keys or values of a layer. numbers: nodes, then of each tensor where it is, its heads and size."""
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


def move_columns(tensors: Sequence[Tensor], slot: int, start: int, nodes: Sequence[int]) -> None:
    """Copy the columns start + nodes[i] of a slot to start + 1 + i. tensors: [slots, H, capacity, D] of one dtype."""
    first = tensors[0]
    size = first.element_size()
    numbers = [*nodes]
    for tensor in tensors:
        numbers += [(tensor.data_ptr() - first.data_ptr()) // size, tensor.shape[1], tensor.shape[3]]
    staged = torch.tensor(numbers, pin_memory=first.is_cuda).to(first.device, non_blocking=True)
    widest, heads = max(tensor.shape[3] for tensor in tensors), max(tensor.shape[1] for tensor in tensors)
    _move[len(tensors), heads](
        first, staged, slot, start, first.shape[2], len(nodes), triton.next_power_of_2(widest),
        triton.next_power_of_2(len(nodes)), num_warps=4,
    )  # fmt: skip
