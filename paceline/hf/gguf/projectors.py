"""The projectors of llama.cpp's mmproj files, and how each becomes a family of transformers.

clip.vision.*     the tower: sizes, and how an image becomes pixels
v.*, v.blk.i.*    its tensors           mm.*     those of the projector
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from ...schema import Positive

Said: TypeAlias = Mapping[str, Any]
_SIZE = Annotated[int, Field(ge=1, le=1 << 20)]
_COLOURS = Annotated[list[float], Field(min_length=3, max_length=3)]
ENTRIES: Mapping[str, Any] = {
    "image_size": _SIZE,
    "patch_size": _SIZE,
    "embedding_length": _SIZE,
    "feed_forward_length": _SIZE,
    "projection_dim": _SIZE,
    "block_count": _SIZE,
    "attention.head_count": _SIZE,
    "attention.layer_norm_epsilon": Positive,
    "image_mean": _COLOURS,
    "image_std": _COLOURS,
    "projector.scale_factor": _SIZE,
    "preproc_image_size": _SIZE,
    "preproc_min_tiles": _SIZE,
    "preproc_max_tiles": _SIZE,
    "image_min_pixels": _SIZE,
    "image_max_pixels": _SIZE,
    "spatial_merge_size": _SIZE,
    "window_size": _SIZE,
    "n_wa_pattern": _SIZE,
}
OPTIONAL = set(list(ENTRIES)[10:]) | {"image_size"}
PREFIX, TYPES = "clip.vision.", ("clip.projector_type", "clip.vision.projector_type")
GELU, SILU = "clip.use_gelu", "clip.use_silu"
PLAIN: Mapping[str, tuple[object, ...]] = {
    "clip.has_vision_encoder": (True,),
    "clip.has_text_encoder": (False,),
    "clip.has_audio_encoder": (False,),
    "clip.has_llava_projector": (True, False),
    "clip.vision.mm_patch_merge_type": ("flat",),
    "clip.vision.feature_layer": ([],),
}
"""Entries, and the values with which they change nothing here."""
_DEFAULT = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_CLIP = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_INTERN = {
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "attn_out": "attention.projection_layer",
    "ln1": "layernorm_before",
    "ln2": "layernorm_after",
    "ls1": "lambda_1",
    "ls2": "lambda_2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_QWEN = {"attn_qkv": "attn.qkv", "attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2"}
_QWEN_WHOLE = {"v.patch_embd": "patch_embed.proj", "v.post_ln": "merger.ln_q"}
_QWEN_WHOLE |= {"mm.0": "merger.mlp.0", "mm.2": "merger.mlp.2"}
_QWEN_TOKENS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
_QWEN_TOKENS |= {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
_SIGLIP = {
    "v.patch_embd": "vision_tower.embeddings.patch_embedding",
    "v.position_embd": "vision_tower.embeddings.position_embedding",
    "v.post_ln": "vision_tower.post_layernorm",
}


@dataclass(frozen=True)
class Projector:
    """How files of one kind of projector become a model of a family.

    text: the architectures of the text model. tower: where the names of `whole` and layers begin; layers: of those.
    parts: of a layer. plus_one: a norm that holds 1 + its weight. tokens: that the config or processor names.
    config: of the vision tower, and of the whole model, from what the file says. pixels: the image processor's class
    and its options. processor: the class of the processor, and its options. acts: the activations it may have, as the
    file says. out: the matrix whose outputs replace embeddings.
    """

    model_type: str
    text: tuple[str, ...]
    layers: str
    parts: Mapping[str, str]
    whole: Mapping[str, str]
    tokens: Mapping[str, str]
    config: Callable[[Said], tuple[dict[str, Any], dict[str, Any]]]
    pixels: Callable[[Said], tuple[str, dict[str, Any]]]
    processor: Callable[[Said], tuple[str, dict[str, Any]]]
    tower: str = ""
    plus_one: str = ""
    acts: tuple[str, ...] = ("gelu",)
    out: str = "mm.2.weight"


def _side(about: Said) -> int:
    """Patches along a side of an image."""
    return about["image_size"] // about["patch_size"]


def _merged(about: Said, usual: int) -> int:
    """Tokens of an image, of which the projector makes one of a square of patches."""
    return (_side(about) // about.get("projector.scale_factor", usual)) ** 2


def _vit(kind: str, about: Said) -> dict[str, Any]:
    """The settings that towers of the plain form have."""
    return {
        "model_type": kind,
        "hidden_size": about["embedding_length"],
        "intermediate_size": about["feed_forward_length"],
        "num_hidden_layers": about["block_count"],
        "num_attention_heads": about["attention.head_count"],
        "layer_norm_eps": about["attention.layer_norm_epsilon"],
        "image_size": about["image_size"],
        "patch_size": about["patch_size"],
    }


def _llava(about: Said) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last layer of the tower, which no projector reads, is not in the file."""
    whole: dict[str, Any] = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
    whole["image_seq_length"] = _side(about) ** 2
    return {**_vit("clip_vision_model", about), "hidden_act": about["act"]}, whole


