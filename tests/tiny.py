"""Tiny random models of many architectures: they prove shapes and distributions, not usefulness."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from paceline.hf.describe import FORMS

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_GPT = {
    "vocab_size": 97,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SLIDE = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_MLA = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}

_GEMMA4 = {  # layers 3 and 4 read the keys and values of layers 1 and 2
    "num_hidden_layers": 5,
    "sliding_window": 8,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")],
    "num_kv_shared_layers": 2,
    "global_head_dim": 16,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
    "final_logit_softcapping": 30.0,
}
_K_IS_V = {  # as in the larger models
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
_GEMMA3N = {
    **{name: _GEMMA4[name] for name in ("num_hidden_layers", "sliding_window", "layer_types", "num_kv_shared_layers")},
    **{name: _GEMMA4[name] for name in ("hidden_size_per_layer_input", "vocab_size_per_layer_input")},
    "intermediate_size": [48] * 5,
    "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0],
    "altup_num_inputs": 3,
    "laurel_rank": 4,
}
_LLAMA4 = {  # the last layer has no rotation, and its temperature changes at every third token
    "num_local_experts": 4,
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 40,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 5,
    "floor_scale": 3,
}

ARCHITECTURES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "mixtral": ("mixtral", _MOE),
    "qwen2": ("qwen2", {}),
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, **_SLIDE}),
    "qwen3": ("qwen3", {}),
    "qwen2_moe": ("qwen2_moe", {**_MOE, "shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("qwen3_moe", _MOE),
    "olmoe": ("olmoe", _MOE),
    "granitemoe": ("granitemoe", {**_MOE, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 8, **_SLIDE}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 8, **_SLIDE}),
    "gemma4": ("gemma4_text", _GEMMA4),
    "gemma4-k-is-v": ("gemma4_text", {**_GEMMA4, **_K_IS_V}),
    "gemma4-experts": ("gemma4_text", {**_GEMMA4, **_MOE, "enable_moe_block": True, "top_k_experts": 2}),
    "gemma3n": ("gemma3n_text", _GEMMA3N),
    "llama4": ("llama4_text", _LLAMA4),
    "phi": ("phi", {}),
    "phi3": ("phi3", {"sliding_window": 8}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", _SLIDE),
    "granite": ("granite", {"logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", _SLIDE),
    "stablelm": ("stablelm", {}),
    "starcoder2": ("starcoder2", {"sliding_window": 8}),
    "gpt2": ("gpt2", _GPT),
    "gpt_bigcode": ("gpt_bigcode", _GPT),
    "gpt_neox": ("gpt_neox", {}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "falcon": ("falcon", {"multi_query": True, "new_decoder_architecture": False, "alibi": False}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "deepseek_v3": ("deepseek_v3", _MLA),
    "gpt_oss": ("gpt_oss", {**_MOE, **_SLIDE}),
    "exaone4": ("exaone4", _SLIDE),
    "nemotron": ("nemotron", {}),
    "helium": ("helium", {}),
    "ernie4_5": ("ernie4_5", {}),
    "seed_oss": ("seed_oss", {}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {**_MOE, "moe_topk": 2}),
    "jetmoe": ("jetmoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8}),
}

_DEEPSEEK = {
    **{key: _MLA[key] for key in ("n_routed_experts", "n_shared_experts", "n_group", "topk_group")},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
    **{"norm_topk_prob": True, "routed_scaling_factor": 1.5},
}
_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
EXPERTS: dict[str, tuple[str, dict]] = {
    "glm4_moe": ("glm4_moe", {**_DEEPSEEK, "use_qk_norm": True, "attention_bias": True}),
    "sarvam_moe": ("sarvam_moe", {**_DEEPSEEK, "attention_bias": True}),
    "dots1": ("dots1", {**_DEEPSEEK, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}),
    "solar_open": ("solar_open", _DEEPSEEK),
    "exaone_moe": ("exaone_moe", {**_DEEPSEEK, **_SLIDE, **_SPARSE, "num_experts": 4, "num_shared_experts": 1}),
    "hy_v3": ("hy_v3", {**_MOE, **_SPARSE, "num_shared_experts": 1, "router_scaling_factor": 1.7}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1, "moe_layer_end_index": 1,
        },
    ),
    "minimax_m2": ("minimax_m2", {**_MOE, "intermediate_size": 24}),
    "mellum": ("mellum", {**_MOE, **_SLIDE, "mlp_layer_types": ["sparse", "sparse"]}),
    "flex_olmo": ("flex_olmo", {**_MOE, "norm_topk_prob": True}),
    "granitemoe_swa": ("granitemoe_swa", {**_MOE, **_SLIDE}),
    "granitemoeshared": ("granitemoeshared", {**_MOE, "shared_intermediate_size": 24}),
}  # fmt: skip
"""More mixtures, beside those of `ARCHITECTURES`."""

DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
}
_SHARED = {"shared_expert_intermediate_size": 24, **_MOE}
_KDA = {
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "linear_conv_kernel_dim": 4,
    "layer_types": DELTA["layer_types"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_hidden_layers": 3,
}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16}
_MAMBA = {"state_size": 8, "expand": 2, "conv_kernel": 4}

_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 12, "mamba_n_groups": 2, "mamba_expand": 2}

RECURRENT: dict[str, tuple[str, dict]] = {
    "qwen3_5": ("qwen3_5_text", {**DELTA, "linear_value_head_dim": 20}),
    "olmo_hybrid": ("olmo_hybrid", {**DELTA, "linear_allow_neg_eigval": True}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {**_HEADS, "num_local_experts": 0, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 48},
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            **_HEADS, "mamba_d_ssm": 64, "ssm_multipliers": [0.5, 2.0, 0.7, 1.5, 0.9], "key_multiplier": 0.6,
            "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.7, "mlp_multipliers": [0.9, 1.1], "lm_head_multiplier": 0.5,
            "embedding_multiplier": 2.0,
        },
    ),
    "bamba": ("bamba", {**_HEADS, "attn_layer_indices": [1]}),
    "nemotron_h": (
        "nemotron_h",
        {
            "num_hidden_layers": 4, "layers_block_type": ["mamba", "mlp", "attention", "mlp"], "mamba_num_heads": 8,
            "mamba_head_dim": 8, "ssm_state_size": 12, "n_groups": 2, "time_step_min": 1e-9,
        },
    ),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 12, "n_groups": 2, "expand": 2}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "lfm3": ("lfm3", {"layer_types": ["conv", "full_attention"], "use_attention_gate": False}),
    "qwen3_next": ("qwen3_next", {**DELTA, **_SHARED}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**DELTA, **_SHARED}),
    "kimi_linear": ("kimi_linear", {**_MLA, **_KDA}),
    "bailing_hybrid": ("bailing_hybrid", {**_MLA, **_KDA, "num_experts": 4}),
    "minimax": ("minimax", {**_MOE, "layer_types": ["linear_attention", "full_attention"], "block_size": 8}),
    "granitemoehybrid_moe": (
        "granitemoehybrid",
        {**_MAMBA2, **_MOE, "layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 24},
    ),
    "nemotron_h_moe": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "moe", "attention", "mamba"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 16,
            "time_step_min": 1e-9,
            "n_routed_experts": 4,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
    "zamba2": (
        "zamba2",
        {
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "num_hidden_layers": 4,
            "n_mamba_heads": 4,
            "mamba_d_state": 8,
            "chunk_size": 16,
            "time_step_min": 1e-9,
        },
    ),
    "zamba": (
        "zamba",
        {
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "mamba_d_state": 8,
        },
    ),
    "jamba": ("jamba", {**_MOE, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8}),
    "mamba": ("mamba", _MAMBA),
    "falcon_mamba": ("falcon_mamba", _MAMBA),
    "lfm2_moe": ("lfm2_moe", {**_MOE, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "zaya": ("zaya", {"num_experts": 4}),
    "lara_mini": ("lara_mini", {**DELTA, **_SHARED}),
}  # fmt: skip
"""With recurrent layers, which transformers keeps in its cache. The first three are tested by default.

