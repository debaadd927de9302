"""Separates a vision-language model of transformers into its language model and its vision tower."""

import copy
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.processing_utils import ProcessorMixin

from ..errors import IncompatibleModels
from .entrance import stopping_copy
from .vision import Vision, family_of


def text_half(model: PreTrainedModel) -> PreTrainedModel:
    """The language model and output head as a causal LM over the same modules.

    If transformers has a causal class for the text config, the result is of that class.
    """
    language, head = language_model(model), output_head(model)
    if head is None:
        raise _other_class(model, "an output head")
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(language.config), None)
    if kind is not None:
        with torch.device("meta"):  # a shell: every module with weights is replaced
            causal: PreTrainedModel = kind(language.config)
        causal.set_submodule(causal.base_model_prefix, language)
        causal.set_output_embeddings(head)
        if not any(parameter.is_meta for parameter in causal.parameters()):
            return causal.eval()
    return TextHalf(language, head)


def language_model(model: PreTrainedModel) -> PreTrainedModel:
    """The decoder inside a vision-language model, without its head."""
    found: Any = model.get_decoder()  # pyright: ignore[reportCallIssue]
    found = getattr(found, "base_model", found)  # of one with a head
    if found in (model, model.base_model) or not isinstance(found, PreTrainedModel):
        raise _other_class(model, "a text model inside it")
    return found


def output_head(model: PreTrainedModel) -> nn.Module | None:
    """The output head of a vision-language model, or of a causal model inside it."""
    inside = getattr(model, "language_model", None)
    return model.get_output_embeddings() or (inside and inside.get_output_embeddings())


def _other_class(model: PreTrainedModel, expected: str) -> IncompatibleModels:
    return IncompatibleModels(
        "a part of this vision-language model is missing", got=type(model).__name__, expected=expected,
        fix="load the class that AutoModelForImageTextToText gives",
    )  # fmt: skip


def vision_half(model: PreTrainedModel, processor: ProcessorMixin | None) -> Vision:
    """The tower and projector of a model, without its language model, so that quantising that frees its memory."""
    base, config, family = model.base_model, model.config, family_of(model.config)
    if family.is_generic:
        family = replace(family, axes=hasattr(base, "get_rope_index"))
        tower = stopping_copy(model, language_model(model), output_head(model))
    else:
        shared = {id(t): t for t in (*base.parameters(), *base.buffers())}
        tower = copy.deepcopy(base, {**shared, id(language_model(model)): nn.Module()})
    image_token = getattr(config, "image_token_id", None)
    image_token = getattr(processor, "image_token_id", None) if image_token is None else image_token
    if not isinstance(image_token, int):
        raise _other_class(model, "the id of its image token in config.json or in its processor")
    ids = (image_token, getattr(config, "video_token_id", None))
    placeholders = frozenset(i for i in ids if isinstance(i, int))
    return Vision(family, processor, tower.eval(), image_token, placeholders)


@final
class TextHalf(PreTrainedModel):
    """The language model and the output head of another model, over the same tensors."""

    base_model_prefix = "model"
    # The language model's config selects the attention; these flags only prevent an error of transformers.
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    _can_set_experts_implementation_cached_value = True

    def __init__(self, language_model: PreTrainedModel, lm_head: nn.Module):
        super().__init__(language_model.config)
        self.model: Any = language_model
        self.lm_head = lm_head

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_attn_implementation(self, attn_implementation: str | dict[str, str], allow_all_kernels: bool = False):
        self.model.set_attn_implementation(attn_implementation, allow_all_kernels)

    def forward(
        self, input_ids: Tensor | None = None, logits_to_keep: int | Tensor = 0, **options: object
    ) -> CausalLMOutputWithPast:
        """Logits [B, N, V]. Options that are None are not passed to the language model, which may not accept them."""
        out = self.model(input_ids=input_ids, **{name: value for name, value in options.items() if value is not None})
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, kept]) / getattr(self.config, "logits_scaling", 1.0)  # Granite's
        return CausalLMOutputWithPast(logits=logits, hidden_states=out.hidden_states)
