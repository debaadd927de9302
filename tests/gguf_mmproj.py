"""Tiny vision-language models as two GGUF files, as llama.cpp's converter writes them.

The names are those of the package `gguf`, which lists them for the checkpoints' older names.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map
from transformers import PreTrainedModel, ProcessorMixin

from paceline.hf.halves import text_half
from tests.gguf_files import add_entry, finish, write_gguf

ARCHITECTURES = {
    "llava": "llama",
    "gemma3": "gemma3",
    "idefics3": "llama",
    "internvl": "qwen2",
    "qwen2_vl": "qwen2vl",
    "qwen2_5_vl": "qwen2vl",
}
"""llama.cpp's name of the text model of each family that is written."""
_TYPES = {
    "llava": "mlp",
    "gemma3": "gemma3",
    "idefics3": "idefics3",
    "internvl": "internvl",
    "qwen2_vl": "qwen2vl_merger",
    "qwen2_5_vl": "qwen2.5vl_merger",
}
_OLD = {
    "model.vision_tower.encoder.layers": "vision_tower.vision_model.encoder.layers",
    "model.vision_tower.embeddings": "vision_tower.vision_model.embeddings",
    "model.vision_tower.post_layernorm": "vision_tower.vision_model.post_layernorm",
    "model.vision_tower.pre_layrnorm": "vision_tower.vision_model.pre_layrnorm",
    "model.visual": "visual",
    "model.multi_modal_projector": "multi_modal_projector",
}
_INTERN = {"cls_token": "v.class_embd", "position_embeddings": "v.position_embd.weight"}
_INTERN_MM = {"layer_norm": "mm.model.mlp.0", "linear_1": "mm.model.mlp.1", "linear_2": "mm.model.mlp.3"}
_MM = {"multi_modal_projector.linear_1": "mm.0", "multi_modal_projector.linear_2": "mm.2"}


def write_pair(
    folder: Path, name: str, model: PreTrainedModel, processor: ProcessorMixin, quantized: str | None = None
) -> tuple[Path, Path]:
    """The text model and the projector of a tiny model of `tests.vision.families`. Each character is a token.

    quantized: the format of the text model's matrices.
    """
    ids = processor.tokenizer.get_vocab()
    tokens = [""] * len(ids)
    for token, place in ids.items():
        tokens[place] = {" ": "Ġ", "\n": "Ċ"}.get(token, token)
    special = set(processor.tokenizer.added_tokens_encoder) | set(processor.tokenizer.all_special_tokens)
    kinds = [3 if token in special else 1 for token in tokens]
    more: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    more |= {"tokenizer.ggml.merges": None, "tokenizer.chat_template": processor.chat_template}
    more |= {f"tokenizer.ggml.{role}_token_id": None for role in ("unknown", "bos")}
    more["tokenizer.ggml.padding_token_id"] = 0
    half, architecture = text_half(model), ARCHITECTURES[name]
    if architecture == "qwen2vl":
        more["qwen2vl.rope.dimension_sections"] = [*half.config.rope_parameters["mrope_section"], 0]
    text = write_gguf(folder / "text.gguf", half, architecture, quantized, more)
    return text, write_mmproj(folder / "mmproj.gguf", name, model, processor)


