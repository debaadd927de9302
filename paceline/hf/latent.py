"""Latent attention (MLA): described for the native library (`kernels/latent.h`), and its weights for `described`."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..quant.packed import PackedLinear, linear_of


def is_latent(part: Any) -> bool:
    """Whether a module is attention whose keys and values are made of a latent."""
    return hasattr(part, "kv_b_proj")


def latent_of(
    struct: Any, attention: Any, matrix: Callable[[Any], Any], norm: Callable[[Any], Any], held: Any, kernels: Any
) -> None:
    """Fill the fields of a `Layer` that differ from those of other attention; the rotation is known.

    matrix, norm, held, kernels: as of `describe.Description`. Raises AttributeError for a layer of another kind.
    """
    nope, rope, value = (int(getattr(attention, f"{name}_head_dim")) for name in ("qk_nope", "qk_rope", "v"))
    latent = kernels.Latent(rank=int(attention.kv_lora_rank), nope_dim=nope, rope_dim=rope, value_dim=value)
    latent.kv, latent.kv_norm = matrix(attention.kv_a_proj_with_mqa), norm(attention.kv_a_layernorm)
    if attention.q_lora_rank is None:
        struct.q = matrix(attention.q_proj)
    else:
        latent.q_in, latent.q_norm = matrix(attention.q_a_proj), norm(attention.q_a_layernorm)
        struct.q = matrix(attention.q_b_proj)
    struct.kv_heads, struct.head_dim, struct.window = 1, latent.rank + rope, 0
    if struct.rotary_dim not in (0, rope):
        raise AttributeError(f"{struct.rotary_dim} numbers are rotated, and there are {rope}")
    # Keys are made by the transpose, which blocks do not have: weights in blocks are widened, and few of all.
    weight = attention.kv_b_proj.weight.detach().to(attention.kv_a_layernorm.weight.dtype)
    each = weight.view(struct.heads, nope + value, latent.rank)
    for name, parts in (("k", [own[:nope].T for own in each]), ("v", [own[nope:] for own in each])):
        packed: list[nn.Module] = [PackedLinear(linear_of(part.contiguous(), None)) for part in parts]
        setattr(latent, name, held.structures(kernels.Matrix, [matrix(part) for part in packed]))
    struct.latent = held.pointer(latent)


class LatentAttention(nn.Module):
    """Latent attention that holds weights under transformers' names and computes nothing.

    linear: makes a layer of so many inputs and outputs, with or without a bias.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __init__(self, config: Any, linear: Callable[[int, int, bool], nn.Module], dtype: torch.dtype):
        super().__init__()
        for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            setattr(self, name, getattr(config, name))
        heads, hidden, biased = config.num_attention_heads, config.hidden_size, getattr(config, "attention_bias", False)
        width = self.qk_nope_head_dim + self.qk_rope_head_dim

        def norm(size: int) -> nn.Module:
            return nn.RMSNorm(size, 1e-6, device="meta", dtype=dtype)  # whatever the config says of other norms

        if self.q_lora_rank is None:
            self.q_proj = linear(hidden, heads * width, False)
        else:
            self.q_a_proj, self.q_a_layernorm = linear(hidden, self.q_lora_rank, biased), norm(self.q_lora_rank)
            self.q_b_proj = linear(self.q_lora_rank, heads * width, False)
        self.kv_a_proj_with_mqa = linear(hidden, self.kv_lora_rank + self.qk_rope_head_dim, biased)
        self.kv_a_layernorm = norm(self.kv_lora_rank)
        self.kv_b_proj = linear(self.kv_lora_rank, heads * (self.qk_nope_head_dim + self.v_head_dim), False)
        self.o_proj = linear(heads * self.v_head_dim, hidden, biased)
        self.scaling = _mscale(config.rope_parameters) ** 2 * width**-0.5


def _mscale(rope: dict[str, Any]) -> float:
    """The factor of queries and of keys where positions are stretched."""
    times, factor = rope.get("mscale_all_dim") or 0.0, rope.get("factor") or 1.0
    return 0.1 * times * math.log(factor) + 1.0 if rope.get("rope_type", "default") != "default" and factor > 1 else 1.0
