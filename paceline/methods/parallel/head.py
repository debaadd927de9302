"""Parallel heads: each predicts one token further ahead from the same state of the target, without the tokens between.

Blockwise parallel decoding (Stern et al. 2018, arXiv 1811.03115), Medusa (Cai et al. 2024, arXiv 2401.10774). Of the
state f_t the target's own output layer predicts x_{t+1}, the root of a round, and head i = 0, 1, ... x_{t+2+i}.
"""

from collections.abc import Iterable
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from ...schema import checked
from ..heads.parts import Count, DraftHead, HeadConfig, Width


@checked
class MedusaConfig(HeadConfig):
    """Shape of Medusa heads.

    states: the target's last, after the final norm. num_layers: residual blocks of a head. bias: of the blocks, as in
    the original repository's files. own_lm_head: each head has a trained output layer of its own; otherwise all use
    those rows of the target's.
    """

    num_heads: Count
    num_layers: Count = 1
    bias: bool = False
    own_lm_head: bool = False
    method: ClassVar[str] = "medusa"


@checked
class BlockwiseConfig(HeadConfig):
    """Shape of blockwise heads: intermediate_size is the width of a head's hidden layer; the rest as in Medusa's."""

    num_heads: Count
    intermediate_size: Width
    bias: bool = False
    method: ClassVar[str] = "blockwise"


class ParallelHeads(DraftHead):
    """Heads over one state, each a block of layers."""

    def __init__(
        self, config: MedusaConfig | BlockwiseConfig, blocks: Iterable[nn.Module], draft_ids: Tensor | None = None
    ):
        super().__init__(config, draft_ids)
        self.num_heads, self.blocks = config.num_heads, nn.ModuleList(blocks)

    def hidden(self, states: Tensor, head: int) -> Tensor:
        """The hidden vectors that a head computes from the target's states. [..., E] -> [..., E]."""
        return self.blocks[head](states)

    def logits(self, hidden: Tensor, head: int) -> Tensor:
        """Raw logits of one head over the draft vocabulary. [..., E] -> [..., Vd]."""
        return self.output(hidden)

    def forward(self, states: Tensor, num_heads: int | None = None) -> Tensor:
        """Raw logits of the first `num_heads` heads, None: of all. [B, E] -> [B, K, Vd]."""
        heads = range(self.num_heads if num_heads is None else num_heads)
        if self.owns_rows:
            return torch.stack([self.logits(self.hidden(states, head), head) for head in heads], 1)
        hidden = torch.stack([self.hidden(states, head) for head in heads], 1)
        return self.output(hidden)  # one product: the output rows, most of the work, are read once


class _ResidualBlocks(nn.Module):
    """h <- h + silu(W h), `count` times. W starts at zero: a fresh head predicts what the target's own head does."""

    def __init__(self, size: int, count: int, bias: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias) for _ in range(count))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + nn.functional.silu(layer(hidden))
        return hidden


@final
class MedusaHead(ParallelHeads):
    """Medusa: residual blocks, then the target's output rows or, in published files, output layers of their own.

    The names are vLLM's: `blocks.{head}.layers.{block}.weight`, `lm_heads.{head}.weight`.
    """

    Config = MedusaConfig

    def __init__(self, config: MedusaConfig, draft_ids: Tensor | None = None):
        self.config = c = config
        size, heads = c.hidden_size, range(c.num_heads)
        super().__init__(c, (_ResidualBlocks(size, c.num_layers, c.bias) for _ in heads), draft_ids)
        if c.own_lm_head:
            self.lm_heads = nn.ModuleList(nn.Linear(size, c.draft_vocab_size, False) for _ in heads)

    def logits(self, hidden: Tensor, head: int) -> Tensor:
        return self.lm_heads[head](hidden) if self.config.own_lm_head else super().logits(hidden, head)


class _HiddenLayer(nn.Module):
    """h + W2 relu(W1 h). W2 starts at zero: a fresh head predicts what the target's own head does."""

    def __init__(self, size: int, width: int, bias: bool):
        super().__init__()
        self.up_proj = nn.Linear(size, width, bias)
        self.down_proj = nn.Linear(width, size, bias)
        for parameter in self.down_proj.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down_proj(self.up_proj(hidden).relu())


@final
class BlockwiseHead(ParallelHeads):
    """Stern's heads: a hidden layer with a residual connection each, and the target's output rows, shared.

    Stern's p_1 is the target's own output layer, his p_{i+2} is head i here.
    """

    Config = BlockwiseConfig

    def __init__(self, config: BlockwiseConfig, draft_ids: Tensor | None = None):
        self.config = c = config
        blocks = (_HiddenLayer(c.hidden_size, c.intermediate_size, c.bias) for _ in range(c.num_heads))
        super().__init__(c, blocks, draft_ids)
