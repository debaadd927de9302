"""Multi-token prediction: modules in sequence, each of which continues from the hidden state of the one before.

DeepSeek-V3 (arXiv 2412.19437, section 2.2), for module k = 1..K at position t, with h^0_t = f_t, the target's last
hidden state after its final norm; the embedding comes first, as in published weights:

    h^k_t = Block_k( M_k [norm(emb(x_{t+k})); norm(h^{k-1}_t)] )      rows of the target's head on norm(h^k_t)
                                                                      predict x_{t+k+1}
Past K tokens the last module continues alone (FastMTP, arXiv 2509.18362):

    step K+1          reads h^K_t and x_{t+K+1}         -> predicts x_{t+K+2},   at position t+1, over module K's keys
"""

from typing import ClassVar, cast, final

import torch
from torch import Tensor, nn

from ..schema import checked
from .parts import Attend, Count, DecoderLayer, DraftHead, LayerConfig, rotation


@checked
class MtpConfig(LayerConfig):
    """Shape of MTP modules. num_modules: K. states: the last hidden state of the target alone."""

    num_modules: Count = 1
    method: ClassVar[str] = "mtp"


class MtpModule(DecoderLayer):
    """One decoder layer behind the projection of embedding and state; the names are those of DeepSeek's weights."""

    def __init__(self, config: MtpConfig):
        super().__init__(config, config.hidden_size)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, False)
        self.enorm, self.hnorm, self.input_layernorm, self.norm = (config.norm() for _ in range(4))

    def begin(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        return self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], -1))

    def forward(self, embeddings: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = self.begin(embeddings, hidden)
        return self.add(x, self.input_layernorm(x), cos, sin, attend)


@final
class MtpHead(DraftHead):
    """MTP modules, which share the target's embeddings and output rows."""

    Config = MtpConfig

    def __init__(self, config: MtpConfig, draft_ids: Tensor | None = None):
        super().__init__(config, draft_ids)
        self.config = config
        self.layers = nn.ModuleList(MtpModule(config) for _ in range(config.num_modules))

    def module_of(self, step: int) -> int:
        """Which module drafts the token of a step, both counted from 0: the last one also drafts all later tokens."""
        return min(step, self.config.num_modules - 1)

    def forward(self, step: int, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One step, counted from 0: its tokens [B, N] and the hidden states before [B, N, E] -> h [B, N, E]."""
        embeddings = self.embed(token_ids, hidden)
        cos, sin = rotation(positions, self.config.head_dim, self.config.rope_theta)
        return self.module(step)(embeddings, hidden, cos, sin, attend)

    def module(self, step: int) -> MtpModule:
        return cast("MtpModule", self.layers[self.module_of(step)])

    def logits(self, hidden: Tensor, step: int) -> Tensor:
        """Raw logits of a step over the draft vocabulary. [..., E] -> [..., Vd]."""
        return self.output(self.module(step).norm(hidden))
