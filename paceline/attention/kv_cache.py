"""The slot cache: keys and values of every sequence, with rollback by length.

One pair of tensors `[slots, heads, capacity, dim]` per layer. A pass over N nodes writes them past the committed
length; `commit` moves the accepted rows to the front; rejected rows are overwritten by the next pass, so rolling back
costs nothing.

    columns       0 ............ L-1 | L      L+1 .. L+N-1 | ...
    holds         committed tokens   | root   other nodes  | leftovers, never read
    after commit  0 ................ | L (root) .. L+a     | lengths[slot] = L + 1 + a   (a accepted)
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Cache

from ..errors import CacheFull
from ..system.hardware import available_memory, return_free_memory
from ..system.pages import free_pages, lazy_zeros
from .columns import BLOCK, Reserved, round_up
from .recurrent import RecurrentLayer, RecurrentStates


class Spare(Protocol):
    """Something that holds memory which it can free."""

    num_bytes: int

    def shrink(self, num_bytes: int) -> None:
        """Free this many bytes, or all."""


def move_columns(tensors: Sequence[Tensor], slot: int, start: int, nodes: Sequence[int]) -> None:
    """Copy the columns start + nodes[i] of a slot to start + 1 + i. tensors: [slots, H, capacity, dim]."""
    source = torch.tensor(nodes, device=tensors[0].device) + start
    for layer in tensors:  # advanced indexing copies before writing: source and destination may overlap
        layer[slot, :, start + 1 : start + 1 + len(nodes)] = layer[slot, :, source]


def copy_columns(tensors: Sequence[Tensor], slot: int, begin: int, end: int) -> list[Tensor]:
    """The columns begin .. end - 1 of a slot, [H, end - begin, dim] each. tensors: [slots, H, capacity, dim]."""
    return [layer[slot, :, begin:end].clone() for layer in tensors]


class SlotCache(Cache):
    """A `transformers` cache whose rows are slots, each with its own length. Raises `CacheFull` if memory is short.

    num_slots: how many sequences it holds at once.
    max_length: the most tokens of a sequence. The tensors start small and double up to it.
    num_layers: the number of layers that will be written, if it is known.
    spare: another holder of memory, which frees some when this cache needs it.
    max_bytes, reserved: of a `limit`. is_lazy: whether memory is taken by columns as they are written.
    move_columns, copy_columns: may be replaced by faster ones for its device.
    """

    def __init__(self, num_slots: int, max_length: int, num_layers: int = 1):
        super().__init__(layers=[])
        self.num_slots, self.max_length, self.num_layers = num_slots, max_length, num_layers
        self.spare: Spare | None = None
        self.max_bytes: int | None = None
        self.reserved, self.is_lazy = Reserved(), False
        self.move_columns, self.copy_columns = move_columns, copy_columns
        self.recurrent: RecurrentStates | None = None
        self.capacity = min(round_up(256), round_up(max_length))
        self._require(2 * num_layers * num_slots * self.capacity)  # of at least one byte each
        self.lengths = [0] * num_slots  # committed tokens of each slot
        self.offsets = [0] * num_slots  # position minus column; images shift the text after them
        self.adapters: list[Any] = [None] * num_slots  # what corrects the rows of each slot, see `target.lora`
        self.keys: list[Tensor] = []  # per layer [slots, H, capacity, dim]
        self.values: list[Tensor] = []
        self._slots: list[int] = []  # of the pass in progress
        self._starts: list[int] = []
        self._text: int | None = None
        self._whole = True
        self._writes: list[tuple[slice, slice, int]] = []  # of that pass: slots, rows and first column
        self._growing = False
        self._written = [0] * num_slots  # columns that may have been written
        self._free = list(range(num_slots))
        self._is_used: dict[int, Callable[[], bool] | None] = {}  # by allocated slot

    def hold_states(self, layers: Sequence[RecurrentLayer], dtype: torch.dtype, device: torch.device) -> None:
        """Also keep the states of recurrent layers. Raises `CacheFull` if they do not fit into memory."""
        each = sum(4 * math.prod(layer.state) for layer in layers)
        self._require(each * self.num_slots, device, f"a recurrent state of {each:,} bytes a sequence")
        self.recurrent = RecurrentStates(layers, self.lengths, dtype, device)

    @torch.inference_mode()
    def allocate(self, is_used: Callable[[], bool] | None = None) -> int:
        """Take the lowest free slot and clear it. Raises `CacheFull` when none is left.

        is_used: tells `reclaim` whether the user of the slot still runs; None: the slot is kept until `release`.
        """
        if not self._free:
            raise CacheFull(
                "no cache slot is free",
                got=f"{self.num_slots} in use",
                fix="raise max_num_seqs, or finish the streams that are open",
            )
        slot = min(self._free)
        self._is_used[slot] = is_used  # first, so that an interrupt between the two lines leaks nothing
        self._free.remove(slot)
        # An overflow of the last user must not stay: a masked column has weight 0, and 0 * NaN is NaN.
        for layer in (*self.keys, *self.values):
            layer[slot, :, : self._written[slot]] = 0
        if self.recurrent is not None:
            self.recurrent.reset(slot)
        self.lengths[slot] = self._written[slot] = self.offsets[slot] = 0
        self.adapters[slot] = None
        return slot

    @property
    def num_free(self) -> int:
        """Slots that are not in use."""
        return len(self._free)

    @torch.inference_mode()
    def release(self, slot: int) -> None:
        """Free a slot; harmless if it is free already."""
        if slot not in self._free:
            self._free.append(slot)
        if self.recurrent is not None:
            self.recurrent.release(slot)
        self.lengths[slot] = self.offsets[slot] = 0
        self.adapters[slot] = None
        self._is_used.pop(slot, None)
        self.reserved.release(slot)
        if self.is_lazy and self._written[slot] and all(free_pages(t[slot]) for t in (*self.keys, *self.values)):
            self._written[slot] = 0

    def reclaim(self) -> None:
        """Release the slots whose users were interrupted before they could release them."""
        for slot, is_used in list(self._is_used.items()):
            if is_used is not None and not is_used():
                self.release(slot)

    def truncate(self, slot: int, length: int) -> None:
        """Roll back to the first `length` tokens, or to none where recurrent states have moved past them."""
        assert 0 <= length <= self.lengths[slot], (length, self.lengths[slot])
        if self.recurrent is not None and (length == 0 or not self.recurrent.can_return_to(slot, length)):
            self.recurrent.reset(slot)  # also after an interrupt in a pass that began at no token
            length = 0
        self.lengths[slot] = length

    def held(self, slots: Sequence[int], lengths: Sequence[int] | None = None) -> AbstractContextManager[None]:
        """See `RecurrentStates.held`."""
        return nullcontext() if self.recurrent is None else self.recurrent.held(slots, lengths)

    # A pass: begin, update (called by every attention layer), commit

    def begin(self, slots: Sequence[int], num_nodes: int, text: int | None = None, whole: bool = True) -> list[int]:
        """Announce a pass of `num_nodes` nodes per row; returns the committed length of each row.

        text: how many of the first nodes are text; the others are a tree. None: all of them are text.
        whole: whether `update` returns the tensors of all slots `[slots, H, capacity, dim]`; otherwise it returns a
            copy of the rows of this pass `[B, H, S, dim]`.
        """
        self._text, self._whole = text, whole
        self._slots, self._starts = list(slots), [self.lengths[s] for s in slots]
        first, size = self._slots[0], len(self._slots)
        if self._slots == [*range(first, first + size)] and len({*self._starts}) == 1:  # a batch of texts in training
            self._writes = [(slice(first, first + size), slice(size), self._starts[0])]
        else:
            each = enumerate(zip(self._slots, self._starts, strict=True))
            self._writes = [(slice(slot, slot + 1), slice(row, row + 1), start) for row, (slot, start) in each]
        self.ensure(max(self._starts) + num_nodes)
        if self.recurrent is not None:
            self.recurrent.begin(self._slots, num_nodes, num_nodes if text is None else text)
        for slot, start in zip(self._slots, self._starts, strict=True):
            self._written[slot] = max(self._written[slot], start + num_nodes)
        return self._starts

    def tensors(
        self,
        kv_heads: Sequence[int],
        widths: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of every layer, `[slots, H, capacity, dim]` each, for passes that write them themselves.

        widths: the numbers of a key and of a value in each layer; 0 where values are made of keys.
        """
        if len(self.keys) < len(kv_heads) or len(self.values) < len(kv_heads):
            like = torch.empty(0, dtype=dtype, device=device)
            per_column = sum(heads * sum(width) for heads, width in zip(kv_heads, widths, strict=True))
            self._require(like.element_size() * self.num_slots * per_column * self.capacity, like.device)
            for layers, width in zip((self.keys, self.values), zip(*widths, strict=True), strict=True):
                while len(layers) < len(kv_heads):
                    layers.append(self._zeros(like, kv_heads[len(layers)], width[len(layers)]))
        return self.keys, self.values

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write `[B, H, N, dim]` after the committed columns; returns the tensors that `begin` selected."""
        if not self.keys:
            per_token = key_states.shape[1] * (key_states.shape[3] + value_states.shape[3]) * key_states.element_size()
            self._require(self.num_layers * per_token * self.num_slots * self.capacity, key_states.device)
        for layers, states in ((self.keys, key_states), (self.values, value_states)):
            while len(layers) <= layer_idx:  # separately, since an interrupt may come between the two
                # Those before it are recurrent, or come later in the pass.
                heads = states.shape[1] if len(layers) == layer_idx or self.recurrent is None else 0
                layers.append(self._zeros(states, heads, states.shape[3]))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        num_nodes = key_states.shape[2]
        text = num_nodes if self._text is None else self._text
        for slots, rows, start in self._writes:
            for cached, states in ((keys, key_states), (values, value_states)):
                cached[slots, :, start : start + text] = states[rows, :, :text]
                if text < num_nodes:
                    # Drafted tokens are written finite: an overflow in a rejected one must not reach the others as
                    # 0 * NaN. It is still noticed: the logits of that node stay NaN.
                    torch.nan_to_num(states[rows, :, text:], out=cached[slots, :, start + text : start + num_nodes])
        if self._whole:
            return keys, values
        end = round_up(max(self._starts) + num_nodes)
        return keys[self._slots, :, :end], values[self._slots, :, :end]

    @torch.inference_mode()
    def commit(self, slot: int, nodes: Sequence[int]) -> None:
        """Keep the root and then `nodes` (tree indices along one path); drop everything else of the pass.

        Example: nodes = [3, 4] at length 10 moves columns 13, 14 to 11, 12 and sets the length to 13.
        """
        start, kept = self.lengths[slot], len(nodes)
        if start + 1 + kept > self.max_length:
            raise CacheFull(
                "a sequence outgrew its context", got=f"{start + 1 + kept} tokens", expected=f"<= {self.max_length}"
            )
        if self.recurrent is not None:
            self.recurrent.commit(slot, start, nodes)
        if self.keys and list(nodes) != list(range(1, kept + 1)):
            self.move_columns((*self.keys, *self.values), slot, start, nodes)
        self.lengths[slot] = start + 1 + kept

    # Pages: columns of a slot, kept for another sequence

    def copy_of(self, slot: int, begin: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the columns from `begin` to `end`, [H, end - begin, dim] for each layer."""
        copies = self.copy_columns((*self.keys, *self.values), slot, begin, end)
        return list(zip(copies[: len(self.keys)], copies[len(self.keys) :], strict=True))

    @torch.inference_mode()
    def restore(
        self, slot: int, pages: Sequence[Sequence[tuple[Tensor, Tensor]]], length: int, state: Sequence[Tensor] = ()
    ) -> None:
        """Fill an empty slot with the first `length` columns of pages from `copy_of`, one after another.

        state: of recurrent layers after these columns.
        """
        self.begin([slot], length)
        for index, pairs in enumerate(zip(*pages, strict=True)):
            keys, values = (torch.cat(part, 1)[None, :, :length] for part in zip(*pairs, strict=True))
            self.update(keys, values, index)
        if self.recurrent is not None:
            self.recurrent.restore(slot, length, state)
        self.lengths[slot] = length

    def _zeros(self, like: Tensor, heads: int, dim: int, capacity: int = 0) -> Tensor:
        # Not uninitialised memory: a masked column is multiplied by 0, and 0 * NaN would be NaN.
        shape = self.num_slots, heads, capacity or self.capacity, dim
        return lazy_zeros(shape, like.dtype) if self.is_lazy else like.new_zeros(shape)

    def ensure(self, length: int) -> None:
        """Extend the tensors to at least `length` columns."""
        if length <= self.capacity and not self._growing:
            return
        self._growing = True  # until all tensors are extended, since an interrupt may come between them
        limit, capacity = round_up(self.max_length), self.capacity
        while capacity < min(length, limit):
            capacity = min(capacity * 2, limit)
        if capacity > self.most_columns():
            capacity = self.most_columns() if self.is_lazy else round_up(length)
        grown = (t.shape[2] for t in (*self.keys, *self.values))
        capacity = max(capacity, round_up(length), *grown)  # padding may reach past the context
        more = sum(t.nbytes // t.shape[2] * (capacity - t.shape[2]) for t in (*self.keys, *self.values))
        if more > 0 and not self.is_lazy:
            self._require(more, self.keys[0].device)
        for layers in (self.keys, self.values):
            for index, old in enumerate(layers):
                if old.shape[2] < capacity:
                    layers[index] = self._grown(old, capacity)
        self.capacity, self._growing = capacity, False

    def _grown(self, old: Tensor, capacity: int) -> Tensor:
        if not self.is_lazy:
            return functional.pad(old, (0, 0, 0, capacity - old.shape[2]))
        larger = self._zeros(old, old.shape[1], old.shape[3], capacity)
        for slot, written in enumerate(self._written):
            larger[slot, :, :written] = old[slot, :, :written]
        return larger

    def limit(self, max_bytes: int) -> None:
        """Hold at most this many bytes of keys and values from now on; called once, while no slot is in use.

        On a CPU sequences share them: each takes the columns that it has reserved. On other devices every slot has as
        many as the longest sequence. Raises `CacheFull` for too few, and for more than are free.
        """
        assert len(self._free) == self.num_slots, "slots are in use"
        self.max_bytes, tensors = max_bytes, (*self.keys, *self.values)
        self.is_lazy = bool(tensors) and tensors[0].device.type == "cpu"
        least = self.column_bytes * (BLOCK if self.is_lazy else self.num_slots * self.capacity)
        if max_bytes < least:
            raise CacheFull(
                "the key-value cache is limited to less than its first columns",
                got=f"{max_bytes:,} bytes",
                expected=f"{least:,} bytes or more",
                fix="raise kv_cache_memory_bytes",
            )
        if self.is_lazy:
            self._require(min(max_bytes, self.column_bytes * self.num_slots * round_up(self.max_length)))
            self.reserved = Reserved(max_bytes // self.column_bytes // BLOCK * BLOCK)
            for layers in (self.keys, self.values):
                layers[:] = [self._zeros(old, old.shape[1], old.shape[3]) for old in layers]
            self._written = [0] * self.num_slots

    @property
    def column_bytes(self) -> int:
        """Bytes of a column of one slot; 0 before the first pass."""
        return sum(t.nbytes // (t.shape[0] * t.shape[2]) for t in (*self.keys, *self.values))

    def can_hold(self, columns: int) -> bool:
        """Whether every slot has this many columns, or there is memory for them."""
        return (not self.is_lazy and columns <= self.capacity) or columns <= self.most_columns()

    def most_columns(self) -> int:
        """How many columns each slot can have with the memory that is free now, at most `max_length` rounded up.

        Where sequences share a limit: how many one of them can have.

        Before the first pass the size of a column is not known: that pass raises `CacheFull` where there is no memory.
        """
        limit, tensors = round_up(self.max_length), (*self.keys, *self.values)
        if self.reserved.most is not None:
            return min(limit, self.reserved.most)
        if self.capacity >= limit or not tensors:
            return limit
        free = self._free_bytes(tensors[0].device) + (0 if self.spare is None else self.spare.num_bytes)
        each = max(1, self.num_slots * self.column_bytes)
        if self.max_bytes is not None:
            free = min(free, self.max_bytes - each * self.capacity)
        return min(limit, (self.capacity + free // each) // BLOCK * BLOCK)

    def _free_bytes(self, device: torch.device | None) -> int:
        if device is None or device.type != "cuda":
            return available_memory()
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused

    def _require(self, needed: int, device: torch.device | None = None, what: str = "the key-value cache") -> None:
        """Raise `CacheFull` unless this many more bytes fit into memory."""
        free = self._free_bytes(device)
        if needed > free and self.spare is not None and self.spare.num_bytes:
            self.spare.shrink(needed - free)
            return_free_memory()
            free = self._free_bytes(device)
        if needed > free:
            raise CacheFull(
                f"{what} does not fit into memory",
                got=f"{needed:,} bytes or more for {self.num_slots:,} sequences at once",
                expected=f"at most the {free:,} bytes that are free",
                fix="lower max_num_seqs or max_model_len, or free memory",
            )

    @property
    def num_bytes(self) -> int:
        """Bytes held by keys, values and states; of columns that take memory as they are written, by those."""
        states = () if self.recurrent is None else (*self.recurrent.states, *self.recurrent.rows)
        columns = sum(map(round_up, self._written)) if self.is_lazy else self.num_slots * self.capacity
        return columns * self.column_bytes + sum(t.nbytes for t in states)

    # The interface of transformers' caches. Positions and masks are always passed in, so these results hardly matter.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Longest committed length among the rows of the pass."""
        return max(self._starts, default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Columns returned by `update`, and their offset."""
        return round_up(self.get_seq_length() + query_length), 0

    def __len__(self) -> int:
        return len(self.keys)
