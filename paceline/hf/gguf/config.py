"""Reads what a GGUF file says of its layers as a config of transformers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isclose, log
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
import torch
from pydantic import Field
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...errors import ConfigError
from ...schema import Positive, brief, validate
from ..describe import head_dim_of
from .file import GGUFFile, GGUFTensor
from .tokens import ends_of_answers

_Entry = tuple[str | None, Any]
"""The name of an entry in the config, None if it has none, and what it may hold."""
_SIZE = Annotated[int, Field(ge=1, le=1 << 40)]


@dataclass(frozen=True)
class Form:
    """How files of an architecture differ from the model in transformers.

    variants: entries that make it another type of model, unless they are 0.
    entries: of the metadata, beside those that all have.
    epsilon: the entry that holds it, and its name in the config.
    settings: of the config, which no entry says. rope: the same of a scaled rotation.
    interleaved: the rows of q and k lie in rotary pairs. plus_one: norms hold 1 + their weight.
    mixed: rows of the experts' gate and up come by turns, and matrices are transposed.
    partial: only the first dimensions of a head are rotated.
    """

    model_type: str
    entries: Mapping[str, _Entry] = field(default_factory=dict[str, _Entry])
    variants: Mapping[str, str] = field(default_factory=dict[str, str])
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rope: Mapping[str, Any] = field(default_factory=dict[str, Any])
    interleaved: bool = False
    plus_one: bool = False
    mixed: bool = False
    partial: bool = False


_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_WINDOWS: Mapping[str, _Entry] = {
    _WINDOW: ("sliding_window", _SIZE), _PATTERN: (None, Annotated[int, Field(ge=1)] | list[bool]),
}  # fmt: skip
_CAPS: Mapping[str, _Entry] = {name: (name, Positive) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_LOCAL_BASE, _FINETUNED = "rope.freq_base_swa", "rope.scaling.finetuned"
_POOLING = "pooling_type"  # of embedding models
_SECTIONS = "rope.dimension_sections"  # dimensions of each axis of positions, of models that see
_LAYER_NORM = "attention.layer_norm_epsilon"
_SCALES: Mapping[str, _Entry] = {
    "attention.scale": ("attention_multiplier", Positive),
    "embedding_scale": ("embedding_multiplier", Positive),
    "residual_scale": ("residual_multiplier", Positive),
    "logit_scale": ("logits_scaling", Positive),
    _FINETUNED: (None, Literal[True]),  # False: no rotation at all
}
_OWN: Mapping[str, _Entry] = {
    "expert_count": ("num_experts", _SIZE), "expert_used_count": ("num_experts_per_tok", _SIZE),
}  # fmt: skip
_LOCAL: Mapping[str, _Entry] = {**_OWN, "expert_count": ("num_local_experts", _SIZE)}
_EXPERTS: Mapping[str, _Entry] = {**_OWN, "expert_feed_forward_length": ("moe_intermediate_size", _SIZE)}
SHARED_SIZE = "expert_shared_feed_forward_length"
_SHARED: Mapping[str, _Entry] = {SHARED_SIZE: ("shared_expert_intermediate_size", _SIZE)}
_LAST = "nextn_predict_layers"  # layers after the last one, which guess the token after the next
GATING = "expert_gating_func"
_GROUPS: Mapping[str, _Entry] = {
    "expert_group_count": ("n_group", _SIZE), "expert_group_used_count": ("topk_group", _SIZE),
}  # fmt: skip
_ROUTED: Mapping[str, _Entry] = {
    **_EXPERTS, **_GROUPS,
    "expert_count": ("n_routed_experts", _SIZE),
    "expert_shared_count": ("n_shared_experts", _SIZE),
    "expert_weights_scale": ("routed_scaling_factor", Positive),
    "expert_weights_norm": ("norm_topk_prob", bool),
    GATING: (None, Literal[2]),  # a sigmoid
    "leading_dense_block_count": ("first_k_dense_replace", Annotated[int, Field(ge=0)]),
    _LAST: (None, Annotated[int, Field(ge=0)]),
}  # fmt: skip
_ERNIE: Mapping[str, _Entry] = {
    **_EXPERTS,
    "expert_count": ("moe_num_experts", _SIZE),
    "expert_used_count": ("moe_k", _SIZE),
    "expert_shared_count": ("moe_num_shared_experts", _SIZE),
    SHARED_SIZE: (None, _SIZE),  # of all together
    "leading_dense_block_count": ("moe_layer_start_index", Annotated[int, Field(ge=0)]),
    "interleave_moe_layer_step": ("moe_layer_interval", _SIZE),
}
_OSS: Mapping[str, _Entry] = {**_LOCAL, "expert_feed_forward_length": ("intermediate_size", _SIZE)}
FORMS: Mapping[str, Form] = {
    "llama": Form("llama", _LOCAL, {"expert_count": "mixtral"}, interleaved=True),
    "qwen2": Form("qwen2"),
    "qwen2vl": Form("qwen2_vl_text", {_SECTIONS: (None, Annotated[list[int], Field(min_length=3, max_length=4)])}),
    "qwen2moe": Form("qwen2_moe", {**_EXPERTS, **_SHARED}, settings={"norm_topk_prob": False}),
    "qwen3": Form("qwen3"),
    "qwen3moe": Form("qwen3_moe", _EXPERTS, settings={"norm_topk_prob": True}),
    "olmoe": Form("olmoe", _OWN, settings={"norm_topk_prob": False}),
    "phi3": Form("phi3", {_WINDOW: ("sliding_window", Annotated[int, Field(ge=0)])}),
    "gemma": Form("gemma", plus_one=True),
    "gemma2": Form("gemma2", {**_WINDOWS, **_CAPS}, plus_one=True),
    "gemma3": Form("gemma3_text", {**_WINDOWS, _LOCAL_BASE: (None, Positive)}, plus_one=True),
    "granite": Form("granite", _SCALES, interleaved=True),
    "granitemoe": Form("granitemoe", {**_SCALES, **_LOCAL}, interleaved=True),
    "starcoder2": Form("starcoder2", epsilon=(_LAYER_NORM, "norm_epsilon")),
    "olmo2": Form("olmo2", {**_WINDOWS, _LOCAL_BASE: (None, Positive)}, {_WINDOW: "olmo3"}),
    "smollm3": Form("smollm3", settings={"no_rope_layer_interval": 4}, interleaved=True),
    "exaone": Form("llama", {_LAYER_NORM: (None, Positive)}),
    "exaone4": Form("exaone4", _WINDOWS, settings={"sliding_window": None}),
    "glm4moe": Form("glm4_moe", _ROUTED, settings={"num_mtp_layers": 0}, partial=True),
    "ernie4_5-moe": Form("ernie4_5_moe", _ERNIE),
    "gpt-oss": Form("gpt_oss", {**_WINDOWS, **_OSS}, rope={"truncate": False}, mixed=True),
}
"""The architectures that are read, by llama.cpp's name."""
_FACTORS = ("rope.scaling.factor", "rope.scale_linear")  # the latter in older files
_YARN_FACTORS = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor")
BETAS = {f"rope.scaling.yarn_{name}": name for name in ("beta_fast", "beta_slow")}
YARN = {"beta_fast": 32.0, "beta_slow": 1.0}
"""What llama.cpp and transformers take where nothing is said."""
_EXTRAPOLATION = "rope.scaling.yarn_ext_factor"
_ENTRIES: Mapping[str, _Entry] = {
    "context_length": ("max_position_embeddings", _SIZE),
    "block_count": ("num_hidden_layers", _SIZE),
    "embedding_length": ("hidden_size", _SIZE),
    "feed_forward_length": ("intermediate_size", _SIZE),
    "attention.head_count": ("num_attention_heads", _SIZE),
    "attention.head_count_kv": ("num_key_value_heads", _SIZE),
    "attention.key_length": ("head_dim", _SIZE),
    "attention.value_length": (None, _SIZE),
    "vocab_size": (None, _SIZE),
    "rope.dimension_count": (None, _SIZE),
    "rope.freq_base": (None, Positive),
    "rope.scaling.type": (None, str),
    "rope.scaling.original_context_length": (None, _SIZE),
    _FINETUNED: (None, bool),
    _POOLING: (_POOLING, Annotated[int, Field(ge=0, le=4)]),
    **dict.fromkeys((*_FACTORS, *_YARN_FACTORS, *BETAS), (None, Positive)),
    _EXTRAPOLATION: (None, Annotated[float, Field(ge=1, le=1)]),
}
_OPTIONAL = {"attention.head_count_kv", "attention.key_length", _POOLING}
_REQUIRED = {key for key, (name, _) in _ENTRIES.items() if name} - _OPTIONAL
_SLIDING = ("gemma3", "gpt-oss")  # the only ones that always have windows of lengths that differ
_WIDEST = {("gemma2", 46), ("gemma3", 62)}  # those of 27B scale attention by the hidden size of a head, not by its own
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROPE_FACTORS = "rope_freqs.weight"


