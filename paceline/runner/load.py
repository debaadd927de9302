"""Loads models of transformers and finds out what they can do: refused is what cannot be decoded in trees."""

from dataclasses import replace
from pathlib import Path

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.processing_utils import ProcessorMixin

from ..attention.attend import NAME
from ..attention.kv_cache import SlotCache
from ..attention.masks import PassLayout
from ..errors import ConfigError, IncompatibleModels
from ..hf.checkpoint import (
    CONFIG,
    WEIGHTS,
    check_config,
    check_folder,
    check_layers,
    check_sizes,
    check_weights,
    local_folder,
    read_headers,
    refused,
    weight_files,
)
from ..hf.fingerprint import fingerprint, remember
from ..hf.load import device_of, dtype_of, load_processor, usual_dtype
from ..hf.vision import family_of, is_vlm, text_half, vision_half
from ..quant import QuantReport, Weights, pack_linears, quantize_target
from .fused import fuse, is_fused
from .loaded import LoadedModel, decoders, share_copy
from .model_runner import ModelRunner
from .self_test import own_reference, plain_reference, plain_sight

_LINEAR_KINDS = ("linear_attention", "mamba", "recurrent", "conv", "ssm", "rwkv", "hybrid")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def load_model(
    name_or_path: str,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a model folder or hub id. Weights come from safetensors only.

    dtype: None and "auto" keep the checkpoint's, except on a CPU without instructions for its 16 bits, where it is
    float32. device: None takes CUDA where there is one. A vision-language model comes with its
    processor. Raises `ConfigError` for a name, dtype or file that cannot be read, `IncompatibleModels` for what is
    neither a causal LM nor a vision-language model of a known family.
    """
    place, kind, folder = device_of(device), dtype_of(dtype), local_folder(name_or_path)
    name = Path(name_or_path).name
    check_folder(folder)
    files = weight_files(folder)
    stored = read_headers(files)
    check_layers(folder, len(stored))
    own = {"trust_remote_code": trust_remote_code}
    with refused(f"{CONFIG} of {name_or_path!r} cannot be used", fix="fetch the model again"):
        config = AutoConfig.from_pretrained(folder, **own)
        # A checkpoint may name kernels of a hub, which are code; passes are routed through ours anyway.
        config._attn_implementation = config._experts_implementation = None
        sees, is_pair = is_vlm(config), bool(config.is_encoder_decoder)
    known = sees or trust_remote_code or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if is_pair or not known:
        raise _not_causal(name_or_path, config)
    check_config(name_or_path, config)
    if sees:
        family_of(config)
    _refuse_state(config)
    if not files:
        raise ConfigError(
            f"the weights of {name_or_path!r} cannot be read",
            got="only " + ", ".join(sorted(one.name for one in folder.iterdir())[:8]),
            expected=f"{WEIGHTS}, or {WEIGHTS}.index.json and what it names: other formats can run code when read",
        )
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    check_sizes(name_or_path, auto, config, trust_remote_code, stored)
    with refused(
        f"the weights of {name_or_path!r} cannot be read",
        "complete *.safetensors files that match config.json",
        "fetch the model again",
    ):
        model, loaded = auto.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            folder,
            config=config,
            dtype=kind or usual_dtype(config, place) or "auto",
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are told of below, by name
            output_loading_info=True,
            **own,
        )
    check_weights(name_or_path, model, loaded, stored)
    with refused(f"{name_or_path!r} does not fit on {place}", fix="use another device"):
        model = model.to(place).requires_grad_(False)  # pyright: ignore[reportArgumentType]
    if sees:
        return _prepare_vlm(model, load_processor(folder, config, trust_remote_code), None, name)
    with refused(
        f"{name_or_path!r} has no usable tokenizer",
        fix="put its tokenizer files in that folder, or pass a loaded model with tokenizer=...",
    ):
        tokenizer = AutoTokenizer.from_pretrained(folder, **own)
    return _prepare(model, tokenizer, name)


def wrap_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    name: str = "",
    processor: ProcessorMixin | None = None,
) -> LoadedModel:
    """Describe a model that the caller loaded. It stays as it is: ours is a second module tree over its tensors.

    processor: of a vision-language model; without one it takes prompts of token ids alone.
    """
    if is_vlm(model.config):
        family_of(model.config)
        return _prepare_vlm(share_copy(model), processor, tokenizer, name)
    if processor is not None:
        raise ConfigError("a processor is for vision-language models", got=model.config.model_type)
    return _prepare(share_copy(model), tokenizer, name)


def _prepare_vlm(
    model: PreTrainedModel, processor: ProcessorMixin | None, tokenizer: PreTrainedTokenizerBase | None, name: str
) -> LoadedModel:
    """A model in two halves: what decodes, and what sees."""
    model.eval()
    check_config(name or model.config.model_type, model.config, getattr(model, "generation_config", None))
    vision = vision_half(model, processor)
    with refused(f"{name or model.config.model_type} cannot be run by transformers", kind=IncompatibleModels):
        text, sight = text_half(model), plain_sight(model, vision)
    if vision.family.blocks == "prompt":
        text.set_attn_implementation("eager")  # with others the reference below would see both ways for want of a mask
    tokenizer = tokenizer or getattr(processor, "tokenizer", None)
    loaded = _prepare(text, tokenizer, name or model.config.model_type)
    eos_ids = _eos_ids(model) or loaded.eos_ids
    return replace(loaded, vision=vision, eos_ids=eos_ids, sight=sight)


def _eos_ids(model: PreTrainedModel) -> frozenset[int]:
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    eos = eos if eos is not None else getattr(model.config.get_text_config(), "eos_token_id", None)
    return frozenset([eos] if isinstance(eos, int) else eos or [])


def _prepare(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str) -> LoadedModel:
    """Refuse what cannot be decoded in trees; route the attention through ours and pack the linear layers."""
    if model.config.is_encoder_decoder or model.get_output_embeddings() is None:
        raise _not_causal(name or type(model).__name__, model.config)
    config = model.config.get_text_config()
    check_config(name or config.model_type, config, getattr(model, "generation_config", None))
    _refuse_state(config)
    if model.config._attn_implementation == NAME:  # wrapped before: the reference needs an attention of its own again
        model.set_attn_implementation("eager")
    if getattr(model, "_is_stateful", False):
        raise _cannot_roll_back(config.model_type, "recurrent state")
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        raise IncompatibleModels(
            f"{config.model_type} uses ALiBi, whose biases follow columns and not tree positions",
            expected="a model with rotary or learned positions",
        )
    mixes = any((getattr(config, key, None) or 0) > 1 for key in _EXPERTS)
    model.eval()
    which = fingerprint(model)
    remember(model, which)
    with refused(f"{name or config.model_type} cannot be run by plain transformers", kind=IncompatibleModels):
        reference = plain_reference(model)
    attends = _route_attention(model)
    if not attends and any(kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or []):
        raise IncompatibleModels(f"{config.model_type} mixes sliding windows with an attention of its own")
    if not pack_linears(model) and attends and not is_fused(model):
        fuse(model)
    made = decoders(model) if attends else {}
    name, context = name or config.model_type, _context(config)
    return LoadedModel(model, tokenizer, name, context, _eos_ids(model), attends, mixes, reference, which, **made)


@torch.inference_mode()
def _route_attention(model: PreTrainedModel) -> bool:
    """True if every layer goes through our attention function; False leaves it its own, driven by 4-D masks.

    Found by trying: some architectures take attention functions but do not hand keywords through to them.
    """
    place: torch.device = model.get_input_embeddings().weight.device  # type: ignore[union-attr, assignment]
    cache = SlotCache(1, 8)
    layout = PassLayout(cache.begin([cache.allocate()], 2), 2, None, False, device=place)  # type: ignore[arg-type]
    try:
        model.set_attn_implementation(NAME)
        model(
            input_ids=torch.zeros(1, 2, dtype=torch.long, device=place),
            position_ids=layout.position_ids,
            past_key_values=cache,
            use_cache=True,
            paceline_pass=layout,
        )
        if layout.num_calls == len(cache) > 0:
            return True
    except (IncompatibleModels, ValueError, TypeError, KeyError):
        pass
    model.set_attn_implementation("eager")
    return False


def _refuse_state(config) -> None:
    text = config.get_text_config()
    for kind in getattr(text, "layer_types", None) or []:
        if any(word in kind for word in _LINEAR_KINDS):
            raise _cannot_roll_back(text.model_type, f"{kind} layers")
        if kind not in ("full_attention", "sliding_attention"):
            raise IncompatibleModels(
                f"{text.model_type} has layers of kind {kind!r}",
                expected="full_attention or sliding_attention",
                fix="decode it with plain transformers",
            )


def _not_causal(name: str, config) -> IncompatibleModels:
    return IncompatibleModels(
        f"{name!r} is not a causal language model",
        got=f"model type {config.model_type!r}",
        expected="a decoder-only model that AutoModelForCausalLM loads",
    )


def _cannot_roll_back(model_type: str, what: str) -> IncompatibleModels:
    return IncompatibleModels(
        f"{model_type} keeps a running state that cannot forget rejected tokens",
        got=what,
        expected="attention layers, whose cache can be cut back to the accepted tokens",
    )


def _context(config) -> int:
    """Longest sequence; capped where positions are rescaled by length, since a pass would rescale all its rows."""
    context = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 1 << 20
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *[r for r in rope.values() if isinstance(r, dict)]]
    for one in ropes:
        if one.get("rope_type") in ("dynamic", "longrope"):
            original = one.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None) or context
            context = min(context, int(original))
    return int(context)


GROUP_SIZE = 32
"""Of INT4 weights: with 64, small models answer visibly differently from their bfloat16 selves."""


def with_weights(
    loaded: LoadedModel, weights: Weights, group_size: int = GROUP_SIZE
) -> tuple[LoadedModel, QuantReport]:
    """The model with its linear layers in INT8 or INT4; what is not replaced is shared with `loaded`.

    The loaded model is held against plain transformers first, the quantised one against itself: a tree against its
    paths. Raises `ConfigError` and `IncompatibleModels` as `quantize_target` does.
    """
    seen = 0 if loaded.sight is None else len(loaded.sight.token_ids)
    ModelRunner(loaded, max_batch_size=1, max_length=max(64, seen + 1))  # runs the self-tests
    model = share_copy(loaded.model)
    report = quantize_target(model, weights, group_size)
    made = loaded.with_model(model)
    return replace(made, reference=own_reference(made), name=f"{loaded.name}-{weights}"), report
