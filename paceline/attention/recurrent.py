"""The states of recurrent layers for every sequence, with rollback by length.

A gated delta net, a Mamba layer or a short convolution has one state for each sequence in place of columns. It is kept
some tokens behind, after `bases[slot]` columns, together with what these layers read of the tokens since then. A pass
walks from the state over these rows, the text and every path of the tree. So a rejected token leaves nothing, and the
state is computed token by token, in the order of the text, with the sums of plain decoding.

    columns   0 .................. | base ........ L-1 | L .... L+N-1 | ...
    holds     in the state         | rows              | rows of the pass
    a pass    reads `tail` of them | walks these, then | every path of the tree
    then      the state moves on to the last column that is known for good

Rows lie in a ring: column c is row c mod capacity. A commit moves rows as `SlotCache.commit` moves columns.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PAGE = 16
"""The columns of a page of the prefix cache in native passes; vLLM's block size."""
_LEAST = 16  # rows of a ring


@dataclass(frozen=True)
class RecurrentLayer:
    """What a recurrent layer keeps of a sequence.

    index: of the decoder layer. width: of the row of a token. tail: how many rows before the state it reads.
    state: the shape of the state in float32; empty if there is none besides the rows.
    """

    index: int
    width: int
    tail: int
    state: tuple[int, ...]