def not_understood(file: GGUFFile, got: str, expected: str | None = None) -> NoReturn:
    """Raise `ConfigError` for what would give another model if it were ignored."""
    raise ConfigError(
        f"{str(file.path)!r} describes its model in a way that is not understood", got=got, expected=expected,
        fix="give the Hugging Face folder or hub id of the same model",
    )  # fmt: skip


def config_of(file: GGUFFile) -> PretrainedConfig:
    """The config of a file's model. Raises `ConfigError` for what is not understood."""
    form, about = FORMS[file.architecture], _about(file)
    entries = entries_of(file.architecture)
    said: dict[str, Any] = {name: about[key] for key, (name, _) in entries.items() if name and key in about}
    settings = {**form.settings, **said}
    names = {tensor.name: tensor for tensor in file.tensors}
    heads, layers = settings["num_attention_heads"], settings["num_hidden_layers"]
    if layers > len(names):
        not_understood(file, f"{layers:,} layers", f"at most {len(names):,}, the number of tensors")
    if layers <= about.get(_LAST, 0):
        not_understood(file, f"{_LAST} {about[_LAST]} of {layers} layers", "fewer")
    settings["num_hidden_layers"] = layers = layers - about.get(_LAST, 0)
    model_type = next((kind for key, kind in form.variants.items() if about.get(key)), form.model_type)
    plain = AutoConfig.for_model(model_type)
    settings.setdefault("num_key_value_heads", heads)
    head_dim = settings.setdefault("head_dim", settings["hidden_size"] // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if about.get(key, head_dim) != head_dim and not (form.partial and key.startswith("rope.")):
            not_understood(file, f"{file.architecture}.{key} {about[key]}", f"{head_dim}, as of keys")
    rows = names["token_embd.weight"].shape[0]  # some files pad it beyond their tokens
    tokens = len(file.metadata.get("tokenizer.ggml.tokens", []))
    if about.get("vocab_size", rows) != rows or tokens > rows:
        got = f"vocab_size {about.get('vocab_size')}, {tokens:,} tokens, and {rows:,} rows of token_embd.weight"
        not_understood(file, got, "as many rows as vocab_size, and at least as many as tokens")
    if settings.get("sliding_window") == 0:  # for none
        settings["sliding_window"] = None
    pattern = about.get(_PATTERN)
    if pattern is not None and settings.get("sliding_window", getattr(plain, "sliding_window", None)):
        slides = [bool((i + 1) % pattern) for i in range(layers)] if isinstance(pattern, int) else pattern
        settings["layer_types"] = ["sliding_attention" if slide else "full_attention" for slide in slides]
    if file.architecture == "exaone4" and settings["sliding_window"] is None:
        settings["layer_types"] = ["full_attention"] * layers  # transformers divides by zero to find them
    if file.architecture in ("gemma2", "gemma3"):
        wide = (file.architecture, layers) in _WIDEST
        settings["query_pre_attn_scalar"] = settings["hidden_size"] // heads if wide else head_dim
    if file.architecture == "ernie4_5-moe":
        shared = settings["moe_intermediate_size"] * settings["moe_num_shared_experts"]
        if about[SHARED_SIZE] != shared:
            not_understood(file, f"{SHARED_SIZE} {about[SHARED_SIZE]}", f"{shared}, of all shared experts together")
    if file.architecture == "glm4moe":
        settings["attention_bias"] = "blk.0.attn_q.bias" in names
        settings["use_qk_norm"] = "blk.0.attn_q_norm.weight" in names
    if file.architecture.startswith("granite"):
        settings.setdefault("attention_multiplier", head_dim**-0.5)
    if not hasattr(plain, "head_dim") and head_dim == settings["hidden_size"] // heads:
        del settings["head_dim"]  # as in the checkpoints of these families
    config = AutoConfig.for_model(
        model_type,
        **settings,
        vocab_size=rows,
        tie_word_embeddings="output.weight" not in names,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=ends_of_answers(file.metadata),
        pad_token_id=file.metadata.get("tokenizer.ggml.padding_token_id"),
        dtype=file.dtype,
        architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, "Qwen2ForCausalLM")],
    )
    _set_rope(file, config, about, names.get(ROPE_FACTORS))
    return config


