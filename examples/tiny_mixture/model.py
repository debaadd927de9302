"""The architecture: Qwen3-MoE's decoder, small; each token takes two of eight experts."""

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def make_config(vocab_size: int, **changes: Any) -> Qwen3MoeConfig:
    """Four layers of attention and experts; token 0 begins and ends a file."""
    options: dict[str, Any] = {
        "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 320, "norm_topk_prob": True,
        "max_position_embeddings": 2048, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    return Qwen3MoeConfig(vocab_size=vocab_size, **(options | changes))


def save(model: Qwen3MoeForCausalLM, folder: Path) -> None:
    """Write config.json and model.safetensors in bfloat16, an expert at a time, as published mixtures are."""
    model.bfloat16().save_pretrained(folder)


def load(folder: Path) -> Qwen3MoeForCausalLM:
    """The model of a folder in float32, ready to decode."""
    return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def active_parameters(model: Qwen3MoeForCausalLM) -> int:
    """The parameters that a token uses: of the experts those that are chosen."""
    config = model.config
    experts = sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name)
    return model.num_parameters() - experts * (config.num_experts - config.num_experts_per_tok) // config.num_experts