def _gemma3(about: Said) -> tuple[dict[str, Any], dict[str, Any]]:
    return {**_vit("siglip_vision_model", about), "vision_use_head": False}, {"mm_tokens_per_image": _merged(about, 4)}


def _idefics3(about: Said) -> tuple[dict[str, Any], dict[str, Any]]:
    return _vit("idefics3_vision", about), {"scale_factor": about.get("projector.scale_factor", 2)}


def _internvl(about: Said) -> tuple[dict[str, Any], dict[str, Any]]:
    names, size = about["names"], [about["image_size"]] * 2
    vision = {
        **_vit("internvl_vision", about),
        "image_size": size,
        "patch_size": [about["patch_size"]] * 2,
        "hidden_act": about["act"],
        "attention_bias": "v.blk.0.attn_q.bias" in names,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in names,
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in names else "rms_norm",
    }
    scale = about.get("projector.scale_factor", 2)
    return vision, {"downsample_ratio": 1 / scale, "image_seq_length": _merged(about, 2)}


def _qwen(about: Said, kind: str) -> dict[str, Any]:
    return {
        "model_type": kind,
        "depth": about["block_count"],
        "num_heads": about["attention.head_count"],
        "patch_size": about["patch_size"],
        "spatial_merge_size": about.get("spatial_merge_size", 2),
        "temporal_patch_size": 2,
    }


