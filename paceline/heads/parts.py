"""What heads share: sizes, layers named as in transformers, the target's tables, draft vocabularies."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn

from ..errors import ConfigError, IncompatibleModels
from ..schema import Many, checked

_M = TypeVar("_M", bound=nn.Module)

# What a head's configuration may hold: sizes no larger than any model's, since each claims time or memory.
Width = Annotated[int, Field(ge=1, le=1 << 20)]  # of a vector
Count = Annotated[int, Field(ge=1, le=512)]  # modules in a row
Vocabulary = Annotated[int, Field(ge=1, le=1 << 24)]  # tokens
Rank = Annotated[int, Field(ge=0, le=1 << 16)]  # of low-rank factors; 0: there are none
Linears = Annotated[Many[str], Field(max_length=64)]  # linear layers of a decoder layer, as transformers names them
Shapes = Many[tuple[Width, Width]]  # (outputs, inputs) of each
Positive = Annotated[float, Field(gt=0)]


@checked
class HeadConfig:
    """What the configuration of every head over the target's hidden states holds.

    states: hidden states of the target that it reads, counted as transformers does. draft_vocab_size: Vd, the tokens
    that it can draft.
    """

    hidden_size: Width
    states: Annotated[Many[Annotated[int, Field(ge=0, le=512)]], Field(min_length=1)]
    draft_vocab_size: Vocabulary
    vocab_size: Vocabulary

    def __post_init__(self) -> None:
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(
                "draft_vocab_size is larger than the vocabulary", got=self.draft_vocab_size,
                expected=f"at most {self.vocab_size}",
            )  # fmt: skip


@checked
class LayerConfig(HeadConfig):
    """The same of a head whose layers are Llama's decoder layers. attention_bias: of queries, keys and values."""

    intermediate_size: Width
    num_attention_heads: Width
    num_key_value_heads: Width
    head_dim: Width
    _: KW_ONLY
    rms_norm_eps: Positive = 1e-5
    rope_theta: Positive = 10000.0
    attention_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise ConfigError(
                "the attention of this head does not work out",
                got=f"{self.num_attention_heads} heads of {self.head_dim} over {self.num_key_value_heads} of keys",
                expected="as many for each of the keys, of an even size",
            )

    def norm(self) -> nn.RMSNorm:
        return nn.RMSNorm(self.hidden_size, self.rms_norm_eps)


Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of queries [B, Hq, N, d] given the new keys and values [B, H, N, d]; returns [B, Hq, N, d]."""


def attend_causally(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of a text to itself."""
    return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; the caller's `attend` keeps the keys and masks them.

    width: of the input.
    """

    def __init__(self, config: LayerConfig, width: int):
        super().__init__()
        self.head_dim, bias = config.head_dim, config.attention_bias
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries, bias)
        self.k_proj = nn.Linear(width, keys, bias)
        self.v_proj = nn.Linear(width, keys, bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, False)

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
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Llama's decoder layer but for its first norm. width: of what attention reads."""

    def __init__(self, config: LayerConfig, width: int):
        super().__init__()
        self.self_attn = Attention(config, width)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size)
        self.post_attention_layernorm = config.norm()

    def add(self, residual: Tensor, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """The residual stream [B, N, E] behind the layer; x: what attention reads, [B, N, width]."""
        hidden = residual + self.self_attn(x, cos, sin, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


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
        return nn.functional.linear(hidden, self.rows)


class DraftHead(nn.Module):
    """A head that uses the target's embeddings and output rows (see `attach`)."""

    draft_ids: Tensor
    """The draft vocabulary: the target's id of each draft token, ascending. [Vd]."""

    def __init__(self, config: HeadConfig, draft_ids: Tensor | None = None):
        super().__init__()
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size) if draft_ids is None else draft_ids)
        self._embeddings, self.output = torch.empty(0), Output()
        self.owns_rows = getattr(config, "own_lm_head", False)

    def attach(self, embeddings: Tensor, lm_head: Tensor) -> Self:
        """Use the target's embeddings [V, E] and, where it has none of its own, its output rows [V, E]."""
        self._embeddings = embeddings.detach()
        if not self.owns_rows:
            rows = lm_head.detach()  # without a copy where the draft vocabulary is whole
            self.output.rows = rows if len(self.draft_ids) == len(rows) else rows[self.draft_ids.to(rows.device)]
        return self

    def embed(self, token_ids: Tensor, like: Tensor) -> Tensor:
        """The target's embeddings [B, N, E], in the dtype of `like`."""
        return nn.functional.embedding(token_ids, self._embeddings).to(like.dtype)


def check_sizes(what: str, head: Mapping[str, object], target: Mapping[str, object], fix: str) -> None:
    """Raise `IncompatibleModels` where sizes of a head, by name, are not those of the target."""
    wrong = [name for name in head if head[name] != target[name]]
    if wrong:
        got, expected = (", ".join(f"{name.replace('_', ' ')} {of[name]}" for name in wrong) for of in (head, target))
        raise IncompatibleModels(what, got=got, expected=expected, fix=fix)


def filled(make: Callable[[Any], _M], config: object, tensors: Mapping[str, Tensor], folder: Path) -> _M:
    """A module of this configuration that holds these very tensors. No memory is claimed before they are known to fit.

    folder: theirs, for errors. Raises `ConfigError` that lists every tensor that is missing, left over or misshapen, or
    for one that holds other than finite numbers of its kind.
    """
    with torch.device("meta"):  # shapes only
        module = make(config)
    for name, like in module.state_dict().items():
        tensor, floats = tensors.get(name), like.is_floating_point()
        if tensor is not None and (tensor.is_floating_point() != floats or not bool(tensor.isfinite().all())):
            raise ConfigError(f"the tensor {name} in {str(folder)!r} holds other than finite numbers of its kind")
    try:
        module.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise ConfigError(
            f"the tensors in {str(folder)!r} do not fit its config.json", got=" ".join(str(error).split())
        ) from error
    return module.eval().requires_grad_(False)


# Draft vocabularies. A head drafts the most frequent tokens only, since at a small target its output layer is most of
# its cost. Other tokens are never drafted, only emitted by the target; verification is the same.

_PRIOR = 3000.0
"""Weight of the rank by id: on answers of SmolLM2-135M it covered 92.8% of new tokens where counts alone did 91.8%."""


def frequent_ids(texts: Iterable[Sequence[int]], size: int, vocab_size: int) -> Tensor:
    """The `size` tokens most frequent in some texts, as ascending ids. [Vd].

    A text is small beside a vocabulary, so tokens it does not hold are ranked by id: tokenizers number common tokens
    first.
    """
    tokens = [token for text in texts for token in text if token < vocab_size]
    counts = torch.tensor(tokens, dtype=torch.long).bincount(minlength=vocab_size).double()
    scores = counts + _PRIOR / (torch.arange(vocab_size) + 300.0)
    return scores.topk(min(size, vocab_size)).indices.sort().values


def draft_index(draft_ids: Tensor, vocab_size: int) -> Tensor:
    """Place of each target token in the draft vocabulary, -1 where it has none. [Vd] -> [V]."""
    index = torch.full((vocab_size,), -1, dtype=torch.long, device=draft_ids.device)
    index[draft_ids] = torch.arange(len(draft_ids), device=draft_ids.device)
    return index
