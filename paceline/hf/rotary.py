"""Rotary embeddings of transformers' models: their parameters, and cosines and sines as their modules make them."""

from typing import Any

import torch
from torch import Tensor

_FIXED_ROPES = ("default", "linear", "llama3", "yarn", "proportional")


def ropes_of(config: Any) -> list[dict[str, Any]]:
    """The rope parameters of a text config: one dict for each kind of layer, or one for all."""
    ropes = getattr(config, "rope_parameters", None) or {}
    return [rope for rope in ropes.values() if isinstance(rope, dict)] or [ropes]


def has_fixed_ropes(config: Any) -> bool:
    """Whether the rope frequencies of a text config are fixed, that is, do not depend on the length of the text."""
    return all(rope.get("rope_type", "default") in _FIXED_ROPES for rope in ropes_of(config))


def rotary_of(base: Any) -> Any:
    """What makes cosines and sines; None where nothing is rotated."""
    return getattr(base, "rotary_emb", getattr(base, "pos_emb", None))


def rotation(rotary: Any, like: Tensor, position_ids: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions, for layers of a kind; DeepSeek-V2 has them as complex numbers."""
    made = rotary(like, position_ids, *(() if kind is None else (kind,)))
    return made if isinstance(made, tuple) else (made.real, made.imag)


def rotary_dim_of(rotary: Any, kind: str | None) -> int:
    """How many numbers of a head are rotated; some modules only make the half that is repeated."""
    if rotary is None:
        return 0
    inverse = getattr(rotary, "inv_freq", torch.empty(0))
    positions = torch.zeros(1, 1, dtype=torch.long, device=inverse.device)
    positions = positions.expand(3, 1, 1) if hasattr(rotary, "mrope_section") else positions
    cos, _ = rotation(rotary, torch.empty(0), positions, kind)
    dim = int(cos.shape[-1])
    return 2 * dim if len(inverse) == dim else dim
