"""A loaded model, prepared for passes over trees."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..attention.kv_cache import SlotCache
from ..attention.masks import PassLayout
from ..attention.recurrent import RecurrentLayer
from ..attention.states import StateStore
from ..core.tree import TokenTree
from ..core.vision import VisionPrompt
from ..errors import ConfigError, IncompatibleModels
from ..hf.classes import PreTrainedModel
from ..hf.corrections import Factors
from ..hf.describe import describe
from ..hf.vision import Vision
from ..sampling.pieces import Pieces
from .adapters import AttachedAdapter, MaskAdapter, fitted, share_copy
from .corrections import Corrected, Corrections, adapt, check_can_adapt
from .native import NativeDecoder
from .torch_decoder import TransformersDecoder

_SCALED_LOGITS = ("logit_scale", "logits_scaling", "final_logit_softcapping", "lm_head_multiplier")


@dataclass(frozen=True, eq=False)
class ImageReference:
    """The logits [V] of plain transformers after a chat with a made-up image."""

    token_ids: Sequence[int]
    prompt: VisionPrompt
    logits: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class LoadedModel:
    """A causal language model that can run passes over trees.

    model: the `transformers` model.
    tokenizer: its tokenizer, or None.
    name: the name it was loaded by, or that of its folder.
    context: the most tokens that a sequence may have.
    fingerprint: identifies the checkpoint, see `hf.fingerprint`. sketch: tells its rounded copies.
    files: the folder or GGUF file that it was read from, as far as its config tells.
    is_rounded: whether its files hold weights of a few bits.
    eos_ids: the tokens that end an answer.
    attends_trees: whether the model calls our attention function; otherwise it is given a 4-D mask.
    mixes_rows: whether the numerics of a row depend on other rows (experts, outliers of INT8 weights).
    decoder: runs its layers.
    opener: loads or quantises other models, see `load.open_model`.
    reference: logits [V] of plain transformers after each path of a small tree, for `self_test`.
    attempt: which of the made-up texts of `self_test` these are.
    vision: the vision half of a vision-language model, whose text half is `model`.
    image_reference: the logits after an image.
    kv_dtype: of cached keys and values, int8 for INT8 with scales, uint8 for FP8 (e4m3); None: that of the weights.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    context: int
    fingerprint: str
    eos_ids: frozenset[int]
    attends_trees: bool
    mixes_rows: bool
    decoder: NativeDecoder | TransformersDecoder
    reference: list[Tensor]
    attempt: int = 0
    opener: Callable[..., "LoadedModel"]
    sketch: str = ""
    files: str = ""
    is_rounded: bool = False
    vision: Vision | None = None
    image_reference: ImageReference | None = None
    kv_dtype: torch.dtype | None = None

    @property
    def origin(self) -> str:
        """The sketch by which to find the model of which this one is a rounded copy; "" where it is none."""
        return self.sketch if self.is_rounded else ""

    @cached_property
    def vocab_size(self) -> int:
        """V, the rows of the output head, padding included."""
        head: Any = self.model.get_output_embeddings()
        return head.out_features

    @property
    def embeddings(self) -> Tensor:
        """The token embeddings [V, E]."""
        return cast("Any", self.model.get_input_embeddings()).weight

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return cast("torch.device", self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return cast("torch.dtype", self.model.dtype)

    @property
    def num_layers(self) -> int:
        """The number of decoder layers; also the index of the last hidden state, taken after the final norm."""
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        """E, the width of the hidden states."""
        return int(self.model.config.get_text_config().hidden_size)

    def output_rows(self) -> Tensor:
        """The weights of the output head [V, E], for drafters and for training.

        Raises `IncompatibleModels` if they are quantised, or if logits are more than their products with the last
        state: a head would learn, and draft from, another distribution.
        """
        config, head = self.model.config.get_text_config(), self.model.get_output_embeddings()
        extras = [name for name in _SCALED_LOGITS if getattr(config, name, None) not in (None, 0, 1)]
        if getattr(head, "bias", None) is not None:
            extras.append("a bias of the output layer")
        if extras:
            message = "heads cannot draft for this target yet: its logits are more than output rows times states"
            raise IncompatibleModels(message, got=", ".join(extras), expected="a model without them")
        rows = self.embeddings if getattr(config, "tie_word_embeddings", False) else getattr(head, "weight", None)
        if not isinstance(rows, Tensor) or not rows.is_floating_point():
            raise IncompatibleModels(
                "this head drafts with the target's output rows, and they are quantised",
                got=type(head).__name__,
                expected="rows in floating point, or a head with an output layer of its own",
                fix="load the target without quantised weights",
            )
        return rows

    @property
    def is_native(self) -> bool:
        """Whether passes run in our kernels, whose rows have the same bits whatever shares the pass."""
        return isinstance(self.decoder, NativeDecoder)

    @property
    def attached(self) -> AttachedAdapter | None:
        return self.decoder.attached

    @cached_property
    def pieces(self) -> Pieces | None:
        """Its tokens one by one; None without a tokenizer."""
        return None if self.tokenizer is None else Pieces(self.tokenizer)

    @property
    def recurrent(self) -> Sequence[RecurrentLayer]:
        """What its recurrent layers keep of a sequence; empty without any."""
        return self.decoder.recurrent

    def new_cache(self, num_slots: int, max_length: int) -> SlotCache:
        """A cache for its layers. Raises `CacheFull` if memory is short."""
        cache = SlotCache(num_slots, max_length, self.num_layers)
        if isinstance(self.decoder, NativeDecoder):
            self.decoder.speed_up(cache)
        if self.recurrent:
            cache.hold_states(self.recurrent, torch.float32 if self.is_native else self.dtype, self.device)
        return cache

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
        adapters = [cache.adapters[slot] for slot in slots] if any(cache.adapters) else ()
        return PassLayout(
            starts, num_nodes, tree, slots=list(slots), offsets=offsets, adapters=adapters, device=device, **options
        )

    def forward(
        self, token_ids: Tensor | None, layout: PassLayout, cache: SlotCache, states: StateStore | None = None
    ) -> Tensor:
        """Raw logits [B, N, V] of the last `layout.head_rows` nodes; hidden states are written to `states`.

        token_ids: [B, N]; None: those of the layout's tree, which native passes read as lists. The attached adapter
            acts on the rows of `layout.is_mask`, LoRA adapters on those of their slots.
        """
        masks = None if layout.is_mask is None or self.attached is None else self.attached.low_rank
        if layout.adapters or masks is not None:
            adapters = [None if adapter is None else adapter.low_rank for adapter in layout.adapters]
            adapters = adapters or [None] * len(layout.starts)
            layout.corrections = Corrections.of(adapters, layout.num_nodes, masks, layout.is_mask, self.device)
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

    def with_model(self, model: PreTrainedModel) -> "LoadedModel":
        """A copy for another module tree of the same architecture."""
        is_plain = self.vision is not None and self.vision.family.needs_transformers
        decoder = decoder_of(model, self.attends_trees, is_plain, self.kv_dtype)
        return replace(self, model=model, decoder=decoder, image_reference=None)

    def with_masks(self, adapter: MaskAdapter) -> "LoadedModel":
        """A copy that takes the mask tokens of a SPACE adapter; itself if it does already.

        Raises `ConfigError` if it takes those of another one, `IncompatibleModels` if the adapter does not fit.
        """
        if self.attached is not None:
            if self.attached.matches(adapter):
                return self
            changed = self.attached.source is adapter
            raise ConfigError(
                "the attached SPACE adapter was changed" if changed else "another SPACE adapter is attached",
                got="other weights than those that are attached",
                expected="one adapter for each runner (LLM), of which it keeps a copy",
                fix="make another LLM over the same loaded model, or let drafters share one adapter",
            )
        attached = fitted(self.model, adapter, self.device, self.dtype)
        made = self.correcting(attached.low_rank.factors)
        decoder = copy.copy(made.decoder)
        decoder.attached = attached
        return replace(made, decoder=decoder)

    def check_correcting(self, factors: Factors) -> None:
        """Raise `IncompatibleModels` for factors of a layer whose rows passes cannot correct."""
        if isinstance(self.decoder, NativeDecoder):
            return self.decoder.described.places.check(factors)
        for path in factors:
            check_can_adapt(self.model, path)

    def correcting(self, factors: Factors) -> "LoadedModel":
        """A copy that can correct rows by these factors. Raises `IncompatibleModels` where it cannot.

        In torch its module tree is another one over the same tensors. Native passes correct any layer with a place.
        """
        self.check_correcting(factors)
        if isinstance(self.decoder, NativeDecoder):
            return self
        made, corrected = self, self.decoder.corrected
        if corrected is None:
            made, corrected = self.with_model(share_copy(self.model)), Corrected()
            assert isinstance(made.decoder, TransformersDecoder)
            made.decoder.attached, made.decoder.corrected = self.attached, corrected
        adapt(made.model, factors, corrected)
        return made


def decoder_of(
    model: PreTrainedModel,
    attends_trees: bool,
    is_plain: bool = False,
    kv_dtype: torch.dtype | None = None,
) -> NativeDecoder | TransformersDecoder:
    """A decoder for a model. is_plain: it needs transformers' layers."""
    described = describe(model) if attends_trees and not is_plain else None
    if described is None:
        return TransformersDecoder(model, attends_trees)
    return NativeDecoder(model, described, kv_dtype)
