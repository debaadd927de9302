"""Further families, see `table`: later ones of the table of `hf.vision`, and some that have no row there."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.tiny import DELTA
from tests.vision.table import (
    IDEFICS_WORDS,
    IMAGE_INDEX,
    QWEN3_TOWER,
    QWEN_PIXELS,
    QWEN_TOWER,
    SIDE,
    SIGLIP,
    TILES,
    TOWER,
    VOCAB,
    Family,
    mrope,
    qwen,
)

_GLM_WORDS = ["<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>"]
_GLM_WORDS += ["<|end_of_video|>"]
_COHERE = {
    "model_type": "cohere2",
    "head_dim": 8,
    "logit_scale": 1.0,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
}
_QWEN3_5_TOWER = {name: value for name, value in QWEN3_TOWER.items() if name != "deepstack_visual_indexes"}
_CONV = {"layer_types": ["conv", "full_attention"]}
_MINICPM = {"image_token": "<unk_image>", "video_token": "<unk_video>"} | {
    f"{what}_{side}_token": f"<{what}_{side}>" for what in ("image", "slice", "image_id") for side in ("start", "end")
}
_HALF = {"partial_rotary_factor": 0.5}


def _glm(which: str, version: str, text: str, tower: str, **options: int) -> Family:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2], "partial_rotary_factor": 1.0}
    return Family(
        which,
        version + "Processor",
        version + "ImageProcessor",
        _GLM_WORDS,
        "<|begin_of_image|><|image|><|end_of_image|>",
        {**mrope(text), "rope_parameters": rope, **options},
        {**QWEN_TOWER, "model_type": tower, "image_size": SIDE}
        | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32},
        {
            "image_token_id": "<|image|>",
            "video_token_id": "<|video|>",
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
            "video_start_token_id": "<|begin_of_video|>",
            "video_end_token_id": "<|end_of_video|>",
        },
        pixels=QWEN_PIXELS,
        takes_video=True,
    )


def _pixtral(which: str, processor: str, options: Mapping[str, object], **config: object) -> Family:
    words = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    return Family(
        which,
        processor,
        "PixtralImageProcessor",
        words,
        "[IMG]",
        {"model_type": "mistral", "sliding_window": None, "head_dim": 8},
        {**TOWER, "model_type": "pixtral", "image_size": 2 * SIDE},
        {"image_token_id" if which == "lighton_ocr" else "image_token_index": "[IMG]"},
        named=dict(zip(("image_token", "image_break_token", "image_end_token"), words, strict=True)),
        config={"vision_feature_layer": -1, **config},
        pixels={"size": {"longest_edge": 48}, "patch_size": {"height": 8, "width": 8}},
        processor={"patch_size": 8, **options},
        needs="torchvision",
    )


def _minicpm(version: str, ids: Mapping[str, str]) -> Family:
    rope: Any = mrope("", interleaved=True)["rope_parameters"]
    return Family(
        f"minicpmv{version}",
        f"MiniCPMV{version}Processor",
        "MiniCPMV4_6ImageProcessor",
        [*_MINICPM.values()],
        "<unk_image>",
        {"model_type": "qwen3_5_text", **DELTA, "head_dim": 32, "rope_parameters": {**rope, **_HALF}},
        {**TOWER, "model_type": f"minicpmv{version}_vision", "patch_size": 4, "insert_layer_id": 0},
        {"image_token_id": "<unk_image>", "video_token_id": "<unk_video>", **ids},
        named=_MINICPM,
        config={"insert_layer_id": 0},
        pixels={"patch_size": 4, "scale_resolution": SIDE, "max_slice_nums": 2},
        takes_video=True,
    )


def _hybrid(which: str, **text: int) -> Family:
    """Qwen3.5's: gated delta nets between layers with attention, whose positions turn half of each head."""
    made = qwen(which, "Qwen3VLProcessor", _QWEN3_5_TOWER, interleaved=True, **text)
    rope: Any = made.text["rope_parameters"]
    return replace(made, text={**made.text, **DELTA, "head_dim": 32, "rope_parameters": {**rope, **_HALF}})


