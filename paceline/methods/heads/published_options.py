"""What config.json of heads of other projects says: options that are read, those without effect, and all others.

An option that is not known could change the numbers of a head, so that it is refused by name. One mechanism does it for
all layouts: each has a class of the options that it reads.
"""

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Annotated, Any, TypeVar, cast

from pydantic import Field

from ...errors import ConfigError
from ...hf.settings import one_rope
from ...schema import Many, Positive, brief, checked, validate
from .layers import LayersConfig
from .parts import Count, Vocabulary, Width
from .published import CONTEXT, Published, TargetFacts, lacks

_T = TypeVar("_T")
_NO_EFFECT = {
    "architectures", "attention_dropout", "attn_implementation", "auto_map", "base_model_name_or_path",
    "bos_token_id", "chunk_size_feed_forward", "diversity_penalty", "dtype", "encoder_no_repeat_ngram_size",
    "eos_token_id", "id2label", "initializer_range", "label2id", "length_penalty", "max_length", "min_length",
    "model_type", "name_or_path", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
    "pad_token_id", "pretraining_tp", "repetition_penalty", "return_dict", "speculators_model_type",
    "speculators_version", "temperature", "tie_word_embeddings", "tokenizer_class", "top_k", "top_p", "torch_dtype",
    "transformers_version", "typical_p", "unk_token_id", "use_cache", "use_input_layernorm_in_first_layer",
    "use_last_layernorm",
}  # fmt: skip
"""Keys of config.json that change no number of a head: names, settings of training and of `generate`."""
_PLAIN: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("hidden_act", "hidden_activation"), ("silu",)),
    **dict.fromkeys(("logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier"), (1.0,)),
    **dict.fromkeys(("partial_rotary_factor", "input_embedding_scale", "output_multiplier"), (1.0,)),
    "projector_type": ("dflash",), "attention_mode": ("gqa",), "use_aux_hidden_state": (True,),
}  # fmt: skip
"""Options, and the values that mean what the layers here do. Of all others only false and empty values are plain."""


@checked
class PublishedLayers:
    """What config.json says of the decoder layers of a head, by the names that transformers' Llama and Qwen3 have."""

    hidden_size: Width
    intermediate_size: Width
    num_attention_heads: Width
    vocab_size: Vocabulary
    num_hidden_layers: Count = 1
    num_key_value_heads: Width | None = None
    head_dim: Width | None = None
    rms_norm_eps: Positive = 1e-6
    max_position_embeddings: Annotated[int, Field(ge=1)] | None = None
    rope_theta: Positive | None = None
    rope_scaling: Mapping[str, Any] | None = None
    rope_parameters: Mapping[str, Any] | None = None
    layer_types: Many[str] | None = None
    use_sliding_window: bool | None = None
    sliding_window: Annotated[int, Field(ge=1)] | None = None
    max_window_layers: Annotated[int, Field(ge=0)] = 0

    @property
    def has_windows(self) -> bool:
        """Whether a layer reads the last tokens alone, as any engine may read this."""
        if self.use_sliding_window is None and self.layer_types is None:
            return self.sliding_window is not None
        by_count = bool(self.use_sliding_window) and self.max_window_layers < self.num_hidden_layers
        return by_count or any(kind != "full_attention" for kind in self.layer_types or ())


def said(published: Published, kind: type[_T], module: str, expected: str, ignored: Collection[str] = ()) -> _T:
    """What config.json says, as `kind`. Null and [] are as good as nothing.

    ignored: keys that change nothing in heads of this layout. expected: what the module reads.
    Raises `IncompatibleModels` for options that are not known, unless they have no effect, `ConfigError` for values of
    a wrong kind.
    """
    known = {field.name for field in fields(cast("Any", kind))}
    entries = {key: value for key, value in published.config.items() if value not in (None, [])}
    others = {key: value for key, value in entries.items() if key not in known and key not in ignored}
    strange = [f"{key} {brief(value)}" for key, value in others.items() if not _is_plain(key, value)]
    options = validate(kind, {key: entries[key] for key in entries.keys() & known}, published.name)
    if isinstance(options, PublishedLayers) and options.has_windows:
        strange.append("sliding attention (layer_types, use_sliding_window, sliding_window)")
    if strange:
        raise lacks(published, module, ", ".join(strange), expected)
    return options


def _is_plain(key: str, value: object) -> bool:
    if key in _PLAIN:
        return value in _PLAIN[key]
    return key in _NO_EFFECT or key.startswith("_") or value is False or value in ("", [], {})


def layer_fields(published: Published, options: PublishedLayers, module: str) -> dict[str, Any]:
    """The fields of `LayersConfig` that do not depend on the layout. Raises as `said`."""
    rope = one_rope(published.name, published.config)
    theta, kind = rope.pop("rope_theta", 10000.0), rope.setdefault("rope_type", "default")
    if rope.get("partial_rotary_factor") == 1:
        del rope["partial_rotary_factor"]
    if kind != "linear":
        rope.setdefault("original_max_position_embeddings", options.max_position_embeddings)
    if kind == "default" and (more := rope.keys() - {"rope_type", "original_max_position_embeddings"}):
        raise lacks(published, module, f"rotary positions with {', '.join(sorted(more))}", "default, or scaled ones")
    heads = options.num_attention_heads
    return {
        "hidden_size": options.hidden_size,
        "intermediate_size": options.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": options.num_key_value_heads or heads,
        "head_dim": options.head_dim or options.hidden_size // heads,
        "num_hidden_layers": options.num_hidden_layers,
        "vocab_size": options.vocab_size,
        "rms_norm_eps": options.rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else rope,
    }


_WRITTEN = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers",
    "vocab_size", "rms_norm_eps", "rope_theta", "rope_scaling",
)  # fmt: skip


def layers_config(config: LayersConfig, facts: TargetFacts) -> dict[str, Any]:
    """Decoder layers as config.json says them, nothing left to a default: libraries have different ones."""
    return {
        **{name: getattr(config, name) for name in _WRITTEN},
        "rope_parameters": {**(config.rope_scaling or {"rope_type": "default"}), "rope_theta": config.rope_theta},
        "max_position_embeddings": facts.context or CONTEXT,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def joined(source: str, outer: Mapping[str, Any], inner: Any, name: str) -> dict[str, Any]:
    """An object of a config.json with what another one inside it, of this name, says.

    Raises `ConfigError` where the two contradict each other.
    """
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{source} has a wrong {name}", got=brief(inner), expected="an object")
    for key in outer.keys() & (inner.keys() - _NO_EFFECT):
        if outer[key] is not None and inner[key] is not None and outer[key] != inner[key]:
            got = f"{key} {brief(inner[key])} in {name}, and {brief(outer[key])} beside it"
            raise ConfigError(f"{source} contradicts itself", got=got, expected="one value")
    return {**outer, **{key: value for key, value in inner.items() if value is not None}}


def check_held(published: Published, options: Mapping[str, tuple[object, object]]) -> None:
    """Raise `ConfigError` for options that contradict the tensors. options: what is said, or None, and what is."""
    for name, (told, held) in options.items():
        if told is not None and told != held:
            message = f"{published.name} contradicts its tensors"
            raise ConfigError(message, got=f"{name} {told}", expected=f"{held}, as the tensors show")
