"""Describes latent attention (MLA) for the native library, see `kernels/latent.h`."""

from collections.abc import Callable
from typing import Any

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
    if getattr(attention, "indexer", None) is not None or hasattr(attention.kv_b_proj, "base"):
        raise AttributeError("columns that are chosen, or an adapter of what makes keys and values")
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
