"""A decoder whose passes run in the native library (`paceline.kernels`): one call a pass, whatever the rows are.

A row reads the columns of its own path in the order of the text, and every sum is taken in that order, so its bits are
those of plain decoding whatever shares its pass: trees, other sequences, the text of a prompt, more or fewer threads.
"""

import ctypes
from collections.abc import Iterable
from ctypes import c_void_p
from itertools import chain
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..attention.kv_cache import SlotCache
from ..attention.masks import PassLayout
from ..attention.states import States
from ..hf.describe import Description
from ..kernels.library import Pass, Places, address, addresses, run
from .adapters import Gate


class NativeDecoder:
    """Runs a model whose layers have been described: embeddings, layers, final norm, head.

    gate: of the adapter that the layers wear.
    """

    def __init__(self, model: PreTrainedModel, described: Description, gate: Gate | None = None):
        self._model, self._described, self._gate = model, described, gate
        self._base: Any = model.base_model
        self._rotary: Any = self._base.rotary_emb
        self._tables: list[tuple[Tensor, Tensor]] = []
        self._pointers: tuple[Any, Any] | None = None
        self._kept: tuple[ref[Tensor], ref[Tensor], Places, Places] | None = None  # of the cache that was last used
        self._dtype = cast("torch.dtype", model.dtype)

    def forward(
        self, token_ids: Tensor | None, layout: PassLayout, cache: SlotCache, states: States | None, head_rows: int
    ) -> Tensor | None:
        """Raw logits, float32 [B, head_rows, V], of the last nodes of each row; None with `head_rows` 0.

        token_ids: [B, N]; None: those of the tree.

        Fills in the hidden states that `states` asks for, in the dtype of the model.
        """
        found = self._described
        batch, nodes = len(layout.starts), layout.num_nodes
        held: list[object] = []  # what the pass points to

        def hold(tensor: Tensor | None) -> int | None:
            held.append(tensor)
            return address(tensor)

        def integers(numbers: Iterable[int]) -> Any:
            held.append(array := (ctypes.c_int64 * len(listed := [*numbers]))(*listed))
            return _place(array)

        one = Pass(batch=batch, nodes=nodes, head_rows=head_rows, max_position=layout.max_length - 1)
        rows = self._rows(token_ids, layout)
        if rows is not None:
            one.rows = hold(rows)
        elif token_ids is not None:
            one.ids = hold(token_ids.contiguous())
        if layout.tree is not None:
            if rows is None and token_ids is None:
                one.ids = integers(chain.from_iterable(layout.tree.lists.token_ids))
            one.parents = integers(chain.from_iterable(layout.tree.lists.parents))
        one.starts = integers(layout.starts)
        one.slots = integers(layout.slots if layout.slots is not None else range(batch))
        if any(layout.offsets or ()):
            one.offsets = integers(layout.offsets or ())
        if layout.rows is not None and layout.rows.blocks:
            ends, firsts = _blocks(layout)
            one.ends, one.firsts = hold(ends), hold(firsts)
        if layout.is_mask is not None:
            one.is_mask = hold(layout.is_mask.contiguous())
        cos, sin = self._rotations(layout, one, held)
        one.cos, one.sin = cast("c_void_p", cos), cast("c_void_p", sin)
        one.keys, one.values, one.capacity = *self._places(cache), cache.capacity
        if layout.rows is not None and layout.rows.deep:
            deep = addresses(_deep(layout, found.num_layers, held))
            one.deep = _place(deep)
            held.append(deep)
        wanted: list[Tensor | None] = []
        if states is not None:
            hidden = found.model.hidden
            wanted = [torch.empty(batch, nodes, hidden) if i in states else None for i in range(found.num_layers + 1)]
            places = addresses(wanted)
            one.states = _place(places)
            held.append(places)
        logits = torch.empty(batch, head_rows, found.model.head.outs) if head_rows else None
        one.logits = address(logits)
        run(found.model, one)
        if states is not None:
            for index in states:
                state = wanted[index]
                assert state is not None
                states[index] = state.to(self._dtype)
        return logits

    def _places(self, cache: SlotCache) -> tuple[c_void_p, c_void_p]:
        """Where keys and values of each layer lie."""
        keys, values = cache.tensors(self._described.kv_heads, self._described.head_dims, self._dtype)
        kept = self._kept
        if kept is None or kept[0]() is not keys[0] or kept[1]() is not values[-1]:  # all of them change together
            kept = self._kept = (ref(keys[0]), ref(values[-1]), addresses(keys), addresses(values))
        keys, values = kept[2:]
        return _place(keys), _place(values)

    def _rows(self, token_ids: Tensor | None, layout: PassLayout) -> Tensor | None:
        """What enters the first layer, float32 [B, N, E]; None where token ids say it all."""
        if layout.rows is not None:
            rows = layout.rows.embeds
        elif self._gate is not None and self._gate.rows is not None:
            rows = self._gate.embed(self._model.get_input_embeddings()(token_ids))  # type: ignore[operator]
        else:
            return None
        return (rows.float() * self._described.multiplier).contiguous()

    def _rotations(self, layout: PassLayout, one: Pass, held: list[object]) -> tuple[Any, Any]:
        """Cosines and sines: tables by position, or a row for each row of a prompt whose positions have axes."""
        if layout.rows is not None and layout.rows.position_ids is not None:
            one.max_position = -1
            cos, sin = zip(*(self._rotary_at(kind, layout.rows.position_ids) for kind in self._kinds), strict=True)
            held += [cos, sin]
            places = addresses(cos), addresses(sin)
            held += places
            return _place(places[0]), _place(places[1])
        self._reach(max(layout.starts) + max(layout.offsets or (0,)) + layout.num_nodes)
        assert self._pointers is not None
        return _place(self._pointers[0]), _place(self._pointers[1])

    @property
    def _kinds(self) -> list[str | None]:
        return self._described.ropes

    def _reach(self, length: int) -> None:
        """Have tables of every position below `length`, and of some more."""
        if self._tables and len(self._tables[0][0]) >= length:
            return
        every = torch.arange(max(2 * length, 1024))[None]
        if hasattr(self._rotary, "mrope_section"):
            every = every.expand(3, 1, -1)
        self._tables = [self._rotary_at(kind, every) for kind in self._kinds]
        cos, sin = zip(*self._tables, strict=True)
        self._pointers = addresses(cos), addresses(sin)

    def _rotary_at(self, kind: str | None, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        like, more = torch.empty(0), () if kind is None else (kind,)
        cos, sin = self._rotary(like, position_ids, *more)
        times = self._described.rotary_dim // cos.shape[-1]  # some rotations give the half that is repeated
        return cos[0].repeat(1, times).contiguous(), sin[0].repeat(1, times).contiguous()


def _place(array: Any) -> Any:
    return c_void_p(ctypes.addressof(array))


def _blocks(layout: PassLayout) -> tuple[Tensor, Tensor]:
    """For each row the columns that it sees at least, and the first that it sees whatever the window. int32 [N]."""
    assert layout.rows is not None
    start, count = layout.starts[0], layout.num_nodes
    ends = torch.zeros(count, dtype=torch.int32)
    firsts = torch.full((count,), (1 << 31) - 1, dtype=torch.int32)
    for first, last in layout.rows.blocks:
        inside = slice(max(first - start, 0), max(last - start, 0))
        ends[inside] = last
        if layout.rows.blocks_cross_window:
            firsts[inside] = first
    return ends, firsts


def _deep(layout: PassLayout, num_layers: int, held: list[object]) -> list[Tensor | None]:
    """What is added behind each layer, float32 [N, E], zeros where there is no picture."""
    assert layout.rows is not None
    assert layout.rows.is_image is not None
    made: list[Tensor | None] = [None] * num_layers
    for index, features in enumerate(layout.rows.deep):
        full = torch.zeros(layout.num_nodes, features.shape[1])
        full[layout.rows.is_image[0]] = features.float()
        made[index] = full
    held.append(made)
    return made
