"""EAGLE heads: one decoder layer that continues the target's hidden states.

(f_t, x_{t+1}) -> h_t, whose logits predict x_{t+2}; while drafting on, h_t stands for f_{t+1}, which is not yet known.

EAGLE-1   x = fc[emb; f]                 f: last state, after the final norm; h is trained to be f_{t+1} as well
and -2    h = layer(x)                   without an input norm; logits = lm_head(h)  (arXiv 2401.15077, 2406.16858)
EAGLE-3   g = fc[f_low; f_mid; f_high]   h is not trained to be a state; later steps read h instead of g
          h = layer([norm emb; norm g])  attention reads 2E, the residual stream is g; logits = lm_head(norm h)
                                         (arXiv 2503.01840)
P-EAGLE   as EAGLE-3, but later steps read `mask_hidden`, a learned vector, in the place of the states, and the token
          `mask_token_id`. So one pass drafts all positions (arXiv 2602.01469).
"""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from ..errors import ConfigError
from ..schema import checked
from .parts import Attend, Count, DecoderLayer, DraftHead, LayerConfig, Width, rotation


@checked
class EagleConfig(LayerConfig):
    """Shape of a head. version: 1 (also EAGLE-2) or 3.

    own_lm_head: its output layer is trained; otherwise it is those rows of the target's. fc_bias: some published
    EAGLE-1 heads have one. norm_before_residual: EAGLE-3 heads whose residual stream starts normed. own_embeddings: it
    brings its own table [V, E], as some published heads do. mask_token_id, num_speculative_tokens: of P-EAGLE heads
    (version 3), which token stands where none is known, and how many tokens a pass drafts; None for the others.
    window: it reads at most so many of the last pairs of a text before it drafts, since the states know what came
    before; None: all pairs.
    """

    version: Literal[1, 3]
    target_hidden_size: Width
    own_lm_head: bool = False
    fc_bias: bool = False
    norm_before_residual: bool = False
    own_embeddings: bool = False
    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    num_speculative_tokens: Count | None = None
    window: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        mask, tokens = self.mask_token_id, self.num_speculative_tokens
        complete = self.version == 3 and mask is not None and mask < self.vocab_size and tokens is not None
        if not complete and (mask is not None or tokens is not None):
            got = f"version {self.version}, mask_token_id {mask}, num_speculative_tokens {tokens}"
            expected = f"version 3, a token below {self.vocab_size}, and a number"
            raise ConfigError("no P-EAGLE head", got=got, expected=expected)

    @property
    def method(self) -> str:
        if self.mask_token_id is not None:
            return "peagle"
        return "eagle3" if self.version == 3 else "eagle"


class _Layer(DecoderLayer):
    """The decoder layer; the names are those of published EAGLE-3 heads."""

    def __init__(self, config: EagleConfig):
        super().__init__(config, config.hidden_size * (2 if config.version == 3 else 1))
        self.version, self.norm_before_residual = config.version, config.norm_before_residual
        if config.version == 3:
            self.input_layernorm, self.hidden_norm = config.norm(), config.norm()

    def forward(self, embeddings: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = residual = hidden
        if self.version == 3:
            normed = self.hidden_norm(hidden)
            x = torch.cat([self.input_layernorm(embeddings), normed], -1)
            residual = normed if self.norm_before_residual else hidden
        return self.add(residual, x, cos, sin, attend)


class EagleHead(DraftHead):
    """One decoder layer over the target's states."""

    Config = EagleConfig

    def __init__(self, config: EagleConfig, draft_ids: Tensor | None = None):
        super().__init__(config, draft_ids)
        self.config = c = config
        width = (c.hidden_size + c.target_hidden_size) if c.version == 1 else len(c.states) * c.target_hidden_size
        self.fc = nn.Linear(width, c.hidden_size, c.fc_bias)
        self.midlayer = _Layer(c)
        if c.version == 3:
            self.norm = c.norm()
        if c.own_lm_head:
            self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, False)
        if c.own_embeddings:
            self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        if c.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, width))

    def embed(self, token_ids: Tensor, like: Tensor) -> Tensor:
        if self.config.own_embeddings:
            return self.embed_tokens(token_ids).to(like.dtype)
        return super().embed(token_ids, like)

    def begin(self, states: Tensor) -> Tensor:
        """The input of the first step, from the target's states: [B, N, len(states) E] -> [B, N, E]."""
        return self.fc(states) if self.config.version == 3 else states

    def forward(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One step: next tokens [B, N] and the states (or h) before them [B, N, E] -> h [B, N, E]."""
        embeddings = self.embed(token_ids, hidden)
        cos, sin = rotation(positions, self.config.head_dim, self.config.rope_theta)
        if self.config.version == 1:
            hidden = self.fc(torch.cat([embeddings, hidden], -1))
        return self.midlayer(embeddings, hidden, cos, sin, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """Raw logits over the draft vocabulary. [..., E] -> [..., Vd]."""
        hidden = self.norm(hidden) if self.config.version == 3 else hidden
        return self.lm_head(hidden) if self.config.own_lm_head else self.output(hidden)
