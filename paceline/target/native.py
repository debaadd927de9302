"""A decoder whose passes run in kernels of our own (`paceline.kernels`), one call for each pass.

A row reads the columns of its own path in the order of the text, and every sum is taken in that order. So its bits are
those of plain decoding, whatever other rows are in the pass.
"""

from ctypes import c_int64, c_void_p, sizeof
from itertools import chain
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

import torch
from torch import Tensor

from ..attention.kv_cache import SlotCache
from ..attention.masks import PassLayout, PromptRows
from ..attention.states import StateStore
from ..hf.describe import Description
from ..hf.rotary import rotary_of, rotation
from ..kernels.library import KV_FORMATS
from .adapters import AttachedAdapter
from .corrections import LowRank

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class NativeDecoder:
    """Runs a model whose layers `hf.describe` has described: embeddings, layers, final norm, head."""

    def __init__(
        self,
        model: "PreTrainedModel",
        described: Description,
        kv_dtype: torch.dtype | None = None,
    ):
        self.attached: AttachedAdapter | None = None
        self.recurrent = described.recurrent
        self._model, self._described, self._kernels = model, described, described.kernels
        self._device = cast("torch.device", model.device)
        base: Any = model.base_model
        self._rotary: Any = rotary_of(base)
        self._tables: list[tuple[Tensor, Tensor]] = []  # cosines and sines by position, for each kind of layer
        self._table_addresses: tuple[Any, Any] | None = None
        # Of the cache used last; the references tell whether its tensors were replaced.
        self._known_addresses: tuple[ref[Tensor], ref[Tensor], Any, Any] | None = None
        self.num_experts, self.experts_read = described.num_experts, 0  # of all layers; by the last pass, distinct ones
        self._states_like = torch.empty(0, dtype=cast("torch.dtype", model.dtype), device=self._device)
        self._kv_dtype = kv_dtype or cast("torch.dtype", model.dtype)
        described.model.kv_format = KV_FORMATS.get(self._kv_dtype, 0)
        self.has_keys = any(described.kv_heads)

    def speed_up(self, cache: SlotCache) -> None:
        """Let columns be moved and copied by these kernels, where they can."""
        cache.move_columns = getattr(self._kernels, "move_columns", cache.move_columns)
        cache.copy_columns = getattr(self._kernels, "copy_columns", cache.copy_columns)

    def logits(
        self, token_ids: Tensor | None, layout: PassLayout, cache: SlotCache, states: StateStore | None
    ) -> Tensor:
        """Raw logits, float32 [B, N, V], of the last `layout.head_rows` nodes; hidden states go to `states`.

        token_ids: [B, N]; None: those of the tree.
        """
        kernels, pointers = self._kernels, self._kernels.Pointers()
        batch, nodes, tree, rows = len(layout.starts), layout.num_nodes, layout.tree, layout.rows
        head_rows = nodes if layout.head_rows is None else layout.head_rows
        logits = torch.empty(batch, head_rows, self._described.model.head.outs, device=self._device)
        call = kernels.Pass(batch=batch, nodes=nodes, max_position=layout.max_length - 1, head_rows=head_rows)
        call.logits = kernels.address(logits) if head_rows else None
        embeds = self._inputs_embeds(token_ids, layout)
        call.rows = pointers.tensor(embeds)
        if embeds is None or self._described.image_token is not None:
            call.ids = self._ids(token_ids, layout, pointers)
        if tree is not None:
            if min(map(len, tree.rows)) < nodes:
                call.sizes = pointers.integers(map(len, tree.rows))
            call.parents = pointers.integers(chain.from_iterable(tree.lists.parents))
        call.starts = pointers.integers(layout.starts)
        call.slots = pointers.integers(layout.slots)
        if any(layout.offsets):
            call.offsets = pointers.integers(layout.offsets)
        if layout.corrections is not None:
            lists = [self._described.places.listed(one, one.factors) for one in layout.corrections.used]
            call.corrected, call.num_corrections = pointers.tensor(layout.corrections.takes), len(lists)
            call.corrections = pointers.arrays(lists)
        if layout.spans:
            call.spans, call.num_spans = self._spans(layout, pointers)
        if rows is not None and rows.blocks:
            ends, firsts = _blocks(rows, layout.starts[0], nodes)
            call.block_ends, call.block_firsts = pointers.tensor(ends), pointers.tensor(firsts)
            call.windowed_blocks = rows.windowed_blocks
        if rows is not None and rows.deepstack:
            call.deepstack = pointers.tensors(_deepstack(rows, self._described.num_layers))
        if rows is not None and rows.position_ids is not None:  # the tables hold one row for each row of the prompt
            call.max_position = -1
            cos, sin = zip(*(self._rotation(kind, rows.position_ids) for kind in self._described.ropes), strict=True)
            call.cos, call.sin = pointers.tensors(cos), pointers.tensors(sin)
        else:
            cos, sin = self._rope_tables(max(layout.starts) + max(layout.offsets) + nodes)
            call.cos, call.sin = kernels.start_of(cos), kernels.start_of(sin)
        if self._described.recurrent:
            self._add_states(call, layout, cache, pointers)
        keys, values = self._cache_addresses(cache)
        call.keys, call.values, call.capacity = kernels.start_of(keys), kernels.start_of(values), cache.capacity
        if states is not None:
            kept = states.rows(cache.capacity, self._described.model.hidden, self._states_like)
            row_of = dict(zip(states.layers, kept[0, 0], strict=True))
            call.states = pointers.tensors([row_of.get(layer) for layer in range(self._described.num_layers + 1)])
            call.state_columns, call.state_row = kept.stride(0) // kept.stride(1), kept.stride(1)
        experts = c_int64()
        if self._described.num_experts:
            call.num_experts = kernels.start_of(experts)
        kernels.run(self._described.model, call)
        self.experts_read = experts.value
        if cache.recurrent is not None:
            cache.recurrent.finish()
        return logits

    def prepare(self, low_rank: LowRank) -> int:
        """Make what passes with these corrections read, before the first of them; returns its bytes."""
        return self._described.places.prepare(low_rank, low_rank.factors)

    @property
    def described(self) -> Description:
        """The model as the kernels see it."""
        return self._described

    def point(self, call: Any, cache: SlotCache, length: int, layer: int) -> None:
        """Let a pass over the layers from this one on read the rotations of so many positions, and the cache."""
        call.cos, call.sin = map(self._kernels.start_of, self._rope_tables(length))
        pointer = sizeof(c_void_p)
        call.keys, call.values = (self._kernels.start_of(a) + pointer * layer for a in self._cache_addresses(cache))
        call.capacity = cache.capacity

    def _add_states(self, call: Any, layout: PassLayout, cache: SlotCache, pointers: Any) -> None:
        """Fill the fields of a pass that recurrent layers read."""
        kept, each = cache.recurrent, range(self._described.num_layers)
        assert kept is not None
        call.bases = pointers.integers(kept.bases[slot] for slot in layout.slots)
        call.steps, call.ring = pointers.integers(kept.steps), kept.capacity
        at = {layer.index: place for place, layer in enumerate(kept.layers)}
        call.recurrent_states = pointers.tensors([kept.states[at[i]] if i in at else None for i in each])
        call.recurrent_rows = pointers.tensors([kept.rows[at[i]] if i in at else None for i in each])

    def _spans(self, layout: PassLayout, pointers: Any) -> tuple[Any, int]:
        """The spans of all rows, padded to the most of any, and their number."""
        assert self._device.type == "cpu", "kernels of a GPU read whole texts"
        most = max(map(len, layout.spans))
        padded = (
            [*spans, *[(start, start)] * (most - len(spans))]
            for spans, start in zip(layout.spans, layout.starts, strict=True)
        )
        return pointers.integers(chain.from_iterable(chain.from_iterable(padded))), most

    def _ids(self, token_ids: Tensor | None, layout: PassLayout, pointers: Any) -> Any:
        if token_ids is None:
            assert layout.tree is not None
            return pointers.integers(chain.from_iterable(layout.tree.lists.token_ids))
        if layout.rows is not None and layout.rows.is_image is not None:
            token_ids = token_ids.masked_fill(layout.rows.is_image, self._described.image_token or 0)
        return pointers.tensor(token_ids.contiguous())

    def _cache_addresses(self, cache: SlotCache) -> tuple[Any, Any]:
        described, addresses = self._described, self._kernels.addresses
        widths = zip(map(self._width, described.head_dims), map(self._width, described.value_dims), strict=True)
        keys, values = cache.tensors(described.kv_heads, [*widths], self._kv_dtype, self._device)
        known = self._known_addresses
        if known is None or known[0]() is not keys[0] or known[1]() is not values[-1]:  # all of them change together
            known = self._known_addresses = (ref(keys[0]), ref(values[-1]), addresses(keys), addresses(values))
        return known[2:]

    def _width(self, numbers: int) -> int:
        """The elements of a row of the cache, see `row_bytes` in the kernels."""
        return numbers + 2 * -(-numbers // 32) if self._kv_dtype is torch.int8 else numbers

    def _inputs_embeds(self, token_ids: Tensor | None, layout: PassLayout) -> Tensor | None:
        """The input of the first layer, float32 [B, N, E]; None if the library can look it up by token ids."""
        if layout.rows is not None:
            rows = layout.rows.embeds
        elif self.attached is not None and self.attached.rows is not None:
            rows = self.attached.embed(self._model.get_input_embeddings()(token_ids))  # type: ignore[operator]
        else:
            return None
        return (rows.float() * self._described.multiplier).contiguous()

    def _rope_tables(self, length: int) -> tuple[Any, Any]:
        """Cosines and sines of at least all positions below `length`, for each kind of layer."""
        if self._rotary is None:
            return self._kernels.addresses([]), self._kernels.addresses([])
        if self._table_addresses is None or len(self._tables[0][0]) < length:
            every = torch.arange(max(2 * length, 1024), device=self._device)[None]
            every = every.expand(3, 1, -1) if hasattr(self._rotary, "mrope_section") else every
            tables = [self._rotation(kind, every) for kind in self._described.ropes]
            cos, sin = zip(*tables, strict=True)
            self._tables, self._table_addresses = tables, (self._kernels.addresses(cos), self._kernels.addresses(sin))
        return self._table_addresses

    def _rotation(self, kind: str | None, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotation(self._rotary, torch.empty(0, device=self._device), position_ids, kind)
        times = self._described.ropes[kind] // cos.shape[-1]  # some models return only the half that is repeated
        return cos[0].repeat(1, times).contiguous(), sin[0].repeat(1, times).contiguous()


def _blocks(rows: PromptRows, start: int, count: int) -> tuple[Tensor, Tensor]:
    """For each row, where its block ends, and the first column of a block that it sees beyond its window. int32 [N]."""
    ends = torch.zeros(count, dtype=torch.int32)
    firsts = torch.full((count,), (1 << 31) - 1, dtype=torch.int32)
    for first, last in rows.blocks:
        inside = slice(max(first - start, 0), max(last - start, 0))
        ends[inside] = last
        if rows.blocks_cross_window:
            firsts[inside] = first
    return ends, firsts


def _deepstack(rows: PromptRows, num_layers: int) -> list[Tensor | None]:
    """The DeepStack features to add after each layer, float32 [N, E]; zero in rows of text."""
    assert rows.is_image is not None
    deepstack: list[Tensor | None] = [None] * num_layers
    for index, features in enumerate(rows.deepstack):
        deepstack[index] = full = torch.zeros(rows.embeds.shape[1], features.shape[1], device=features.device)
        full[rows.is_image[0]] = features.float()
    return deepstack
