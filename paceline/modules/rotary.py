"""Rotary positions of a draft layer (Su et al. 2021, arXiv 2104.09864), in the half-split form of Llama."""

import torch
from torch import Tensor


def rotation(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each position, float32. [B, N] -> [B, 1, N, d] each."""
    half = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.float()[..., None] * theta**-half
    angles = torch.cat([angles, angles], -1)[:, None]
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys [B, H, N, d] by their positions: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)