transformers applies `time_step_min` to texts, and not to single tokens: here it is too small to matter."""

_WIDTHS = {  # none is a multiple of the kernels' blocks
    "hidden_size": 64,
    "num_key_value_heads": 4,
    "kv_lora_rank": 36,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 12,
}
_GROUPS = {**_MLA, **_WIDTHS, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}

LATENT: dict[str, tuple[str, dict]] = {
    "deepseek_v2": (
        "deepseek_v2",
        {**_GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5, "rope_parameters": _YARN},
    ),
    "deepseek_v2_lite": ("deepseek_v2", {**_GROUPS, "q_lora_rank": None, "topk_method": "greedy"}),
    "minicpm3": ("minicpm3", {**_WIDTHS, "scale_emb": 3, "dim_model_base": 16}),
    "glm4_lite": ("glm4_moe_lite", _GROUPS),
    "axk1": ("axk1", _GROUPS),
    "sarvam_mla": ("sarvam_mla", {**_GROUPS, "q_lora_rank": None}),
    "youtu": ("youtu", {**_WIDTHS, "rope_interleave": False, "pad_token_id": None}),  # whose row transformers empties
}
"""With latent attention, beside DeepSeek-V3."""

NATIVE = [
    name for name, (kind, more) in (ARCHITECTURES | RECURRENT | LATENT).items()
    if kind in FORMS and "enable_moe_block" not in more and "_moe" not in name
]  # fmt: skip
"""Those that native passes run."""
UNDESCRIBED = "hunyuan_v1_dense"
"""Not known to `target.native`: transformers' layers run it in every dtype, with fast or invariant numerics."""


def tiny_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """A random model of the named architecture with weights large enough to make logits differ clearly."""
    model_type, extra = (ARCHITECTURES | RECURRENT | LATENT | EXPERTS)[name]
    base = {} if model_type in ("gpt2", "gpt_bigcode") else dict(SMALL)
    if model_type == "falcon":
        base = {key: value for key, value in base.items() if key not in ("head_dim", "num_key_value_heads")}
    config = AutoConfig.for_model(model_type, **{**base, **extra, **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.25)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
        elif name.endswith(("e_score_correction_bias", "expert_bias")):
            torch.nn.init.normal_(buffer, std=0.2)
    return model.eval()