class RecurrentStates:
    """States [slots, ...] and rows [slots, capacity, width] of recurrent layers.

    lengths: the committed tokens of each slot, see `SlotCache`.
    waves: the pass in progress, of layers that torch computes.
    stops_at_pages: whether states also stop at multiples of `PAGE`, where they are copied for the prefix cache.
    copies: by slot and column, the states there (`copy_of`): those of the last stop, and where it was asked for.
    """

    def __init__(self, layers: Sequence[RecurrentLayer], lengths: list[int], dtype: torch.dtype, device: torch.device):
        self.layers, self._lengths = list(layers), lengths
        self.capacity, self.tail = _LEAST, max((layer.tail for layer in layers), default=0)
        size = len(lengths)
        self.states: list[Any] = [torch.zeros(size, *layer.state, device=device) for layer in layers]
        self.rows = [torch.zeros(size, _LEAST, layer.width, dtype=dtype, device=device) for layer in layers]
        self.bases = [0] * size
        self.stops_at_pages = False
        self.copies = [dict[int, list[Tensor]]() for _ in lengths]
        self._stops = [dict[int, bool]() for _ in lengths]
        self.waves: Any = None
        self.text = 0
        self._held = dict[int, int]()  # by slot, the columns that its state may take in
        self._slots, self.steps = list[int](), list[int]()

    def begin(self, slots: Sequence[int], num_nodes: int, text: int) -> None:
        """Announce a pass, see `SlotCache.begin`. Its rows go to the columns after the committed ones.

        steps: for each row of the pass, how many columns its state moves on, from its base. text: as given.
        """
        self._slots, self.steps, self.text, room = list(slots), [], text, 0
        for slot in slots:
            base, known = self.bases[slot], self._lengths[slot] + text
            assert base <= self._lengths[slot], (base, self._lengths[slot])
            page = known // PAGE * PAGE if self.stops_at_pages else 0
            to = max((stop for stop in (page, *self._stops[slot]) if base < stop <= known), default=known)
            to = max(base, min(to, self._held.get(slot, to)))
            self.steps.append(to - base)
            room = max(room, self._lengths[slot] + num_nodes - to, self._lengths[slot] - base)
        self._ensure(room + 2 * self.tail)

    def finish(self) -> None:
        """The states of the announced pass have moved on."""
        for slot, steps in zip(self._slots, self.steps, strict=True):
            base = self.bases[slot] = self.bases[slot] + steps
            asked = base in self._stops[slot]
            if steps and (asked or (self.stops_at_pages and base % PAGE == 0)):
                held = self.copies[slot]
                for column in [column for column in held if column not in self._stops[slot]]:
                    del held[column]
                held[base] = self.copy_of(slot)
        self._slots, self.steps = [], []

    @torch.inference_mode()
    def commit(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        """Move the rows of the accepted nodes of a pass that began at column `start` next to its root."""
        if list(nodes) != list(range(1, len(nodes) + 1)):
            to = [(start + 1 + place) % self.capacity for place in range(len(nodes))]
            source = [(start + node) % self.capacity for node in nodes]
            for rows in self.rows:
                rows[slot, to] = rows[slot, source]

    @torch.inference_mode()
    def reset(self, slot: int) -> None:
        """Forget a sequence."""
        for state in self.states:
            state[slot] = 0
        self.release(slot)

    def release(self, slot: int) -> None:
        """Drop what is kept of a sequence besides its state."""
        self.bases[slot] = 0
        self.copies[slot].clear()
        self._stops[slot].clear()
        self._held.pop(slot, None)

    def stop_at(self, slot: int, column: int, is_fork: bool = False) -> None:
        """Copy the state at this column. is_fork: a pass over text shall end there, see `forks`."""
        self._stops[slot][column] = is_fork

    def forks(self, slot: int, begin: int, end: int) -> list[int]:
        """Where passes over the columns from `begin` to `end` shall end besides."""
        return sorted(stop for stop, is_fork in self._stops[slot].items() if is_fork and begin < stop < end)

    def can_return_to(self, slot: int, length: int) -> bool:
        """Whether the first `length` tokens can be kept without the others."""
        return length >= self.bases[slot]

    @contextmanager
    def held(self, slots: Sequence[int], lengths: Sequence[int] | None = None) -> Iterator[None]:
        """Let the states of these slots stay where they are, so that all that is committed meanwhile can be undone.

        lengths: let them move on to these many columns.
        """
        before, ends = dict(self._held), [self.bases[slot] for slot in slots] if lengths is None else lengths
        self._held |= {slot: min(end, before.get(slot, end)) for slot, end in zip(slots, ends, strict=True)}
        try:
            yield
        finally:
            for slot in slots:
                self._held.pop(slot, None)
            self._held |= {slot: before[slot] for slot in slots if slot in before}

    # Copies at the base, for the prefix cache

    def copy_of(self, slot: int) -> list[Tensor]:
        """The states of a slot, and the rows before its base."""
        places = self._places(self.bases[slot])
        return [s[slot].clone() for s in self.states] + [rows[slot, places] for rows in self.rows]

    @torch.inference_mode()
    def restore(self, slot: int, base: int, copy: Sequence[Tensor]) -> None:
        """Fill a slot with a copy that was made at `base`."""
        places = self._places(base)
        for state, kept in zip(self.states, copy, strict=False):
            state[slot] = kept
        for rows, kept in zip(self.rows, copy[len(self.states) :], strict=True):
            rows[slot, places] = kept
        self.bases[slot] = base

    def _places(self, base: int) -> list[int]:
        return [column % self.capacity for column in range(max(0, base - self.tail), base)]

    @property
    def bytes_of_slot(self) -> int:
        """Bytes of one sequence."""
        return sum(t.nbytes for t in (*self.states, *self.rows)) // max(1, len(self.bases))

    @torch.inference_mode()
    def _ensure(self, room: int) -> None:
        """Extend the rings to at least `room` rows. Passes of other slots may wait for their commits."""
        if room <= self.capacity:
            return
        before, capacity = self.capacity, max(2 * self.capacity, 1 << (room - 1).bit_length())
        larger = [rows.new_zeros(len(rows), capacity, rows.shape[2]) for rows in self.rows]
        for slot, base in enumerate(self.bases):
            first = max(0, base - self.tail)
            columns = range(first, first + before)
            old, new = [c % before for c in columns], [c % capacity for c in columns]
            for more, rows in zip(larger, self.rows, strict=True):
                more[slot, new] = rows[slot, old]
        self.rows, self.capacity = larger, capacity
