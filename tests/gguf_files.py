"""Tiny models as GGUF files, written as llama.cpp's converter writes them."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quantize
from transformers import PreTrainedModel

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>\n{% endfor %}"
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert{s}.{side}_proj": f"ffn_{side}_shexp" for s in ("", "s") for side in ("gate", "up", "down")},
}
_FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


TINY = {
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "glm4moe": "glm4_moe",
    "ernie4_5-moe": "ernie4_5_moe",
    "gpt-oss": "gpt_oss",
    "exaone": "llama",
}
VARIANTS = {"mixtral": "llama"}
"""Tiny models that share an architecture with others."""
"""The tiny model of an architecture that llama.cpp calls otherwise."""
_POST_NORMS = ("gemma2", "gemma3", "olmo2", "exaone4", "gpt-oss")
_PAIRED = ("llama", "granite", "granitemoe", "smollm3")


def vocabulary() -> list[str]:
    """Byte-level tokens with two merges."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [*SPECIAL, *sorted(ByteLevel.alphabet()), "ĠĠ", "he", "ll"]


def gguf_tensors(model: PreTrainedModel, architecture: str) -> dict[str, torch.Tensor]:
    """The weights under their names in GGUF. Rotary rows of a llama are interleaved, Gemma's norms hold 1 + weight."""
    parts = _PARTS | (_FOUR_NORMS if architecture in _POST_NORMS else {})
    if architecture == "glm4moe":
        parts |= {"post_attention_layernorm": "post_attention_norm"}
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    config: Any = model.config
    for i in range(config.num_hidden_layers):
        names |= {f"model.layers.{i}.{ours}": f"blk.{i}.{theirs}" for ours, theirs in parts.items()}
    tensors: dict[str, torch.Tensor] = {}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name, weight in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        if stem.endswith(".experts"):
            tensors |= _experts(f"blk.{stem.split('.')[2]}", leaf, weight, architecture == "gpt-oss")
            continue
        if leaf == "e_score_correction_bias":
            tensors[f"blk.{stem.split('.')[2]}.exp_probs_b.bias"] = weight.flatten()
            continue
        if leaf == "sinks":
            tensors[f"blk.{stem.split('.')[2]}.attn_sinks.weight"] = weight
            continue
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = f"{names[stem]}.{leaf}"
        if architecture in _PAIRED and theirs.endswith(("attn_q.weight", "attn_k.weight")):
            half = head_dim // 2
            heads = range(len(weight) // head_dim)
            rows = [h * head_dim + pair + side * half for h in heads for pair in range(half) for side in (0, 1)]
            weight = weight[rows]
        if architecture.startswith("gemma") and theirs.endswith("norm.weight"):
            weight = weight + 1
        if leaf == "weight" and stem.endswith("shared_expert_gate"):
            weight = weight[0]
        tensors[theirs] = weight.contiguous()
    return tensors


def _experts(block: str, leaf: str, weight: torch.Tensor, mixed: bool) -> dict[str, torch.Tensor]:
    """Gate and up of all experts apart, [experts, out, in]."""
    ending = "bias" if leaf.endswith("bias") else "weight"
    weight = weight.mT if mixed and ending == "weight" else weight
    parts = {"down": weight}
    if leaf.startswith("gate_up"):
        gate, up = (weight[:, ::2], weight[:, 1::2]) if mixed else weight.chunk(2, dim=1)
        parts = {"gate": gate, "up": up}
    return {f"{block}.ffn_{side}_exps.{ending}": part.contiguous() for side, part in parts.items()}


def _layers(config: Any, architecture: str) -> dict[str, Any]:
    """The metadata that describes the layers."""
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": head_dim,
    }
    if architecture == "starcoder2":
        layers["attention.layer_norm_epsilon"] = config.norm_epsilon
    else:
        layers["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    if rope.get("rope_type") == "yarn":
        layers |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"])}
        layers["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if getattr(config, "sliding_window", None):
        layers["attention.sliding_window"] = config.sliding_window
        if architecture in ("gemma2", "gemma3", "olmo2", "exaone4"):
            kinds = [kind == "sliding_attention" for kind in config.layer_types]
            layers["attention.sliding_window_pattern"] = kinds
    if architecture in ("granite", "granitemoe"):
        layers |= {"attention.scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier}
        layers |= {"residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling}
    if getattr(config, "num_local_experts", 0):
        layers |= {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok}
    if architecture == "ernie4_5-moe":
        layers |= {"expert_count": config.moe_num_experts, "expert_used_count": config.moe_k}
        layers["expert_shared_count"] = config.moe_num_shared_experts
        layers["expert_shared_feed_forward_length"] = config.moe_num_shared_experts * config.moe_intermediate_size
        layers["leading_dense_block_count"] = config.moe_layer_start_index
        layers["interleave_moe_layer_step"] = config.moe_layer_interval
    if architecture == "glm4moe":
        layers |= {"expert_count": config.n_routed_experts, "expert_used_count": config.num_experts_per_tok}
        layers |= {"expert_shared_count": config.n_shared_experts, "expert_gating_func": 2}
        layers |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
        layers |= {"expert_weights_scale": config.routed_scaling_factor, "expert_weights_norm": config.norm_topk_prob}
        layers["leading_dense_block_count"] = config.first_k_dense_replace
        layers["rope.dimension_count"] = int(head_dim * rope["partial_rotary_factor"])
    if architecture in ("qwen2moe", "qwen3moe", "glm4moe", "ernie4_5-moe", "gpt-oss"):
        size = config.intermediate_size if architecture == "gpt-oss" else config.moe_intermediate_size
        layers["expert_feed_forward_length"] = size
    if architecture == "qwen2moe":
        layers["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    return layers


PLACE_OF_SCALES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q2_K": (80, 2),
    "Q3_K": (108, 1),
    "Q6_K": (208, 1),
}
"""Where the float16 scales of a block lie, and how many; others have one at the beginning."""


def random_blocks(form: str, outs: int, ins: int, seed: int = 0, size: float = 0.02) -> np.ndarray:
    """The bytes of a matrix: any codes and integer scales, and scales of up to `size`. uint8 [out, bytes of a row]."""
    rng = np.random.default_rng(seed)
    per, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[form]]
    blocks = rng.integers(0, 256, (outs, ins // per, num_bytes), dtype=np.uint8)
    at, count = PLACE_OF_SCALES.get(form, (0, 1))
    if form == "MXFP4":
        blocks[..., 0] = rng.integers(100, 140, blocks.shape[:2])
    else:
        scales = rng.uniform(-size, size, (*blocks.shape[:2], count)).astype(np.float16)
        blocks[..., at : at + 2 * count] = scales.view(np.uint8)
    return blocks.reshape(outs, -1)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    architecture: str = "llama",
    quantized: str | Sequence[str] | None = None,
    more: Mapping[str, Any] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    per_part: int = 0,
    empty_first: bool = False,
) -> Path:
    """Write `model` with a byte-level tokenizer of `vocabulary()`.

    quantized: the format of matrices that fit, for example Q4_0, or several that they have by turns; those of K-quants
    and IQ4 are random weights. more: metadata that is added, or replaced; None: left out.
    tensors: in place of the model's.
    per_part: tensors in each part of a split file, whose first part's path is returned. empty_first: it has none.
    """
    names, architecture = vocabulary(), VARIANTS.get(architecture, architecture)
    metadata = {f"{architecture}.{key}": value for key, value in _layers(model.config, architecture).items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(names) - len(SPECIAL)),
        "tokenizer.ggml.merges": ["Ġ Ġ", "h e", "l l"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }
    metadata = {key: value for key, value in (metadata | dict(more or {})).items() if value is not None}
    split = {"split_max_tensors": per_part, "small_first_shard": empty_first}
    writer = GGUFWriter(path, metadata.pop("general.architecture", architecture), **split)
    for key, value in metadata.items():
        add_entry(writer, key, value)
    formats = cycle([quantized] if isinstance(quantized, str) else quantized or [""])
    for name, weight in (gguf_tensors(model, architecture) if tensors is None else tensors).items():
        is_exact = weight.dim() == 1 or name.endswith(("bias", "ffn_gate_inp.weight"))  # as llama.cpp keeps them
        if quantized is None or is_exact or weight.shape[-1] % 32:
            writer.add_tensor(name, weight.numpy())
            continue
        form = next(formats)
        kind = GGMLQuantizationType[form]
        is_random = form.endswith("_K") or form.startswith("IQ")
        if is_random:
            blocks = random_blocks(form, weight[..., 0].numel(), weight.shape[-1], size=1e-3)
            blocks = blocks.reshape(*weight.shape[:-1], -1)
        else:
            blocks = quantize(weight.numpy(), kind)
        writer.add_tensor(name, blocks, raw_dtype=kind)
    return finish(writer, path)


def finish(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.exists() else min(path.parent.glob(f"{path.stem}-00001-of-*"))


def add_entry(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
