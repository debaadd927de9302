"""A loaded model with what the engine must know about it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..attention.kv_cache import SlotCache
from ..attention.masks import PassLayout
from ..attention.states import States
from ..core.vision import VisionPrompt
from ..errors import IncompatibleModels
from ..heads import SpaceAdapter
from ..hf.describe import describe
from ..hf.vision import Vision
from .adapters import AttachedAdapter, attach_adapter, share_copy
from .native import NativeDecoder
from .torch_decoder import FusedDecoder, TransformersDecoder, is_fused


@dataclass(frozen=True, eq=False)
class ImageReference:
    """What the model in plain transformers says after a chat with a made-up image: logits [V]."""

    token_ids: Sequence[int]
    prompt: VisionPrompt
    logits: Tensor


_SCALED_LOGITS = ("logit_scale", "logits_scaling", "final_logit_softcapping")


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A causal language model that is ready for trees.

    context: the most tokens that a sequence may have.
    attends_trees: the model calls our attention function; otherwise it is given a 4-D mask.
    mixes_rows: experts make the numerics of a row depend on the others.
    fingerprint: the hash of the checkpoint, see `hf.fingerprint`.
    decoder: what runs its layers.
    vision: the vision half of a vision-language model, of which `model` is the text half.
    reference: logits [V] of plain transformers after each path of a small tree, for `self_test`.
    image_reference: the same after an image.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    context: int
    eos_ids: frozenset[int]
    attends_trees: bool
    mixes_rows: bool
    fingerprint: str
    decoder: NativeDecoder | FusedDecoder | TransformersDecoder
    reference: list[Tensor]
    vision: Vision | None = None
    image_reference: ImageReference | None = None

    @property
    def vocab_size(self) -> int:
        """Rows of the output head, padding included."""
        return self.model.get_output_embeddings().out_features  # type: ignore[union-attr, return-value]

    @property
    def device(self) -> torch.device:
        """Where the token embeddings live."""
        return self.model.get_input_embeddings().weight.device  # type: ignore[union-attr, return-value]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.model.dtype

    @property
    def num_layers(self) -> int:
        """Decoder layers; also the index of the last hidden state, which has been through the final norm."""
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        """E, the width of the hidden states."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def embeddings(self) -> Tensor:
        """The token embeddings [V, E]."""
        return self.model.get_input_embeddings().weight  # type: ignore[union-attr, return-value]

    def output_rows(self) -> Tensor:
        """The output head [V, E], for drafters and for training.

        Raises `IncompatibleModels` where its rows are quantised, or where logits are not just their products with the
        last state: a head would learn, and draft from, another distribution.
        """
        config, head = self.model.config.get_text_config(), self.model.get_output_embeddings()
        extras = [name for name in _SCALED_LOGITS if getattr(config, name, None) not in (None, 0, 1)]
        if getattr(head, "bias", None) is not None:
            extras.append("a bias of the output layer")
        if extras:
            raise IncompatibleModels(
                "heads cannot draft for this target yet: its logits are more than output rows times states",
                got=", ".join(extras),
                expected="a model without them",
            )
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
        """Whether passes run in the native library, whose rows have the same bits whatever shares the pass."""
        return isinstance(self.decoder, NativeDecoder)

    @property
    def attached(self) -> AttachedAdapter | None:
        """The adapter attached to the model."""
        return self.decoder.attached

    def forward(
        self, token_ids: Tensor | None, layout: PassLayout, cache: SlotCache, states: States | None = None
    ) -> Tensor:
        """Raw logits [B, N, V] of every node of a pass. Fills in the hidden states that `states` asks for.

        token_ids: [B, N]; None: those of the layout's tree, which native passes read as lists. Where `layout.is_mask`
        is given, the attached adapter acts on these rows.
        """
        if token_ids is None and not self.is_native:
            assert layout.tree is not None
            token_ids = layout.tree.token_ids
        if layout.is_mask is None or self.attached is None:
            return self.decoder.logits(token_ids, layout, cache, states)
        assert token_ids is not None
        with self.attached.applied(token_ids, layout.is_mask) as plain_ids:
            return self.decoder.logits(plain_ids, layout, cache, states)

    def prefill(self, token_ids: Tensor, layout: PassLayout, cache: SlotCache, states: States | None = None) -> None:
        """Fill the cache; the output head is left out, since nothing reads its logits."""
        self.decoder.prefill(token_ids, layout, cache, states)

    def with_model(self, model: PreTrainedModel) -> "LoadedModel":
        """The same description around another module tree of the same architecture, without an adapter."""
        decoder = decoder_of(model, self.attends_trees)
        return replace(self, model=model, decoder=decoder, image_reference=None)

    def with_adapter(self, adapter: SpaceAdapter) -> "LoadedModel":
        """The same model with an adapter, in a module tree of its own. Raises `IncompatibleModels` without a fit."""
        model = share_copy(self.model)
        attached = attach_adapter(model, adapter, self.device, self.dtype)
        return replace(self, model=model, decoder=decoder_of(model, self.attends_trees, attached))


def decoder_of(
    model: PreTrainedModel, attends_trees: bool, attached: AttachedAdapter | None = None
) -> NativeDecoder | FusedDecoder | TransformersDecoder:
    """The decoder that runs a model.

    attached: the adapter attached to it.
    """
    if is_fused(model):
        return FusedDecoder(model, attached)
    described = describe(model) if attends_trees else None
    if described is None:
        return TransformersDecoder(model, attends_trees, attached)
    return NativeDecoder(model, described, attached)