def entries_of(architecture: str) -> dict[str, _Entry]:
    """All entries of the metadata about the layers, with their names in the config."""
    form = FORMS[architecture]
    return {**_ENTRIES, **form.entries, form.epsilon[0]: (form.epsilon[1], Positive)}


def _about(file: GGUFFile) -> dict[str, Any]:
    """What the metadata says of the layers. Raises `ConfigError` for an entry that is unknown, missing or wrong."""
    prefix, entries = f"{file.architecture}.", entries_of(file.architecture)
    about = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    others = [key for key in file.metadata if not key.startswith(prefix) and key.partition(".")[2] in entries]
    if unknown := [f"{prefix}{key}" for key in about.keys() - entries.keys()] + others:
        not_understood(file, f"{min(unknown)} {brief(file.metadata[min(unknown)])}")
    form = FORMS[file.architecture]
    required = _REQUIRED | {form.epsilon[0]}
    if "expert_count" not in form.variants or "expert_count" in about:
        required |= {key for key in entries if key.startswith("expert_")} - _GROUPS.keys()
    required |= {_WINDOW} if file.architecture in _SLIDING else set()
    if missing := required - about.keys():
        not_understood(file, f"no {prefix}{min(missing)}")
    return {
        key: validate(entries[key][1], shortest_decimal(value), f"{prefix}{key} of {str(file.path)!r}")
        for key, value in about.items()
    }


