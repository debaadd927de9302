"""EAGLE and MTP heads: one decoder layer, or a few, that continue the target's hidden states.

(f_t, x_{t+1}) -> h_t, whose logits predict x_{t+2}; while drafting on, h_t stands for f_{t+1}, which is not yet known.

EAGLE-1   x = fc[emb; f]                 f: last state, after the final norm; h is trained to be f_{t+1} as well
and -2    h = layer(x)                   without an input norm; logits = lm_head(h)  (arXiv 2401.15077, 2406.16858)
EAGLE-3   g = fc[f_low; f_mid; f_high]   h is not trained to be a state; later steps read h instead of g
          h = layer([norm emb; norm g])  attention reads 2E, the residual stream is g; logits = lm_head(norm h)
                                         (arXiv 2503.01840)
EAGLE-3.1 g = fc[norm f_low; norm f_mid; norm f_high]
          h = norm layer([norm emb; norm g])  later steps read the normed h; logits = lm_head(h) (arXiv 2605.09992)
P-EAGLE   as EAGLE-3, but later steps read `mask_hidden`, a learned vector, in the place of the states, and the token
          `mask_token_id`. So one pass drafts all positions (arXiv 2602.01469).
MTP       x = fc[norm emb; norm f]       multi-token prediction in DeepSeek-V3's form; one module drafts all tokens
          h = layer(norm x)              the residual stream is x; logits = lm_head(norm h)  (arXiv 2412.19437, section
                                         2.2; FastMTP, arXiv 2509.18362)

`layer` is the first one. Further layers, of which published P-EAGLE heads have three, are ordinary layers of Llama.
"""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY
from typing import Annotated, Any, Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..errors import ConfigError
from ..schema import checked
from .parts import Count, DraftHead, HeadConfig, Positive, Width


@checked
class EagleConfig(HeadConfig):
    """Shape of a head, whose layers are Llama's decoder layers. version: 1 (also EAGLE-2), 3, or "mtp".

    own_lm_head: its output layer is trained; otherwise it is those rows of the target's. fc_bias: some published
    EAGLE-1 heads have one. norm_before_residual: EAGLE-3 heads whose residual stream starts normed. own_embeddings: it
    brings its own table [V, E], as some published heads do. mask_token_id, num_speculative_tokens: of P-EAGLE heads
    (version 3), which token stands where none is known, and how many tokens a pass drafts; None for the others.
    window: it reads at most so many of the last pairs of a text before it drafts, since the states know what came
    before; None: all pairs. attention_bias: of queries, keys and values. rope_scaling: of rotary positions, as in the
    config.json of a Llama model, of type "llama3", "yarn" or "linear"; None: they are not scaled. fc_norm, norm_output:
    the two changes of EAGLE-3.1; norm_before_fc: one norm over all states, in the place of fc_norm.
    """

    intermediate_size: Width
    num_attention_heads: Width
    num_key_value_heads: Width
    head_dim: Width
    version: Literal[1, 3, "mtp"]
    target_hidden_size: Width
    own_lm_head: bool = False
    fc_bias: bool = False
    norm_before_residual: bool = False
    own_embeddings: bool = False
    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    num_speculative_tokens: Count | None = None
    window: Count | None = None
    _: KW_ONLY
    rms_norm_eps: Positive = 1e-5
    rope_theta: Positive = 10000.0
    attention_bias: bool = False
    num_hidden_layers: Count = 1
    rope_scaling: Mapping[str, Any] | None = None
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise ConfigError(
                "the attention of this head does not work out",
                got=f"{self.num_attention_heads} heads of {self.head_dim} over {self.num_key_value_heads} of keys",
                expected="as many for each of the keys, of an even size",
            )
        if (self.fc_norm or self.norm_before_fc or self.norm_output) and self.version != 3:
            raise ConfigError("only EAGLE-3 heads have fc_norm, norm_before_fc and norm_output", got=self.version)
        if self.fc_norm and self.norm_before_fc:
            raise ConfigError("states are normed twice", got="fc_norm and norm_before_fc", expected="one of them")
        mask, tokens = self.mask_token_id, self.num_speculative_tokens
        complete = self.version == 3 and mask is not None and mask < self.vocab_size and tokens is not None
        if not complete and (mask is not None or tokens is not None):
            got = f"version {self.version}, mask_token_id {mask}, num_speculative_tokens {tokens}"
            expected = f"version 3, a token below {self.vocab_size}, and a number"
            raise ConfigError("no P-EAGLE head", got=got, expected=expected)
        _frequencies(self, torch.device("cpu"))  # which may raise

    @property
    def method(self) -> str:
        if self.mask_token_id is not None:
            return "peagle"
        return {1: "eagle", 3: "eagle3", "mtp": "mtp"}[self.version]

    def norm(self, width: int | None = None) -> nn.RMSNorm:
        """A norm over this many channels; None: `hidden_size`."""
        return nn.RMSNorm(width or self.hidden_size, self.rms_norm_eps)


Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of queries [B, Hq, N, d] given the new keys and values [B, H, N, d]; returns [B, Hq, N, d].

