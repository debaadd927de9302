"""A model as the engine knows it, and the one place where it is called."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..attention.kv_cache import SlotCache
from ..attention.masks import PassLayout
from ..attention.states import States
from ..errors import IncompatibleModels
from ..heads import SpaceAdapter
from ..hf.describe import describe
from ..hf.vision import Vision, deep_keywords
from .adapters import Gate, put_on, share_copy
from .fused import FusedDecoder, is_fused
from .native import NativeDecoder
from .self_test import Reference, Sight

_SCALED_LOGITS = ("logit_scale", "logits_scaling", "final_logit_softcapping")


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A causal language model, ready for trees, with what the engine must know about it.

    native: runs the model in the native library; fused: where its layers are of the Llama form and it does not run
    there. attends_trees: the model routes through our attention function; otherwise it is given a 4-D mask. reference:
    what plain transformers says on a few made-up tokens, to hold the tree pass against. context: the most tokens a
    sequence may have. mixes_rows: experts make a row's numerics depend on the others. fingerprint: which checkpoint it
    is, see `hf.fingerprint`. gate: of the adapter that the model wears. vision: the vision half of a
    vision-language model, of which `model` is the text half. sight: what plain transformers says of a made-up picture.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    context: int
    eos_ids: frozenset[int]
    attends_trees: bool
    mixes_rows: bool
    reference: Reference
    fingerprint: str
    fused: FusedDecoder | None = None
    native: NativeDecoder | None = None
    gate: Gate | None = None
    vision: Vision | None = None
    sight: Sight | None = None

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
        """Of the weights."""
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

    def forward(
        self, token_ids: Tensor | None, layout: PassLayout, cache: SlotCache, states: States | None = None
    ) -> Tensor:
        """Raw logits [B, N, V] of every node of a pass. Fills in the hidden states that `states` asks for.

        token_ids: [B, N]; None: those of the layout's tree, which native passes read as lists.

        Where `layout.is_mask` is given, the adapter's gate is open for these rows during the pass.
        """
        if self.native is None and token_ids is None:
            assert layout.tree is not None
            token_ids = layout.tree.token_ids
        if layout.is_mask is None or self.gate is None:
            return self._logits(token_ids, layout, cache, states)
        assert token_ids is not None
        with self.gate.opened(token_ids, layout.is_mask) as plain_ids:
            return self._logits(plain_ids, layout, cache, states)

    def _logits(self, token_ids: Tensor | None, layout: PassLayout, cache: SlotCache, states: States | None) -> Tensor:
        if self.native is not None:
            logits = self.native.forward(token_ids, layout, cache, states, layout.head_rows or layout.num_nodes)
            assert logits is not None
            return logits
        assert token_ids is not None
        if self.fused is not None:
            return self.fused.logits(token_ids, layout, cache, states)
        return self._call(self.model, token_ids, layout, cache, states).logits[:, -(layout.head_rows or 0) :]

    def prefill(self, token_ids: Tensor, layout: PassLayout, cache: SlotCache, states: States | None = None) -> None:
        """Fill the cache; the output head is left out, since nothing reads its logits."""
        if self.native is not None:
            self.native.forward(token_ids, layout, cache, states, 0)
            return
        if self.fused is not None:
            self.fused.hidden(token_ids, layout, cache, states)
            return
        self._call(self.model.base_model, token_ids, layout, cache, states)

    def _call(self, module: nn.Module, token_ids: Tensor, layout: PassLayout, cache: SlotCache, states: States | None):
        options: dict[str, object] = {"position_ids": layout.position_ids, "past_key_values": cache, "use_cache": True}
        if states:
            options["output_hidden_states"] = True
        if layout.head_rows is not None:
            options["logits_to_keep"] = layout.head_rows
        if self.attends_trees:
            options["paceline_pass"] = layout
        else:
            options["attention_mask"] = layout.mask_4d(self.model.dtype)
        if layout.rows is not None:
            out = module(inputs_embeds=layout.rows.embeds, **options, **deep_keywords(layout.rows))
        elif self.gate is not None and layout.is_mask is not None:
            embeddings: nn.Module = self.model.get_input_embeddings()  # type: ignore[assignment]
            out = module(inputs_embeds=self.gate.embed(embeddings(token_ids)), **options)
        else:
            out = module(input_ids=token_ids, **options)
        for index in states or ():
            states[index] = out.hidden_states[index]  # type: ignore[index]
        return out

    def with_model(self, model: PreTrainedModel) -> "LoadedModel":
        """The same description around another module of the same architecture, which wears nothing."""
        return replace(self, model=model, gate=None, sight=None, **decoders(model))

    def wearing(self, adapter: SpaceAdapter) -> "LoadedModel":
        """The same model with an adapter on, in a module tree of its own. Raises `IncompatibleModels` without a fit."""
        model = share_copy(self.model)
        gate = put_on(model, adapter, self.device, self.dtype)
        return replace(self, model=model, gate=gate, **decoders(model, gate))


def decoders(model: PreTrainedModel, gate: Gate | None = None) -> dict[str, Any]:
    """What runs a model in the place of transformers, by the fields of `LoadedModel`."""
    if is_fused(model):
        return {"fused": FusedDecoder(model, gate), "native": None}
    described = describe(model)
    return {"fused": None, "native": None if described is None else NativeDecoder(model, described, gate)}
