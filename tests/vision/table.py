"""What the tiny models of each family are made of: options for configs, image processors and processors."""

from collections.abc import Mapping
from dataclasses import dataclass, field

SIDE = 32  # of what the tower sees at once, in pixels
VOCAB = 160  # rows of the output head; PaliGemma's processor adds 1152 names of places

TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 8,
}
SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
QWEN_TOWER = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN3_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 32,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}
QWEN_PIXELS = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 16 * 16, "longest_edge": 40 * 40}}
_QWEN_WORDS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TILES = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
IDEFICS_WORDS = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", "<video>"]
IDEFICS_WORDS += [f"<row_{i}_col_{j}>" for i in (1, 2, 3) for j in (1, 2, 3)]
_SPLIT = {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}


@dataclass(frozen=True)
class Family:
    """How one family is built.

    words: special tokens. named: those that the processor asks the tokenizer for by name. image: what the chat
    template writes for an image. ids: keys of the config that hold a token's id. text, tower, config, pixels,
    processor: options. takes_video: the processor wants a processor of videos beside. needs: a module that it imports.
    takes_audio: it wants Gemma 4's of sounds.
    """

    model_type: str
    processor_class: str
    image_class: str
    words: list[str]
    image: str
    text: Mapping[str, object]
    tower: Mapping[str, object]
    ids: Mapping[str, str]
    named: Mapping[str, str] = field(default_factory=dict[str, str])
    config: Mapping[str, object] = field(default_factory=dict[str, object])
    pixels: Mapping[str, object] = field(default_factory=dict[str, object])
    processor: Mapping[str, object] = field(default_factory=dict[str, object])
    takes_video: bool = False
    vocab: int = VOCAB
    needs: str | None = None
    takes_audio: bool = False


def mrope(model_type: str, interleaved: bool = False) -> dict[str, object]:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
    rope |= {"mrope_interleaved": True} if interleaved else {}
    return {"model_type": model_type, "num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": rope}


IMAGE_INDEX = {"image_token_index": "<image>"}
_QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def qwen(which: str, processor: str, tower: Mapping[str, object], interleaved: bool = False, **text: int) -> Family:
    return Family(
        which,
        processor,
        "Qwen2VLImageProcessor",
        _QWEN_WORDS,
        _QWEN_IMAGE,
        {**mrope(which + "_text", interleaved), **({"head_dim": 16} if interleaved else {}), **text},
        {**QWEN_TOWER, "model_type": which + "_vision", **tower},
        _QWEN_IDS,
        pixels=QWEN_PIXELS,
        takes_video=True,
    )


def _idefics(which: str, processor: str, image: str, needs: str | None) -> Family:
    return Family(
        which,
        processor,
        image,
        IDEFICS_WORDS,
        "<image>",
        {"model_type": "llama"},
        {**TOWER, "model_type": which + "_vision"},
        {"image_token_id": "<image>"},
        config={"scale_factor": 2},
        pixels=_SPLIT,
        processor={"image_seq_len": 4},
        takes_video=needs is not None,
        needs=needs,
    )


FAMILIES: dict[str, Family] = {
    "llava": Family(
        "llava",
        "LlavaProcessor",
        "CLIPImageProcessor",
        ["<image>"],
        "<image>",
        {"model_type": "llama"},
        {**TOWER, "model_type": "clip_vision_model"},
        IMAGE_INDEX,
        pixels={"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}},
        processor={"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_next": Family(
        "llava_next",
        "LlavaNextProcessor",
        "LlavaNextImageProcessor",
        ["<image>"],
        "<image>",
        {"model_type": "mistral", "sliding_window": None},
        {**TOWER, "model_type": "clip_vision_model", "patch_size": 16},
        IMAGE_INDEX,
        config={"image_grid_pinpoints": TILES},
        pixels={
            "size": {"shortest_edge": SIDE},
            "crop_size": {"height": SIDE, "width": SIDE},
            "image_grid_pinpoints": TILES,
        },
        processor={"patch_size": 16, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_onevision": Family(
        "llava_onevision",
        "LlavaOnevisionProcessor",
        "LlavaOnevisionImageProcessor",
        ["<image>", "<video>"],
        "<image>",
        {"model_type": "qwen2"},
        {**SIGLIP, "patch_size": 16},
        {"image_token_index": "<image>", "video_token_index": "<video>"},
        config={"image_grid_pinpoints": TILES},
        pixels={"size": {"height": SIDE, "width": SIDE}, "image_grid_pinpoints": TILES},
        processor={"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
        takes_video=True,
    ),
    "qwen2_vl": qwen("qwen2_vl", "Qwen2VLProcessor", {"embed_dim": 32, "hidden_size": 32}),
    "qwen2_5_vl": qwen(
        "qwen2_5_vl",
        "Qwen2_5_VLProcessor",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    ),
    "qwen3_vl": qwen("qwen3_vl", "Qwen3VLProcessor", QWEN3_TOWER, interleaved=True),
    "smolvlm": _idefics("smolvlm", "SmolVLMProcessor", "SmolVLMImageProcessor", "num2words"),
    "idefics3": _idefics("idefics3", "Idefics3Processor", "Idefics3ImageProcessor", None),
    "internvl": Family(
        "internvl",
        "InternVLProcessor",
        "GotOcr2ImageProcessor",
        ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"],
        "<IMG_CONTEXT>",
        {"model_type": "qwen2"},
        {**TOWER, "model_type": "internvl_vision", "image_size": [SIDE, SIDE], "patch_size": [8, 8]},
        {"image_token_id": "<IMG_CONTEXT>"},
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        config={"image_seq_length": 4, "tie_word_embeddings": False},
        pixels={"size": {"height": SIDE, "width": SIDE}, "min_patches": 1, "max_patches": 3},
        processor={"image_seq_length": 4},
        takes_video=True,
    ),
    "gemma3": Family(
        "gemma3",
        "Gemma3Processor",
        "Gemma3ImageProcessor",
        ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
        "<start_of_image>",
        {
            "model_type": "gemma3_text",
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 24,  # longer than an image, shorter than two
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {**SIGLIP, "patch_size": 4},
        {
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        named={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        config={"mm_tokens_per_image": 16, "tie_word_embeddings": False},
        pixels={"size": {"height": SIDE, "width": SIDE}},
        processor={"image_seq_length": 16},
    ),
    "paligemma": Family(
        "paligemma",
        "PaliGemmaProcessor",
        "SiglipImageProcessor",
        ["<image>"],
        "<image>",
        {"model_type": "gemma", "head_dim": 8},
        SIGLIP,
        IMAGE_INDEX,
        config={"projection_dim": 32, "hidden_size": 32, "tie_word_embeddings": False},
        pixels={"size": {"height": SIDE, "width": SIDE}, "image_seq_length": 16},
        vocab=1280,
    ),
}
"""Eleven families; Qwen's positions have three axes, Gemma-3 and PaliGemma look both ways."""
