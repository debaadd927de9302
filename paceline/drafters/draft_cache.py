"""Keys and values of a draft layer: what each slot has digested, and behind it the rows of one round.

    columns   0 .. n_b - 1 | n_b .. S - 1   | S .. S + M - 1            n_b: `lengths` of slot b
    holds     digested     | never looked at | rows of this round        S: the longest of the batch, so that the
                                                                         rows of a round lie in the same columns

The rows of a round are forgotten by not being counted in `lengths`; the next ones overwrite them.
"""

from collections.abc import Sequence
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

BLOCK = 64
"""Columns are added in multiples of this many."""

Rows: TypeAlias = slice | Tensor
"""Slots of a batch: a slice where they lie side by side, which reads without copying."""


@final
class DraftCache:
    """One layer's keys and values `[slots, H, capacity, d]`, grown as needed.

    lengths: digested columns of each slot.
    """

    def __init__(self, num_slots: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        # Zeros, not uninitialised memory: a column that is masked weighs 0, and 0 * NaN is NaN.
        self.keys = torch.zeros(num_slots, heads, 4 * BLOCK, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.lengths = [0] * num_slots

    @property
    def capacity(self) -> int:
        """Columns there is room for."""
        return self.keys.shape[2]

    def ensure(self, columns: int) -> None:
        """Make room for this many columns."""
        if columns > self.capacity:
            more = max(2 * self.capacity, -(-columns // BLOCK) * BLOCK) - self.capacity
            self.keys, self.values = (_wider(held, more) for held in (self.keys, self.values))

    def extend_cache(self, slot: int, keys: Tensor, values: Tensor) -> None:
        """Put [P, H, d] behind what the slot has digested."""
        begin, count = self.lengths[slot], len(keys)
        self.ensure(begin + count)
        self.keys[slot, :, begin : begin + count] = _finite(keys).transpose(0, 1)
        self.values[slot, :, begin : begin + count] = _finite(values).transpose(0, 1)
        self.lengths[slot] = begin + count

    def write(self, rows: Rows, begin: int, keys: Tensor, values: Tensor) -> None:
        """Put the rows of a round [B, F, H, d] at column `begin`; there must be room."""
        end = begin + keys.shape[1]
        self.keys[rows, :, begin:end] = _finite(keys).transpose(1, 2)
        self.values[rows, :, begin:end] = _finite(values).transpose(1, 2)

    def release(self, slot: int) -> None:
        """Forget a slot."""
        self.lengths[slot] = 0


def side_by_side(slots: Sequence[int], device: torch.device) -> Rows:
    """These slots as an index."""
    if list(slots) == list(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[0] + len(slots))
    return torch.tensor(slots, device=device)


def _finite(states: Tensor) -> Tensor:
    """An overflow in a row that is forgotten must not outlive it."""
    return torch.nan_to_num(states)


def _wider(held: Tensor, columns: int) -> Tensor:
    """More columns of zeros."""
    return nn.functional.pad(held, (0, 0, 0, columns))
