"""Further families, see `table`: later ones of the table of `hf.vision`, and some that have no row there."""

from collections.abc import Mapping

from tests.vision.table import (
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


def _glm(which: str, processor: str, image: str) -> Family:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2], "partial_rotary_factor": 1.0}
    return Family(
        which,
        processor,
        image,
        _GLM_WORDS,
        "<|begin_of_image|><|image|><|end_of_image|>",
        {**mrope("glm4v_text"), "rope_parameters": rope},
        {**QWEN_TOWER, "model_type": "glm4v_vision", "image_size": SIDE}
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
    "glm4v": _glm("glm4v", "Glm4vProcessor", "Glm4vImageProcessor"),
    "glm46v": _glm("glm46v", "Glm46VProcessor", "Glm46VImageProcessor"),
    "qwen3_vl_moe": qwen(
        "qwen3_vl_moe",
        "Qwen3VLProcessor",
        QWEN3_TOWER,
        interleaved=True,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
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
        {"model_type": "granite4_vision_text"},
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
USUAL = ("glm4v", "aya_vision", "gemma4", "granite4_vision", "ovis2")
"""Those that are tested by default: each has what no other has."""