It is called once for each layer, in their order.
"""


def attend_causally(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of a text to itself."""
    return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; the caller's `attend` keeps the keys and masks them.

    width: of the input.
    """

    def __init__(self, config: EagleConfig, width: int):
        super().__init__()
        self.head_dim, bias = config.head_dim, config.attention_bias
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries, bias)
        self.k_proj = nn.Linear(width, keys, bias)
        self.v_proj = nn.Linear(width, keys, bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """[B, N, width] -> [B, N, E]."""
        query, key, value = (
            project(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = attend(rotated(query, cos, sin), rotated(key, cos, sin), value)
        return self.o_proj(attended.transpose(1, 2).reshape(*x.shape[:2], -1))


class Mlp(nn.Module):
    """The gated MLP: down(silu(gate x) * up x)."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class EagleLayer(nn.Module):
    """A decoder layer; the names are those of published EAGLE-3 heads. version: None for layers after the first."""

    def __init__(self, config: EagleConfig, version: Literal[1, 3, "mtp"] | None):
        super().__init__()
        self.version, self.norm_before_residual = version, config.norm_before_residual
        self.self_attn = Attention(config, config.hidden_size * (2 if version == 3 else 1))
        self.mlp = Mlp(config.hidden_size, config.intermediate_size)
        self.post_attention_layernorm = config.norm()
        if version != 1:
            self.input_layernorm = config.norm()
        if version == 3:
            self.hidden_norm = config.norm()

    def forward(self, embeddings: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """[B, N, E] each -> [B, N, E]. Only EAGLE-3's first layer reads `embeddings`: in others `hidden` has them."""
        x = residual = hidden
        if self.version == 3:
            normed = self.hidden_norm(hidden)
            x = torch.cat([self.input_layernorm(embeddings), normed], -1)
            residual = normed if self.norm_before_residual else hidden
        elif self.version != 1:
            x = self.input_layernorm(hidden)
        hidden = residual + self.self_attn(x, cos, sin, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleHead(DraftHead):
    """Decoder layers over the target's states."""

    Config = EagleConfig

    def __init__(self, config: EagleConfig, draft_ids: Tensor | None = None):
        super().__init__(config, draft_ids)
        self.config = c = config
        width = len(c.states) * c.target_hidden_size + (0 if c.version == 3 else c.hidden_size)
        self.fc = nn.Linear(width, c.hidden_size, c.fc_bias)
        self.layers = nn.ModuleList(EagleLayer(c, None if i else c.version) for i in range(c.num_hidden_layers))
        if c.version != 1:
            self.norm = c.norm()
        if c.norm_before_fc:
            self.input_norm = c.norm(width)
        if c.fc_norm:
            self.fc_norm = nn.ModuleList(c.norm(c.target_hidden_size) for _ in c.states)
        if c.version == "mtp":
            self.enorm, self.hnorm = c.norm(), c.norm()
        if c.own_lm_head:
            self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, False)
        if c.own_embeddings:
            self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        if c.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, width))
        self._rotary: tuple[Tensor, float] | None = None

    @property
    def embeddings(self) -> Tensor:
        """Its own table, or that of the target it is attached to. [V, E]."""
        return self.embed_tokens.weight if self.config.own_embeddings else self._embeddings

    def embed(self, token_ids: Tensor, like: Tensor) -> Tensor:
        """The embeddings of tokens [B, N, E], in the dtype of `like`."""
        return nn.functional.embedding(token_ids, self.embeddings).to(like.dtype)

    def begin(self, states: Tensor) -> Tensor:
        """The input of the first step, from the target's states: [B, N, len(states) E] -> [B, N, E]."""
        return self.fc(self.normed(states)) if self.config.version == 3 else states

    def normed(self, states: Tensor) -> Tensor:
        """What `fc` reads of the target's states in EAGLE-3. [..., len(states) E] -> the same."""
        if self.config.norm_before_fc:
            return self.input_norm(states.to(self.norm.weight.dtype))
        if not self.config.fc_norm:
            return states
        parts = states.to(self.norm.weight.dtype).chunk(len(self.fc_norm), -1)
        return torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)

    def pairs(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """What `fc` reads in every step, except in EAGLE-3. [B, N, E] each -> [B, N, 2E]."""
        if self.config.version == "mtp":
            dtype = self.enorm.weight.dtype
            embeddings, hidden = self.enorm(embeddings.to(dtype)), self.hnorm(hidden.to(dtype))
        return torch.cat([embeddings, hidden], -1)

    def forward(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One step: next tokens [B, N] and the states (or h) before them [B, N, E] -> h [B, N, E]."""
        embeddings = self.embed(token_ids, hidden)
        cos, sin = self.rotation(positions)
        if self.config.version != 3:
            hidden = self.fc(self.pairs(embeddings, hidden))
        for layer in self.layers:
            hidden = layer(embeddings, hidden, cos, sin, attend)
        return self.norm(hidden) if self.config.norm_output else hidden

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of rotary positions. [B, N] -> float32 [B, 1, N, d] each."""
        if self._rotary is None or self._rotary[0].device != positions.device:
            self._rotary = _frequencies(self.config, positions.device)
        frequencies, factor = self._rotary
        angles = positions.float()[..., None] * frequencies
        angles = torch.cat([angles, angles], -1)[:, None]
        return angles.cos() * factor, angles.sin() * factor

    def logits(self, hidden: Tensor) -> Tensor:
        """Raw logits over the draft vocabulary. [..., E] -> [..., Vd]."""
        hidden = hidden if self.config.version == 1 or self.config.norm_output else self.norm(hidden)
        return self.lm_head(hidden) if self.config.own_lm_head else self.output(hidden)


def _frequencies(config: EagleConfig, device: torch.device) -> tuple[Tensor, float]:
    """Angles per position of rotary positions, float32 [d / 2], and the factor of cosines and sines.

    Su et al. 2021, arXiv 2104.09864; with `rope_scaling`, as transformers computes them. Raises `ConfigError`.
    """
    d, theta, scaling = config.head_dim, config.rope_theta, config.rope_scaling
    if scaling is None:
        return theta ** -(torch.arange(0, d, 2, dtype=torch.float32, device=device) / d), 1.0
    kind, length = scaling.get("rope_type", scaling.get("type")), scaling.get("original_max_position_embeddings")
    if kind not in ("llama3", "yarn", "linear"):
        raise ConfigError("unknown rope_scaling of a head", got=kind, expected="llama3, yarn or linear")
    try:
        if kind != "linear" and not length:
            raise ValueError("no original_max_position_embeddings")
        rope = {**scaling, "rope_theta": theta}
        llama = LlamaConfig(head_dim=d, max_position_embeddings=1 << 30, rope_parameters=rope)
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](llama, device)
        if not bool(frequencies.isfinite().all()):
            raise ValueError(f"factor {scaling.get('factor')}")
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError("the rope_scaling of this head is not sound", got=str(error)) from error
    return frequencies, factor


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys [B, H, N, d] by their positions, in the half-split form of Llama.

    (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)
    """
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)