def write_mmproj(
    path: Path, name: str, model: PreTrainedModel, processor: ProcessorMixin, more: Mapping[str, Any] | None = None
) -> Path:
    """more: metadata that is added, or replaced; None: left out."""
    config, pixels = model.config, processor.image_processor
    vision = config.vision_config
    size = vision.image_size if hasattr(vision, "image_size") else 32
    layers = getattr(vision, "depth", None) or vision.num_hidden_layers
    width = getattr(vision, "embed_dim", None) or vision.hidden_size
    about: dict[str, Any] = {
        "clip.projector_type": _TYPES[name],
        "clip.has_vision_encoder": True,
        "clip.use_gelu": name in ("gemma3", "idefics3", "internvl"),
        "clip.use_silu": name == "qwen2_5_vl",
        "clip.vision.image_size": size if isinstance(size, int) else size[0],
        "clip.vision.patch_size": vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0],
        "clip.vision.embedding_length": width,
        "clip.vision.feed_forward_length": getattr(vision, "intermediate_size", None) or vision.hidden_size,
        "clip.vision.projection_dim": config.text_config.hidden_size,
        "clip.vision.block_count": layers - 1 if name == "llava" else layers,
        "clip.vision.attention.head_count": getattr(vision, "num_heads", None) or vision.num_attention_heads,
        "clip.vision.attention.layer_norm_epsilon": getattr(vision, "layer_norm_eps", 1e-6),
        "clip.vision.image_mean": [float(one) for one in pixels.image_mean],
        "clip.vision.image_std": [float(one) for one in pixels.image_std],
    }
    if name in ("idefics3", "internvl"):
        about["clip.vision.projector.scale_factor"] = 2
    if name == "gemma3":
        about["clip.vision.projector.scale_factor"] = size // vision.patch_size // 4
    if name == "idefics3":
        about["clip.vision.preproc_image_size"] = pixels.size["longest_edge"]
    if name == "internvl":
        about["clip.vision.preproc_min_tiles"] = pixels.min_patches
        about["clip.vision.preproc_max_tiles"] = pixels.max_patches
    if name.startswith("qwen"):
        about["clip.vision.image_min_pixels"] = pixels.size["shortest_edge"]
        about["clip.vision.image_max_pixels"] = pixels.size["longest_edge"]
    if name == "qwen2_5_vl":
        about |= {"clip.vision.n_wa_pattern": 2, "clip.vision.window_size": vision.window_size}
    writer = GGUFWriter(path, "clip")
    for key, value in {**about, **(more or {})}.items():
        if value is not None:
            add_entry(writer, key, value)
    for key, tensor in mmproj_tensors(name, model).items():
        writer.add_tensor(key, tensor.contiguous().numpy())
    return finish(writer, path)


def mmproj_tensors(name: str, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Tower and projector by their names in the file."""
    names, found = get_tensor_name_map(MODEL_ARCH.MMPROJ, 8), dict[str, torch.Tensor]()
    for full, tensor in model.state_dict().items():
        if "language_model" in full or "text_model" in full or full.startswith("lm_head"):
            continue
        if name == "llava" and (".layers.1." in full or "post_layernorm" in full):
            continue  # behind the layer that is read
        stem, _, leaf = full.rpartition(".")
        for new, old in _OLD.items():
            if stem.startswith(new) and not (name == "internvl" and "vision_tower" in new):
                stem = old + stem.removeprefix(new)
        if name == "internvl":
            for ours, theirs in {**_INTERN, **_INTERN_MM}.items():
                if full.endswith(f"embeddings.{ours}"):
                    found[theirs] = tensor.flatten(0, 1) if tensor.dim() == 3 else tensor
                    break
                if f"multi_modal_projector.{ours}." in full:
                    found[f"{theirs}.{leaf}"] = tensor
                    break
            else:
                stem, leaf = (full, "weight") if "lambda_" in full else (stem, leaf)
                known = names.get_name(stem)
                found[f"{known or 'v.patch_embd'}.{leaf}"] = tensor
            continue
        if "class_embedding" in full:
            found["v.class_embd"] = tensor
        elif "mm_input_projection_weight" in full:
            found["mm.input_projection.weight"] = tensor
        elif "mm_soft_emb_norm" in full:
            found["mm.soft_emb_norm.weight"] = tensor + 1
        elif ".qkv." in full:
            for part, one in zip("qkv", tensor.chunk(3), strict=True):
                found[f"{names.get_name(stem.replace('qkv', part))}.{leaf}"] = one
        elif tensor.dim() == 5:
            found |= {"v.patch_embd.weight": tensor[:, :, 0], "v.patch_embd.weight.1": tensor[:, :, 1]}
        else:
            found[f"{_MM.get(stem) or names.get_name(stem)}.{leaf}"] = tensor
    return found