def class_of(config: PretrainedConfig) -> Any:
    """The class of a config's language model; of Qwen2-VL's half, one whose parameters have the same names."""
    kind = CONFIG_MAPPING["qwen2"] if config.model_type == "qwen2_vl_text" else type(config)
    return MODEL_FOR_CAUSAL_LM_MAPPING[kind]


def shortest_decimal(value: Any) -> Any:
    """Kept in 32 bits, 1e-5 reads back as 9.9999997e-06: the shortest decimal is the one that was meant."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _set_rope(file: GGUFFile, config: Any, about: Mapping[str, Any], factors: GGUFTensor | None) -> None:
    base, scalings = about.get("rope.freq_base", 10_000.0), {about[key] for key in _FACTORS if key in about}
    factor = min(scalings, default=None)
    scales = factor not in (None, 1.0)
    kind = about.get("rope.scaling.type", "linear" if scales else "none")  # as llama.cpp reads it
    scaled = factor is not None and factors is None
    sound = {"none": not scales, "linear": scaled, "yarn": scaled and _is_usual_yarn(factor, about)}
    if not sound.get(kind, False) or len(scalings) > 1:
        got = ", ".join(f"{key} {about[key]}" for key in (*_FACTORS, *_YARN_FACTORS) if key in about) or "no factor"
        got = f"rope.scaling.type {kind!r}, {got}, {'no' if factors is None else 'and'} {ROPE_FACTORS}"
        not_understood(file, got, f"none, linear or yarn; the latter with one factor and without {ROPE_FACTORS}")
    by_kind = "full_attention" in (config.rope_parameters or {})
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if factors is not None:  # of each frequency: how Llama 3.1 and its successors reach further
        (expected,) = file.values(factors)
        longest = round(float(expected.max()), 3)
        config.rope_parameters = rope = rope | LLAMA3 | {"rope_type": "llama3", "factor": longest}
        plain = base ** -(torch.arange(0, head_dim_of(config), 2) / head_dim_of(config))
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        if factors.shape != scaled.shape or not torch.allclose(plain / scaled, expected[0], rtol=1e-4):
            not_understood(file, ROPE_FACTORS, "the factors of Llama 3")
    elif kind == "linear":
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        original = about.get("rope.scaling.original_context_length", config.max_position_embeddings)
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        rope |= {**YARN, **FORMS[file.architecture].rope}
        rope |= {name: about[key] for key, name in BETAS.items() if key in about}
    if FORMS[file.architecture].partial:
        rotated, head_dim = about.get("rope.dimension_count", head_dim_of(config)), head_dim_of(config)
        if rotated > head_dim or rotated % 2:
            not_understood(file, f"{file.architecture}.rope.dimension_count {rotated}", f"even, at most {head_dim}")
        rope["partial_rotary_factor"] = rotated / head_dim
    if _SECTIONS in about:
        rope["mrope_section"] = about[_SECTIONS][:3]
    if by_kind:
        local = about.get(_LOCAL_BASE, 10_000.0 if file.architecture == "gemma3" else base)
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
    config.rope_parameters = rope


def _is_usual_yarn(factor: Any, about: Mapping[str, Any]) -> bool:
    """Whether attention is scaled as usual. llama.cpp and transformers read another scale in two ways."""
    said = [about[key] for key in _YARN_FACTORS if key in about]
    return all(isclose(scale, 0.1 * log(factor) + 1, rel_tol=1e-4) for scale in said)
