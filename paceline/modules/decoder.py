"""Attention and MLP of a Llama decoder layer, for modules that are trained: the names are those of transformers."""

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor, nn

from .rotary import rotated

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of queries [B, Hq, N, d] given the new keys and values [B, H, N, d]; returns [B, Hq, N, d]."""


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; where keys are kept, and which are seen, `attend` decides.

    width: of what it reads. hidden_size: of what it gives. num_heads, num_kv_heads: of queries, of keys.
    """

    def __init__(self, width: int, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool):
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, num_heads * head_dim, bias)
        self.k_proj = nn.Linear(width, num_kv_heads * head_dim, bias)
        self.v_proj = nn.Linear(width, num_kv_heads * head_dim, bias)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """[B, N, width] -> [B, N, E]."""
        split = (*x.shape[:2], -1, self.head_dim)
        query = rotated(self.q_proj(x).view(split).transpose(1, 2), cos, sin)
        key = rotated(self.k_proj(x).view(split).transpose(1, 2), cos, sin)
        value = self.v_proj(x).view(split).transpose(1, 2)
        return self.o_proj(attend(query, key, value).transpose(1, 2).reshape(*x.shape[:2], -1))


class Mlp(nn.Module):
    """The gated MLP: down(silu(gate x) * up x)."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., E] -> [..., E]."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
