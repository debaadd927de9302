"""Tiny configurations of transformers' architectures, made from their classes by the names of what they count."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

WIDTH, HEADS, HEAD_DIM, MOST_LAYERS = 128, 4, 32, 16
SIZES = {  # of whole numbers, by the first pattern that matches a name; None: left as it is
    r".*(image|patch|window|input|frame)\w*size|.*position.*|n_ctx|n_positions|rope_theta|.*sampl\w+_rate": None,
    r"(\w+_)?vocab(ulary)?_size\w*": 320,
    r".*(sliding_window|attention_chunk_size)(_size)?": 4,
    r"index_topk": 16,
    r".*(experts|expert_num)": 4,
    r".*(per_tok(en)?|top_?k|moe_k)": 2,
    r"n_group|topk_group|num_expert_group": 1,
    r".*(head_?dim|head_size|d_head|d_kv|kv_channels|rotary_dim)": HEAD_DIM,
    r"(mamba_num|mamba_n|n_mamba)_heads": 2 * WIDTH // HEAD_DIM,
    r".*(kv|key_value)_heads|.*num_query_groups|multi_query_group_num": 2,
    r".*(heads?|nheads)": HEADS,
    r"(num_|n_)?(\w+_)?(layers?|depth|blocks)": 2,
    r".*": WIDTH,
}
"""A number is only ever made smaller."""
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
_DOUBLE = {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * WIDTH // HEADS}
SPECIAL: dict[str, dict[str, Any]] = {
    "apertus1p5": {"image_token_offset": 64, "audio_token_offset": 192},
    "bamba": {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": WIDTH},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_audio_encoder": {"adapter_input_size": WIDTH},
    "dots3_note_vision_encoder": {"num_hidden_layers": 2, "pyramid_num_routed": [-1, 4]},
    "emu3": {"vocabulary_map": {"<image>": 5}, "pad_token_id": 0},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_ROPE, "mrope_section": [6, 6, 4]}},
    "falcon_h1": {"mamba_d_ssm": 2 * WIDTH, "mamba_d_head": HEAD_DIM},
    "gemma3n_text": {"num_hidden_layers": 7},
    "gemma4_text": {"global_head_dim": 2 * HEAD_DIM},
    "gemma4_unified_text": {"global_head_dim": 2 * HEAD_DIM},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [0, 1], "downsample_rate": "4/8"},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "num_hidden_layers": 2},
    "longcat_flash": {"qk_head_dim": 2 * HEAD_DIM},
    "mamba2": {"num_heads": 8},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": HEAD_DIM, "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [64, 64]},
    "zamba": {"num_hidden_layers": 12, **_DOUBLE},
    "zamba2": _DOUBLE,
}  # fmt: skip
"""What else an architecture needs."""
AXES = {
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "paddleocr_vl_text"), (16, 24, 24)),
    **dict.fromkeys(("glm4v_text", "glm4v_moe_text", "glm_ocr_text"), (8, 12, 12)),
}
"""How the rotated part of a head is divided where only the modelling code says it."""
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "layers_num_experts")
_OPEN = "allow_global_per_layer_attribute_access"  # else options that differ by layer cannot be read
_MADE = ("model_type", "transformers_version", "architectures", "dtype", "per_layer_config", _OPEN)
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def default_config(model_type: str) -> PretrainedConfig:
    """What the class of a model_type makes without options."""
    return CONFIG_MAPPING[model_type]()


def shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """A copy with small numbers, and the fewest layers that are of all kinds which it has.

    The class of the config derives what it is not given.
    """
    setattr(config, _OPEN, True)
    special = SPECIAL.get(config.model_type, {})
    names = [name for name in config.to_diff_dict() if name not in _MADE and hasattr(config, name)]
    given = {name: getattr(config, name) for name in names}
    parts = {name: shrunk(part) for name, part in vars(config).items() if isinstance(part, PretrainedConfig)}
    wanted, last = _kinds(config), None
    for layers in range(special.get("num_hidden_layers", 2), MOST_LAYERS):
        try:
            made = type(config)(**{**given, **dict(_changed(config, layers)), **parts, **special})
        except Exception as error:
            last = error
            continue
        if all(have >= want for have, want in zip(_kinds(made), wanted, strict=True)):
            return made
    raise last or ValueError(f"{config.model_type}: {MOST_LAYERS} layers do not have {wanted} kinds")


def _kinds(config: PretrainedConfig) -> list[int]:
    """How many kinds of layers it has in each regard."""
    return [len(set(getattr(config, name, None) or ())) for name in _KINDS]


def _changed(config: Any, layers: int) -> Iterator[tuple[str, Any]]:
    """The options that are other than the default."""
    count = next((value for name in _LAYERS if isinstance(value := getattr(config, name, None), int)), 0)
    heads, own_axes = getattr(config, "num_attention_heads", None), AXES.get(config.model_type)
    for number, (name, value) in enumerate(vars(config).items(), 3):
        if name.startswith("_") or isinstance(value, bool | PretrainedConfig):
            continue
        if re.fullmatch(r".*token_(id|index)", name) and (value is not None or name == "image_token_id"):
            yield name, _IDS.get(name, number)
        elif name in ("head_dim", "num_key_value_heads") and (value is None or value == heads):
            yield name, HEAD_DIM if name == "head_dim" else HEADS
        elif name == "rope_parameters" and value and (axes := value.get("mrope_section") or own_axes):
            old = getattr(config, "qk_rope_head_dim", None) or getattr(config, "head_dim", None)
            factor = HEAD_DIM / (old or config.hidden_size // heads)
            yield name, {**value, "mrope_section": _scaled(axes, factor)}
        elif name in _LAYERS:
            yield name, layers
        elif isinstance(value, list) and len(value) == count > 2:
            yield name, [_small(name, one) for one in value[:layers]]
        elif isinstance(value, int):
            yield name, _small(name, value)


def _small(name: str, value: Any) -> Any:
    """A number of this name, or a smaller one."""
    size = next(size for pattern, size in SIZES.items() if re.fullmatch(pattern, name))
    return size if isinstance(value, int) and size is not None and value > size else value


def _scaled(parts: Sequence[int], factor: float) -> list[int]:
    """Smaller numbers of about the same proportions."""
    total, (_, *rest) = round(sum(parts) * factor), [int(part * factor) for part in parts]
    return [total - sum(rest), *rest]