def _qwen2(about: Said) -> tuple[dict[str, Any], dict[str, Any]]:
    width, inner = about["embedding_length"], max(about["names"]["v.blk.0.ffn_up.weight"])
    vision = {"embed_dim": width, "hidden_size": about["projection_dim"], "mlp_ratio": inner // width}
    return {**_qwen(about, "qwen2_vl_vision"), **vision}, {}


def _qwen2_5(about: Said) -> tuple[dict[str, Any], dict[str, Any]]:
    every, layers = about.get("n_wa_pattern", 8), range(about["block_count"])
    vision = {
        "hidden_size": about["embedding_length"],
        "intermediate_size": about["feed_forward_length"],
        "out_hidden_size": about["projection_dim"],
        "window_size": about.get("window_size", 112),
        "fullatt_block_indexes": [layer for layer in layers if (layer + 1) % every == 0],
    }
    return {**_qwen(about, "qwen2_5_vl_vision"), **vision}, {}


def _square(about: Said) -> dict[str, Any]:
    return {"size": {"height": about["image_size"], "width": about["image_size"]}}


def _qwen_pixels(about: Said) -> tuple[str, dict[str, Any]]:
    least, most = about.get("image_min_pixels", 56 * 56), about.get("image_max_pixels", 16384 * 28 * 28)
    sizes = {"patch_size": about["patch_size"], "merge_size": about.get("spatial_merge_size", 2)}
    return "Qwen2VLImageProcessor", {**sizes, "size": {"shortest_edge": least, "longest_edge": most}}


def _clip_pixels(about: Said) -> tuple[str, dict[str, Any]]:
    size = about["image_size"]
    return "CLIPImageProcessor", {"size": {"shortest_edge": size}, "crop_size": {"height": size, "width": size}}


def _idefics_pixels(about: Said) -> tuple[str, dict[str, Any]]:
    longest = about.get("preproc_image_size", 4 * about["image_size"])  # as all published ones have
    sizes = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": about["image_size"]}}
    return "Idefics3ImageProcessor", sizes


def _intern_pixels(about: Said) -> tuple[str, dict[str, Any]]:
    tiles = {"min_patches": about.get("preproc_min_tiles", 1), "max_patches": about.get("preproc_max_tiles", 12)}
    return "GotOcr2ImageProcessor", {**_square(about), **tiles}


PROJECTORS: Mapping[str, Projector] = {
    "mlp": Projector(
        "llava",
        ("llama",),
        "vision_tower.encoder.layers",
        _CLIP,
        {
            **_SIGLIP,
            "v.class_embd": "vision_tower.embeddings.class_embedding",
            "v.pre_ln": "vision_tower.pre_layrnorm",
            "mm.0": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
        },
        {"image_token": "<image>"},
        _llava,
        _clip_pixels,
        lambda about: ("LlavaProcessor", {**_DEFAULT, "patch_size": about["patch_size"]}),
        acts=("gelu", "silu", "quick_gelu"),
    ),
    "gemma3": Projector(
        "gemma3",
        ("gemma3",),
        "vision_tower.encoder.layers",
        _CLIP,
        {
            **_SIGLIP,
            "mm.input_projection": "multi_modal_projector.mm_input_projection",
            "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
        },
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        _gemma3,
        lambda about: ("Gemma3ImageProcessor", _square(about)),
        lambda about: ("Gemma3Processor", {"image_seq_length": _merged(about, 4)}),
        out="mm.input_projection.weight",
        plus_one="mm.soft_emb_norm.weight",
    ),
    "idefics3": Projector(
        "idefics3",
        ("llama",),
        "vision_model.encoder.layers",
        _CLIP,
        {name: ours.replace("vision_tower", "vision_model") for name, ours in _SIGLIP.items()}
        | {"mm.model.fc": "connector.modality_projection.proj"},
        {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>"}
        | {"end_of_utterance_token": "<end_of_utterance>", "global_image_token": "<global-img>"},
        _idefics3,
        _idefics_pixels,
        lambda about: ("Idefics3Processor", {"image_seq_len": _merged(about, 2)}),
        out="mm.model.fc.weight",
    ),
    "internvl": Projector(
        "internvl",
        ("qwen2", "qwen3", "llama"),
        "vision_tower.encoder.layer",
        _INTERN,
        {
            "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
            "v.position_embd": "vision_tower.embeddings.position_embeddings",
            "v.class_embd": "vision_tower.embeddings.cls_token",
            "mm.model.mlp.0": "multi_modal_projector.layer_norm",
            "mm.model.mlp.1": "multi_modal_projector.linear_1",
            "mm.model.mlp.3": "multi_modal_projector.linear_2",
        },
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"},
        _internvl,
        _intern_pixels,
        lambda about: ("InternVLProcessor", {"image_seq_length": _merged(about, 2)}),
        acts=("gelu", "silu"),
        out="mm.model.mlp.3.weight",
    ),
    "qwen2vl_merger": Projector(
        "qwen2_vl",
        ("qwen2vl",),
        "visual.blocks",
        {**_QWEN, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        _QWEN_WHOLE,
        _QWEN_TOKENS,
        _qwen2,
        _qwen_pixels,
        lambda _: ("Qwen2VLProcessor", {}),
        acts=("quick_gelu",),
        tower="visual.",
    ),
    "qwen2.5vl_merger": Projector(
        "qwen2_5_vl",
        ("qwen2vl",),
        "visual.blocks",
        {**_QWEN, "ffn_up": "mlp.up_proj", "ffn_gate": "mlp.gate_proj", "ffn_down": "mlp.down_proj"},
        _QWEN_WHOLE,
        _QWEN_TOKENS,
        _qwen2_5,
        _qwen_pixels,
        lambda _: ("Qwen2_5_VLProcessor", {}),
        acts=("silu",),
        tower="visual.",
    ),
}
"""By llama.cpp's name of the projector."""
IDS = {
    "image_token": "image_token_id",
    "context_image_token": "image_token_id",
    "video_token": "video_token_id",
    "vision_start_token": "vision_start_token_id",
    "vision_end_token": "vision_end_token_id",
    "boi_token": "boi_token_index",
    "eoi_token": "eoi_token_index",
}
"""What the config calls the ids of tokens; llava's and gemma3's aliases are set by transformers."""
