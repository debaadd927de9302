"""What the heads have in common: attention and MLP of a Llama decoder layer, output rows, sizes, draft vocabularies.

The layers are for modules that are trained; their names are those of transformers.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, TypeAlias

import torch
from pydantic import Field
from torch import Tensor, nn

from ..errors import ConfigError
from ..schema import Many

# Sizes that a head's configuration may hold: no larger than any model's, since each claims time or memory.

Size = Annotated[int, Field(ge=1, le=1 << 20)]
"""A width."""
Count = Annotated[int, Field(ge=1, le=512)]
"""Modules in a row."""
Vocabulary = Annotated[int, Field(ge=1, le=1 << 24)]
"""Tokens."""
Rank = Annotated[int, Field(ge=0, le=1 << 16)]
"""The rank of low-rank factors; 0: there are none."""
States = Annotated[Many[Annotated[int, Field(ge=0, le=512)]], Field(min_length=1)]
"""Hidden states of the target, counted as transformers does."""
Linears = Annotated[Many[str], Field(max_length=64)]
"""Linear layers of a decoder layer, as transformers names them."""
Shapes = Many[tuple[Size, Size]]
"""(outputs, inputs) of each."""
Positive = Annotated[float, Field(gt=0)]
"""A number above 0."""


def check_heads(num_attention_heads: int, num_key_value_heads: int, head_dim: int) -> None:
    """Raise `ConfigError` where attention heads cannot share keys evenly, or where their size is odd (rotary pairs)."""
    if num_attention_heads % num_key_value_heads or head_dim % 2:
        raise ConfigError(
            "the attention of this head does not work out",
            got=f"{num_attention_heads} heads of {head_dim} over {num_key_value_heads} of keys",
            expected="as many for each of the keys, of an even size",
        )


def check_vocabulary(draft_vocab_size: int, vocab_size: int) -> None:
    """Raise `ConfigError` for a draft vocabulary that is larger than the target's."""
    if draft_vocab_size > vocab_size:
        raise ConfigError(
            "draft_vocab_size is larger than the vocabulary", got=draft_vocab_size, expected=f"at most {vocab_size}"
        )


Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of queries [B, Hq, N, d] given the new keys and values [B, H, N, d]; returns [B, Hq, N, d]."""


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; the caller's `attend` keeps the keys and masks them.

    width: of the input. hidden_size: of the output. num_heads, num_kv_heads: of queries, of keys.
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
        query = rotated(self._split(self.q_proj(x)), cos, sin)
        attended = attend(query, *self.keys_values(x, cos, sin))
        return self.o_proj(attended.transpose(1, 2).reshape(*x.shape[:2], -1))

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, [B, H, N, d] each."""
        return rotated(self._split(self.k_proj(x)), cos, sin), self._split(self.v_proj(x))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


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


def rotation(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions (Su et al. 2021, arXiv 2104.09864). [B, N] -> float32 [B, 1, N, d] each."""
    half = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.float()[..., None] * theta**-half
    angles = torch.cat([angles, angles], -1)[:, None]
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys [B, H, N, d] by their positions, in the half-split form of Llama.

    (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)
    """
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


class Output(nn.Module):
    """The product with the target's output rows: they are attached later, and are no part of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.empty(0)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., E] -> [..., Vd]."""
        return nn.functional.linear(hidden, self.rows)


# Draft vocabularies. A head drafts the most frequent tokens only, since at a small target its output layer is most of
# its cost. Other tokens are never drafted, only emitted by the target; verification is the same.

_PRIOR = 3000.0
"""Weight of the rank by id: on answers of SmolLM2-135M it covered 92.8% of new tokens where counts alone did 91.8%."""


def frequent_ids(texts: Iterable[Sequence[int]], size: int, vocab_size: int) -> Tensor:
    """The `size` tokens most frequent in some texts, as ascending ids. [Vd].

    A text is small beside a vocabulary, so tokens it does not hold are ranked by id: tokenizers number common tokens
    first.
    """
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for token, count in Counter(token for text in texts for token in text).items():
        if token < vocab_size:
            counts[token] = count
    counts += _PRIOR / (torch.arange(vocab_size) + 300.0)
    return counts.topk(min(size, vocab_size)).indices.sort().values


def draft_index(draft_ids: Tensor, vocab_size: int) -> Tensor:
    """Place of each target token in the draft vocabulary, -1 where it has none. [Vd] -> [V]."""
    index = torch.full((vocab_size,), -1, dtype=torch.long, device=draft_ids.device)
    index[draft_ids] = torch.arange(len(draft_ids), device=draft_ids.device)
    return index


def draft_rows(lm_head: Tensor, draft_ids: Tensor) -> Tensor:
    """The rows of an output layer [V, E] for the draft vocabulary, without a copy where it is whole. [Vd, E]."""
    rows = lm_head.detach()
    return rows if len(draft_ids) == len(rows) else rows[draft_ids.to(rows.device)]


def whole_or(draft_ids: Tensor | None, size: int) -> Tensor:
    """The draft vocabulary as a head keeps it: target ids of its `size` draft tokens, ascending. None: the first."""
    return torch.arange(size) if draft_ids is None else draft_ids
