"""DSpark heads: DFlash's block, and a small network that tells each row the token before it (arXiv 2607.05147).

block        x_n  mask  mask  ..        DFlash's pass over the whole block gives h_1 .. h_{B-1}, and base logits L h_k
Markov head  e = W1[x_{n+k-1}]          logits of row k: L h_k + W2 z; z depends on its type
             vanilla                    z = e
             gated                      z = sigmoid(gate [h_k; e]) * e
             rnn                        g, c, z = joint [s; e; h_k], z = tanh z; s is zero in the first row, and then
                                        sigmoid(g) s + (1 - sigmoid(g)) tanh(c)

W1 and W2 are tables over the vocabularies, or are made from the target's own: W1 = E A and W2 = L B. Then rare tokens
learn from frequent ones, and the head stays small. The paper's confidence head is left out: the probability of a token
tells better whether it will be accepted.
"""

from dataclasses import KW_ONLY, replace
from typing import Literal, Self

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ...schema import checked
from ..dflash.head import DFlashConfig, DFlashHead
from ..heads.parts import Width

MarkovType = Literal["vanilla", "gated", "rnn"]


@checked
class DSparkConfig(DFlashConfig):
    """Shape of a head.

    markov_rank: of W1 and W2. own_tables: these are tables of its own. tells_first: the first drafting row is told as
    well, although the anchor is in its block. from_anchor: the first row drafts, too; row k then drafts x_{n+k+1}.
    """

    _: KW_ONLY
    markov_rank: Width = 128
    markov_head_type: MarkovType = "rnn"
    own_tables: bool = False
    tells_first: bool = True
    from_anchor: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.causal:
            message = "a DSpark head whose blocks are causal is not known"
            raise ConfigError(message, got="causal true", expected="rows that see their whole block")

    @property
    def method(self) -> str:
        return "dspark"

    @property
    def num_speculative_tokens(self) -> int:
        return self.block_size - (not self.from_anchor)

    @property
    def norm_output(self) -> bool:
        """The Markov head reads normed states."""
        return True


class MarkovHead(nn.Module):
    """Makes z of a row from the token before it, its hidden state and what the rows before left."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        width, rank = config.hidden_size, config.markov_rank
        self.rank, self.kind = rank, config.markov_head_type
        if config.own_tables:
            self.markov_w1 = nn.Embedding(config.vocab_size, rank)
            self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, False)
        else:
            self.markov_w1, self.markov_w2 = nn.Linear(width, rank, False), nn.Linear(rank, width, False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def forward(self, before: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Z of rows, and the state for the rows after them: e [..., r], [..., E], [..., r] -> [..., r] each."""
        if self.kind == "vanilla":
            return before, state
        if self.kind == "gated":
            return self.gate_proj(torch.cat([hidden, before], -1)).sigmoid() * before, state
        gate, new, out = self.joint_proj(torch.cat([state, before, hidden], -1)).chunk(3, -1)
        gate = gate.sigmoid()
        return out.tanh(), gate * state + (1 - gate) * new.tanh()


class DSparkHead(DFlashHead):
    """A DFlash head with a Markov head."""

    Config = DSparkConfig
    config: DSparkConfig

    def __init__(self, config: DSparkConfig, draft_ids: Tensor | None = None):
        super().__init__(config, draft_ids)
        self.markov_head = MarkovHead(config)
        if not config.own_tables:
            nn.init.zeros_(self.markov_head.markov_w2.weight)

    def before(self, tokens: Tensor) -> Tensor:
        """E of the tokens before rows: [...] -> [..., r]."""
        w1: nn.Module = self.markov_head.markov_w1
        if isinstance(w1, nn.Embedding):
            return w1(tokens)
        return w1(nn.functional.embedding(tokens, self._embeddings).to(w1.weight.dtype))

    def folded(self) -> Self:
        """The same head with tables of its own."""
        if self.config.own_tables:
            return self
        like, markov = self.fc.weight, self.markov_head
        exact = torch.promote_types(like.dtype, torch.float32)  # products of 16 bits take minutes on a CPU
        rows = self.lm_head.weight if self.config.own_lm_head else self.output.rows
        tables = {
            "markov_head.markov_w1.weight": self._embeddings.to(exact) @ markov.markov_w1.weight.to(exact).T,
            "markov_head.markov_w2.weight": rows.to(exact) @ markov.markov_w2.weight.to(exact),
        }
        made = type(self)(replace(self.config, own_tables=True), self.draft_ids).to(like.device, like.dtype)
        made.load_state_dict(self.state_dict() | {name: table.detach() for name, table in tables.items()})
        made._embeddings, made.output.rows = self._embeddings, self.output.rows
        return made.eval().requires_grad_(False)
