"""A decoder whose passes run in the native library (`paceline.kernels`): one call a pass, whatever the rows are.

A row reads the columns of its own path in the order of the text, and every sum is taken in that order, so its bits are
those of plain decoding whatever shares its pass.
"""

import ctypes
from itertools import chain
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..attention.kv_cache import SlotCache
from ..attention.masks import PassLayout, PromptRows
from ..attention.states import StateStore
from ..hf.describe import Description
from ..kernels.library import Held, Pass, Places, address, addresses, run
from .adapters import AttachedAdapter


class NativeDecoder:
    """Runs a model whose layers have been described: embeddings, layers, final norm, head."""

    def __init__(self, model: PreTrainedModel, described: Description, attached: AttachedAdapter | None = None):
        self.attached = attached
        self._model, self._described = model, described
        base: Any = model.base_model
        self._rotary: Any = base.rotary_emb
        self._tables: list[tuple[Tensor, Tensor]] = []  # cosines and sines by position, for each kind of layer
        self._table_places: tuple[Places, Places] | None = None
        self._cache_places: tuple[ref[Tensor], ref[Tensor], Places, Places] | None = None  # of the cache used last
        self._dtype = cast("torch.dtype", model.dtype)

    def logits(
        self, token_ids: Tensor | None, layout: PassLayout, cache: SlotCache, states: StateStore | None
    ) -> Tensor:
        """Raw logits, float32 [B, N, V], of the last `layout.head_rows` nodes; hidden states go to `states`.

        token_ids: [B, N]; None: those of the tree.
        """
        held = Held()
        batch, nodes, tree, rows = len(layout.starts), layout.num_nodes, layout.tree, layout.rows
        head_rows = nodes if layout.head_rows is None else layout.head_rows
        logits = torch.empty(batch, head_rows, self._described.model.head.outs)
        one = Pass(batch=batch, nodes=nodes, max_position=layout.max_length - 1, head_rows=head_rows)
        one.logits = address(logits) if head_rows else None
        entering = self._entering(token_ids, layout)
        if entering is not None:
            one.rows = held.tensor(entering)
        elif token_ids is not None:
            one.ids = held.tensor(token_ids.contiguous())
        else:
            assert tree is not None
            one.ids = held.integers(chain.from_iterable(tree.lists.token_ids))
        if tree is not None:
            if min(tree.sizes) < nodes:
                one.sizes = held.integers(tree.sizes)
            one.parents = held.integers(chain.from_iterable(tree.lists.parents))
        one.starts = held.integers(layout.starts)
        one.slots = held.integers(layout.slots)
        if any(layout.offsets):
            one.offsets = held.integers(layout.offsets)
        if layout.is_mask is not None:
            one.is_mask = held.tensor(layout.is_mask.contiguous())
        if rows is not None and rows.blocks:
            ends, firsts = _blocks(rows, layout.starts[0], nodes)
            one.ends, one.firsts = held.tensor(ends), held.tensor(firsts)
        if rows is not None and rows.deep:
            one.deep = held.tensors(_deep(rows, self._described.num_layers))
        if rows is not None and rows.position_ids is not None:  # a row of the table for each row of the prompt
            one.max_position = -1
            cos, sin = zip(*(self._rotation(kind, rows.position_ids) for kind in self._described.ropes), strict=True)
            one.cos, one.sin = held.tensors(cos), held.tensors(sin)
        else:
            cos, sin = self._reach(max(layout.starts) + max(layout.offsets) + nodes)
            one.cos, one.sin = ctypes.addressof(cos), ctypes.addressof(sin)
        keys, values = self._places(cache)
        one.keys, one.values, one.capacity = ctypes.addressof(keys), ctypes.addressof(values), cache.capacity
        if states is not None:
            kept = states.rows(cache.capacity, self._described.model.hidden, cache.keys[0])
            row_of = dict(zip(states.layers, kept[0, 0], strict=True))
            one.states = held.tensors([row_of.get(layer) for layer in range(self._described.num_layers + 1)])
            one.state_columns, one.state_row = kept.shape[1], kept.stride(1)
        run(self._described.model, one)
        return logits

    def _places(self, cache: SlotCache) -> tuple[Places, Places]:
        keys, values = cache.tensors(self._described.kv_heads, self._described.head_dims, self._dtype)
        kept = self._cache_places
        if kept is None or kept[0]() is not keys[0] or kept[1]() is not values[-1]:  # all of them change together
            kept = self._cache_places = (ref(keys[0]), ref(values[-1]), addresses(keys), addresses(values))
        return kept[2:]

    def _entering(self, token_ids: Tensor | None, layout: PassLayout) -> Tensor | None:
        """What enters the first layer, float32 [B, N, E]; None where token ids say it all."""
        if layout.rows is not None:
            rows = layout.rows.embeds
        elif self.attached is not None and self.attached.rows is not None:
            rows = self.attached.embed(self._model.get_input_embeddings()(token_ids))  # type: ignore[operator]
        else:
            return None
        return (rows.float() * self._described.multiplier).contiguous()

    def _reach(self, length: int) -> tuple[Places, Places]:
        """Tables of every position below `length`, and of some more."""
        if self._table_places is None or len(self._tables[0][0]) < length:
            every = torch.arange(max(2 * length, 1024))[None]
            every = every.expand(3, 1, -1) if hasattr(self._rotary, "mrope_section") else every
            self._tables = [self._rotation(kind, every) for kind in self._described.ropes]
            cos, sin = zip(*self._tables, strict=True)
            self._table_places = addresses(cos), addresses(sin)
        return self._table_places

    def _rotation(self, kind: str | None, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(torch.empty(0), position_ids, *(() if kind is None else (kind,)))
        times = self._described.rotary_dim // cos.shape[-1]  # some rotations give the half that is repeated
        return cos[0].repeat(1, times).contiguous(), sin[0].repeat(1, times).contiguous()


def _blocks(rows: PromptRows, start: int, count: int) -> tuple[Tensor, Tensor]:
    """For each row the columns that it sees at least, and the first that it sees whatever the window. int32 [N]."""
    ends = torch.zeros(count, dtype=torch.int32)
    firsts = torch.full((count,), (1 << 31) - 1, dtype=torch.int32)
    for first, last in rows.blocks:
        inside = slice(max(first - start, 0), max(last - start, 0))
        ends[inside] = last
        if rows.blocks_cross_window:
            firsts[inside] = first
    return ends, firsts


def _deep(rows: PromptRows, num_layers: int) -> list[Tensor | None]:
    """What is added behind each layer, float32 [N, E], zeros where there is no image."""
    assert rows.is_image is not None
    made: list[Tensor | None] = [None] * num_layers
    for index, features in enumerate(rows.deep):
        made[index] = full = torch.zeros(rows.embeds.shape[1], features.shape[1])
        full[rows.is_image[0]] = features.float()
    return made
