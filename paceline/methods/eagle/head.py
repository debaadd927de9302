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

from dataclasses import KW_ONLY
from typing import Annotated, Literal, Self, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from ...errors import ConfigError
from ...schema import checked
from ..heads.layers import Attend, Attention, DecoderLayer, LayersConfig, Mlp, Rotary, attend_causally
from ..heads.parts import Count, DraftHead, Width


@checked
class EagleConfig(LayersConfig):
    """Shape of a head, whose layers are Llama's decoder layers. version: 1 (also EAGLE-2), 3, or "mtp".

    own_lm_head: its output layer is trained; otherwise it is those rows of the target's. fc_bias: some published
    EAGLE-1 heads have one. norm_before_residual: EAGLE-3 heads whose residual stream starts normed. own_embeddings: it
    brings its own table [V, E], as some published heads do. mask_token_id, num_speculative_tokens: of P-EAGLE heads
    (version 3), which token stands where none is known, and how many tokens a pass drafts; None for the others.
    window: it reads at most so many of the last pairs of a text before it drafts, since the states know what came
    before; None: all pairs. fc_norm, norm_output: the two changes of EAGLE-3.1, the second also of the MTP modules in
    checkpoints; norm_before_fc: one norm over all states, in the place of fc_norm.
    """

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
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.fc_norm or self.norm_before_fc) and self.version != 3:
            raise ConfigError("only EAGLE-3 heads have fc_norm and norm_before_fc", got=self.version)
        if self.norm_output and self.version == 1:
            raise ConfigError("EAGLE-1 heads have no norm_output", got=True)
        if self.fc_norm and self.norm_before_fc:
            raise ConfigError("states are normed twice", got="fc_norm and norm_before_fc", expected="one of them")
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
        return {1: "eagle", 3: "eagle3", "mtp": "mtp"}[self.version]


class EagleLayer(nn.Module):
    """The first layer; the names are those of published EAGLE-3 heads."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.version, self.norm_before_residual = config.version, config.norm_before_residual
        self.self_attn = Attention(config, config.hidden_size * (2 if config.version == 3 else 1))
        self.mlp = Mlp(config.hidden_size, config.intermediate_size)
        self.post_attention_layernorm = config.norm()
        if config.version != 1:
            self.input_layernorm = config.norm()
        if config.version == 3:
            self.hidden_norm = config.norm()

    def forward(self, embeddings: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """[B, N, E] each -> [B, N, E]. `embeddings` are read in EAGLE-3 only: in other heads `hidden` has them."""
        x = residual = hidden
        if self.version == 3:
            normed = self.hidden_norm(hidden)
            x = torch.cat([self.input_layernorm(embeddings), normed], -1)
            residual = normed if self.norm_before_residual else hidden
        elif self.version == "mtp":
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
        self.layers = nn.ModuleList([EagleLayer(c), *(DecoderLayer(c) for _ in range(c.num_hidden_layers - 1))])
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
        self.rotation = Rotary(c)
        self.later = nn.ModuleList()  # the MTP modules of the further steps, heads themselves

    def attach(self, embeddings: Tensor, lm_head: Tensor) -> Self:
        for head in self.later:
            cast("EagleHead", head).attach(embeddings, lm_head)
        return super().attach(embeddings, lm_head)

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
        first, *others = self.layers
        hidden = first(embeddings, hidden, cos, sin, attend)
        for layer in others:
            hidden = layer(hidden, cos, sin, attend)
        return self.norm(hidden) if self.config.norm_output else hidden

    def all_logits(self, states: Tensor, tokens: Tensor) -> list[Tensor]:
        """Of several steps, since a later one reads what the one before has put out."""
        positions = torch.arange(tokens.shape[2]).expand_as(tokens[0])
        hidden, logits = self.begin(states), list[Tensor]()
        for step in tokens:
            hidden = self(step, hidden, positions, attend_causally)
            logits.append(self.logits(hidden))
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        """Raw logits over the draft vocabulary. [..., E] -> [..., Vd]."""
        hidden = hidden if self.config.version == 1 or self.config.norm_output else self.norm(hidden)
        return self.lm_head(hidden) if self.config.own_lm_head else self.output(hidden)