MORE: dict[str, Family] = {
    "vipllava": Family(
        "vipllava",
        "LlavaProcessor",
        "CLIPImageProcessor",
        ["<image>"],
        "<image>",
        {"model_type": "llama"},
        {**TOWER, "model_type": "clip_vision_model"},
        IMAGE_INDEX,
        config={"vision_feature_layer": [-1, -2]},
        pixels={"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}},
        processor={"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "pixtral": _pixtral("llava", "PixtralProcessor", {}, vision_feature_select_strategy="full"),
    "mistral3": _pixtral("mistral3", "PixtralProcessor", {"spatial_merge_size": 2}),
    "lighton_ocr": _pixtral("lighton_ocr", "LightOnOcrProcessor", {"spatial_merge_size": 2}),
    "glm4v": _glm("glm4v", "Glm4v", "glm4v_text", "glm4v_vision"),
    "glm46v": _glm("glm46v", "Glm46V", "glm4v_text", "glm4v_vision"),
    "glm_ocr": _glm("glm_ocr", "Glm46V", "glm_ocr_text", "glm_ocr_vision", head_dim=16),
    "glm4v_moe": _glm(
        "glm4v_moe",
        "Glm4v",
        "glm4v_moe_text",
        "glm4v_moe_vision",
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    ),
    "qwen3_vl_moe": qwen(
        "qwen3_vl_moe",
        "Qwen3VLProcessor",
        QWEN3_TOWER,
        interleaved=True,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    ),
    "qwen3_5": _hybrid("qwen3_5"),
    "qwen3_5_moe": _hybrid(
        "qwen3_5_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
    ),
    "lfm3_vl": replace(
        qwen("lfm3_vl", "Lfm3VlProcessor", {}),
        text={"model_type": "lfm3", **_CONV, "use_attention_gate": False},
        tower={**TOWER, "model_type": "lfm3_vl_vision", "patch_size": 4, "num_key_value_heads": 1}
        | {"layer_types": ["conv", "full_attention"]},
        config={"projector_hidden_size": 48},
    ),
    "lfm2_vl": Family(
        "lfm2_vl",
        "Lfm2VlProcessor",
        "Lfm2VlImageProcessor",
        ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"]
        + [f"<|img_row_{i}_col_{j}|>" for i in (1, 2, 3) for j in (1, 2, 3)],
        "<image>",
        {"model_type": "lfm2", **_CONV, "block_auto_adjust_ff_dim": False},
        {**TOWER, "model_type": "siglip2_vision_model", "vision_use_head": False, "num_patches": 16},
        {"image_token_id": "<image>"},
        config={"projector_hidden_size": 48},
        pixels={"size": {"height": SIDE, "width": SIDE}, "tile_size": SIDE, "encoder_patch_size": 8, "max_tiles": 3}
        | {"min_image_tokens": 1, "max_image_tokens": 4, "max_pixels_tolerance": 1.1},
        needs="torchvision",
    ),
    "nemotron_h_omni": Family(
        "nemotron_h_omni",
        "NemotronH_Omni_Reasoning_V3Processor",
        "NemotronH_Omni_Reasoning_V3ImageProcessor",
        ["<image>", "<video>", "<so_embedding>", "<img>", "</img>"],
        "<image>",
        {"model_type": "nemotron_h", "layers_block_type": ["mamba", "attention"], "num_hidden_layers": 2}
        | {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "head_dim": 8}
        | {"time_step_min": 1e-9},  # which transformers applies to texts, and not to single tokens
        {"model_type": "radio", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
        | {"image_size": SIDE, "max_img_size": 64, "num_cls_tokens": 1, "num_registers": 1}
        | {"video_temporal_patch_size": 2},
        {"image_token_id": "<image>", "video_token_id": "<video>", "audio_token_id": "<so_embedding>"},
        config={"audio_config": None, "vision_hidden_size": 32, "projector_hidden_size": 48},
        pixels={"patch_size": 4, "min_num_patches": 16, "max_num_patches": 100},
        takes_video=True,
        takes_audio=True,
        needs="torchvision",
    ),
    "granite_docling": Family(
        "granite_docling",
        "GraniteDoclingProcessor",
        "GraniteDoclingImageProcessor",
        IDEFICS_WORDS,
        "<image>",
        {"model_type": "granite_docling_text", "attention_multiplier": 0.3},
        {**TOWER, "model_type": "granite_docling_vision", "out_hidden_size": 32, "scale_factor": 2}
        | {"deepstack_visual_indexes": [0]},
        {"image_token_id": "<image>"},
        pixels={"size": {"height": SIDE, "width": SIDE}, "max_patches": 3},
        processor={"image_seq_len": 4},
    ),
    "minicpmv4_6": _minicpm("4_6", {}),
    "minicpmv4_7": _minicpm(
        "4_7",
        {f"{what}_{side}_id": f"<{what}_{side}>" for what in ("image", "slice") for side in ("start", "end")}
        | {"newline_id": "\n"},
    ),
    "paddleocr_vl": Family(
        "paddleocr_vl",
        "PaddleOCRVLProcessor",
        "PaddleOCRVLImageProcessor",
        ["<|IMAGE_PLACEHOLDER|>", "<|video|>", "<|IMAGE_START|>", "<|IMAGE_END|>"],
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        {**mrope("paddleocr_vl_text"), "head_dim": 16},
        {**TOWER, "model_type": "paddleocr_vl_vision", "patch_size": 4},
        {"image_token_id": "<|IMAGE_PLACEHOLDER|>", "video_token_id": "<|video|>"},
        named={"image_token": "<|IMAGE_PLACEHOLDER|>"},
        pixels=QWEN_PIXELS,
    ),
    "aya_vision": Family(
        "aya_vision",
        "AyaVisionProcessor",
        "GotOcr2ImageProcessor",
        ["<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "TILE", "TILE_GLOBAL"],
        "<image>",
        _COHERE,
        SIGLIP,
        {"image_token_index": "<|IMG_PATCH|>"},
        config={"alignment_intermediate_size": 64},
        pixels={"size": {"height": SIDE, "width": SIDE}, "min_patches": 1, "max_patches": 3},
        processor={"patch_size": 8, "img_size": SIDE, "downsample_factor": 2},
    ),
    "cohere2_vision": Family(
        "cohere2_vision",
        "Cohere2VisionProcessor",
        "Cohere2VisionImageProcessor",
        ["<img>", "<boi>", "<eoi>", "<break>"],
        "<img>",
        _COHERE,
        {**SIGLIP, "patch_size": 4},
        {"image_token_id": "<img>"},
        named={"image_token": "<img>", "boi_token": "<boi>", "eoi_token": "<eoi>", "img_line_break_token": "<break>"},
        config={"alignment_intermediate_size": 64},
        pixels={"size": {"height": SIDE, "width": SIDE}, "min_patches": 1, "max_patches": 3, "patch_size": 4},
        needs="torchvision",
    ),
    "idefics2": Family(
        "idefics2",
        "Idefics2Processor",
        "Idefics2ImageProcessor",
        ["<image>", "<fake_token_around_image>", "<end_of_utterance>"],
        "<image>",
        {"model_type": "mistral", "sliding_window": None},
        {**TOWER, "model_type": "idefics2_vision"},
        {"image_token_id": "<image>"},
        config={
            "perceiver_config": {
                "hidden_size": 32,
                "resampler_n_latents": 8,
                "resampler_depth": 1,
                "resampler_n_heads": 4,
                "resampler_head_dim": 8,
                "num_key_value_heads": 2,
            }
        },
        pixels={"size": {"shortest_edge": 16, "longest_edge": SIDE}, "do_image_splitting": False},
        processor={"image_seq_len": 8},
    ),
    "gemma4": Family(
        "gemma4",
        "Gemma4Processor",
        "Gemma4ImageProcessor",
        ["<img>", "<boi>", "<eoi>", "<audio>", "<boa>", "<eoa>"],
        "<img>",
        {
            "model_type": "gemma4_text",
            "head_dim": 8,
            "global_head_dim": 8,
            "sliding_window": 80,  # longer than an image, shorter than two
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "use_bidirectional_attention": "vision",
        },
        {**TOWER, "model_type": "gemma4_vision", "head_dim": 16, "num_key_value_heads": 2, "patch_size": 4}
        | {"pooling_kernel_size": 2, "position_embedding_size": 256},
        {"image_token_id": "<img>", "boi_token_id": "<boi>", "eoi_token_id": "<eoi>"},
        named={
            "image_token": "<img>",
            "boi_token": "<boi>",
            "eoi_token": "<eoi>",
            "audio_token": "<audio>",
            "boa_token": "<boa>",
            "eoa_token": "<eoa>",
        },
        config={"audio_config": None},
        pixels={"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        takes_audio=True,
    ),
    "granite4_vision": Family(
        "granite4_vision",
        "Granite4VisionProcessor",
        "LlavaNextImageProcessor",
        ["<image>"],
        "<image>",
        {"model_type": "granite4_vision_text", "logits_scaling": 2.0},
        {**SIGLIP, "hidden_size": 64, "patch_size": 4},  # its query transformer has heads of 64
        IMAGE_INDEX,
        config={
            "image_grid_pinpoints": TILES,
            "downsample_rate": "2/4",
            "deepstack_layer_map": [[-2, 0], [-1, 1]],
            "vision_feature_select_strategy": "full",
            "qformer_config": {"intermediate_size": 48, "num_hidden_layers": 1, "use_qformer_text_input": False}
            | {"model_type": "blip_2_qformer", "cross_attention_frequency": 1},
        },
        pixels={
            "size": {"shortest_edge": SIDE},
            "crop_size": {"height": SIDE, "width": SIDE},
            "image_grid_pinpoints": TILES,
        },
        processor={"patch_size": 4, "vision_feature_select_strategy": "full", "downsample_rate": "2/4"},
    ),
    "exaone4_5": Family(
        "exaone4_5",
        "Exaone4_5_Processor",
        "Qwen2VLImageProcessor",
        ["<|image_pad|>", "<|video_pad|>", "<vision>", "</vision>"],
        "<vision><|image_pad|></vision>",
        {"model_type": "exaone4", "head_dim": 8, "sliding_window": 24}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        {**QWEN_TOWER, "model_type": "exaone4_5_vision", "hidden_size": 32, "intermediate_size": 48}
        | {"out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1], "num_key_value_heads": 2},
        {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
        pixels=QWEN_PIXELS,
        takes_video=True,
    ),
    "hunyuan_vl": Family(
        "hunyuan_vl",
        "HunYuanVLProcessor",
        "HunYuanVLImageProcessor",
        ["<image>", "<begin>", "<end>", "<newline>"],
        "<begin><image><end>",
        {**mrope("hunyuan_vl_text"), "head_dim": 16}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 2, 2, 2]}},
        {**TOWER, "model_type": "hunyuan_vl_vision", "patch_size": 4, "out_hidden_size": 32, "text_hidden_size": 32}
        | {"max_image_size": 64, "min_image_size": 16},
        {"image_token_id": "<image>", "im_start_id": "<begin>", "im_end_id": "<end>", "im_newline_id": "<newline>"},
        named={"image_token": "<image>", "image_start_token": "<begin>", "image_end_token": "<end>"},
        pixels={"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 1600}},
    ),
    "deepseek_vl": Family(
        "deepseek_vl",
        "DeepseekVLProcessor",
        "DeepseekVLImageProcessor",
        ["<image>"],
        "<image>",
        {"model_type": "llama"},
        SIGLIP,
        {"image_token_id": "<image>"},
        named={"image_token": "<image>"},
        pixels={"size": {"height": SIDE, "width": SIDE}},
        processor={"num_image_tokens": 16},
    ),
    "video_llama_3": Family(
        "video_llama_3",
        "VideoLlama3Processor",
        "VideoLlama3ImageProcessor",
        ["<|image_pad|>", "<|video_pad|>"],
        "<|image_pad|>",
        {"model_type": "qwen2"},
        {**TOWER, "model_type": "video_llama_3_vision", "patch_size": 4},
        {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
        pixels={"patch_size": 4, "merge_size": 2, "min_pixels": 256, "max_pixels": 1600},
        takes_video=True,
    ),
    "ovis2": Family(
        "ovis2",
        "Ovis2Processor",
        "Ovis2ImageProcessor",
        ["<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>", "<image>"],
        "<image>",
        {"model_type": "qwen2"},
        {**TOWER, "model_type": "ovis2_vision", "vocab_size": 64, "hidden_stride": 2},
        {"image_token_id": "<IMG_ATOM>"},
        config={"hidden_size": 32, "vocab_size": VOCAB, "visual_indicator_token_ids": [*range(100, 105)]},
        pixels={"size": {"height": SIDE, "width": SIDE}},
        processor={"image_seq_length": 4},
    ),
}
USUAL = ("glm4v", "qwen3_5", "minicpmv4_7", "aya_vision", "gemma4", "granite4_vision", "ovis2")
"""Those that are tested by default: each has what no other has."""
