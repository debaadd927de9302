"""A loaded model, prepared for passes over trees."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..attention.kv_cache import SlotCache
from ..attention.masks import PassLayout
from ..attention.states import StateStore
from ..core.interfaces import ModelFacts
from ..core.tree import TokenTree
from ..core.vision import VisionPrompt
from ..hf.classes import PreTrainedModel
from ..hf.describe import describe
from ..hf.vision import Vision
from ..sampling.pieces import Pieces
from .adapters import AttachedAdapter
from .native import NativeDecoder
from .torch_decoder import FusedDecoder, TransformersDecoder, is_fused


@dataclass(frozen=True, eq=False)
class ImageReference:
    """The logits [V] of plain transformers after a chat with a made-up image."""

    token_ids: Sequence[int]
    prompt: VisionPrompt
    logits: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class LoadedModel(ModelFacts):
    """A causal language model that can run passes over trees.

    attends_trees: whether the model calls our attention function; otherwise it is given a 4-D mask.
    mixes_rows: whether the numerics of a row depend on other rows (experts, outliers of INT8 weights).
    decoder: runs its layers.
    reference: logits [V] of plain transformers after each path of a small tree, for `self_test`.
    image_reference: the same after an image.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    eos_ids: frozenset[int]
    attends_trees: bool
    mixes_rows: bool
    decoder: NativeDecoder | FusedDecoder | TransformersDecoder
    reference: list[Tensor]
    vision: Vision | None = None
    image_reference: ImageReference | None = None

    @property
    def is_native(self) -> bool:
        """Whether passes run in the native library, whose rows have the same bits whatever shares the pass."""
        return isinstance(self.decoder, NativeDecoder)

    @property
    def attached(self) -> AttachedAdapter | None:
        return self.decoder.attached

    @cached_property
    def pieces(self) -> Pieces | None:
        """Its tokens one by one; None without a tokenizer."""
        return None if self.tokenizer is None else Pieces(self.tokenizer)

    def begin(
        self,
        cache: SlotCache,
        slots: Sequence[int],
        num_nodes: int,
        tree: TokenTree | None = None,
        text: int | None = None,
        **options: Any,
    ) -> PassLayout:
        """Begin a pass and return its layout. text: see `SlotCache.begin`. options: further fields of `PassLayout`."""
        starts = cache.begin(slots, num_nodes, text, self.attends_trees)
        offsets, device = [cache.offsets[slot] for slot in slots], self.device if tree is None else tree.device
        return PassLayout(starts, num_nodes, tree, slots=list(slots), offsets=offsets, device=device, **options)

    def forward(
        self, token_ids: Tensor | None, layout: PassLayout, cache: SlotCache, states: StateStore | None = None
    ) -> Tensor:
        """Raw logits [B, N, V] of the last `layout.head_rows` nodes; hidden states are written to `states`.

        token_ids: [B, N]; None: those of the layout's tree, which native passes read as lists. The attached adapter
            acts on the rows of `layout.is_mask`.
        """
        if token_ids is None and not self.is_native:
            assert layout.tree is not None
            token_ids = layout.tree.token_ids
        if layout.is_mask is None or self.attached is None:
            return self.decoder.logits(token_ids, layout, cache, states)
        assert token_ids is not None
        with self.attached.applied(token_ids, layout.is_mask) as plain_ids:
            return self.decoder.logits(plain_ids, layout, cache, states)

    def offset_of(self, prompt: VisionPrompt | None) -> int:
        """The difference between position and column after the images of a prompt."""
        if prompt is not None:
            return prompt.position_delta
        return 0 if self.vision is None else self.vision.family.text_offset

    def with_model(self, model: PreTrainedModel, attached: AttachedAdapter | None = None) -> "LoadedModel":
        """A copy for another module tree of the same architecture. attached: the adapter in it."""
        decoder = decoder_of(model, self.attends_trees, attached)
        return replace(self, model=model, decoder=decoder, image_reference=None)


def decoder_of(
    model: PreTrainedModel, attends_trees: bool, attached: AttachedAdapter | None = None
) -> NativeDecoder | FusedDecoder | TransformersDecoder:
    """A decoder for a model. attached: the adapter in it."""
    if is_fused(model):
        return FusedDecoder(model, attached)
    described = describe(model) if attends_trees else None
    if described is None:
        return TransformersDecoder(model, attends_trees, attached)
    return NativeDecoder(model, described, attached)
