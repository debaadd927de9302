"""DFlash heads: decoder layers that fill a block of masks in one pass (Chen et al. 2026, arXiv 2602.06036).

context   g_t = norm fc[f_t of some layers]     every layer makes keys and values of it, by its own projections
block     x_n  mask  mask  ..  mask             positions n, n + 1, .., n + B - 1; n: the first without a state
reads     g_0 .. g_{n-1} and the whole block    row i > 0 predicts x_{n+i}

JetSpec (arXiv 2606.18394) is causal: a row reads the rows before it alone. So the first rows may hold known tokens, and
a mask behind drafted tokens predicts what follows them.
"""

from collections.abc import Iterable
from dataclasses import KW_ONLY
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from ...errors import ConfigError
from ...schema import checked
from ..heads.layers import Attend, DecoderLayer, LayersConfig, Rotary
from ..heads.parts import Count, DraftHead


@checked
class DFlashConfig(LayersConfig):
    """Shape of a head, whose width is the target's.

    mask_token_id: the token of the masks, whose embedding is the target's. block_size: the rows of a block, of which
    the first holds a known token. window: it reads at most so many of the last states of a text; None: all.
    own_lm_head: it has output rows of its own; otherwise they are the target's. causal: a row of a block does not see
    the later ones, as in JetSpec.
    """

    mask_token_id: Annotated[int, Field(ge=0)]
    block_size: Annotated[int, Field(ge=2, le=512)]
    _: KW_ONLY
    window: Count | None = None
    own_lm_head: bool = False
    causal: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask_token_id >= self.vocab_size:
            expected = f"a token below {self.vocab_size}"
            raise ConfigError("mask_token_id is no token of the target", got=self.mask_token_id, expected=expected)

    @property
    def method(self) -> str:
        return "jetspec" if self.causal else "dflash"

    @property
    def target_hidden_size(self) -> int:
        return self.hidden_size

    @property
    def num_speculative_tokens(self) -> int:
        """How many tokens a pass drafts."""
        return self.block_size - 1


class DFlashHead(DraftHead):
    """Decoder layers over a block, which also read the target's states."""

    Config = DFlashConfig

    def __init__(self, config: DFlashConfig, draft_ids: Tensor | None = None):
        super().__init__(config, draft_ids)
        self.config = c = config
        self.fc = nn.Linear(len(c.states) * c.hidden_size, c.hidden_size, False)
        self.hidden_norm, self.norm = c.norm(), c.norm()
        self.layers: Any = nn.ModuleList(DecoderLayer(c) for _ in range(c.num_hidden_layers))
        if c.own_lm_head:
            self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, False)
        self.rotation = Rotary(c)

    def context(self, states: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer for the target's states: [B, N, len(states) E], [B, N] -> [B, H, N, d] each."""
        read, (cos, sin) = self.hidden_norm(self.fc(states)), self.rotation(positions)
        return [layer.self_attn.keys_values(read, cos, sin) for layer in self.layers]

    def block(self, token_ids: Tensor) -> Tensor:
        """Tokens [B] and the masks after each -> [B, block_size]."""
        masks = token_ids.new_full((len(token_ids), self.config.block_size - 1), self.config.mask_token_id)
        return torch.cat([token_ids[:, None], masks], 1)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Blocks [B, N] -> normed hidden states [B, N, E]. `attend` adds the context of each layer."""
        hidden, (cos, sin) = nn.functional.embedding(token_ids, self._embeddings), self.rotation(positions)
        hidden = hidden.to(self.norm.weight.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, attend)
        return self.norm(hidden)

    def whole(self, states: Tensor, token_ids: Tensor) -> Tensor:
        """Blocks after texts of one length, without a cache: [B, N, len(states) E], [B] -> [B, block_size, E]."""
        columns = torch.arange(states.shape[1] + self.config.block_size, device=states.device)[None]
        context, begin = self.context(states, columns[:, : states.shape[1]]), states.shape[1]
        seen = columns <= columns[0, begin:, None] if self.config.causal else None
        return self(self.block(token_ids), columns[:, begin:], attending(context, seen))

    def all_logits(self, states: Tensor, tokens: Tensor) -> list[Tensor]:
        """Of a block after each text."""
        return [self.logits(self.whole(states, tokens[0, :, -1]))]

    def logits(self, hidden: Tensor) -> Tensor:
        """Raw logits over the draft vocabulary. [..., E] -> [..., Vd]."""
        return self.lm_head(hidden) if self.config.own_lm_head else self.output(hidden)


def attending(context: Iterable[tuple[Tensor, Tensor]], seen: Tensor | None = None) -> Attend:
    """Attention of blocks to the keys and values of the context, layer by layer, and to their own.

    seen: which of these columns each row sees [B, 1, N or 1, columns + N]; None: all.
    """
    layers = iter(context)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        pairs = zip(next(layers), (key, value), strict=True)
        keys, values = (torch.cat([old.to(new.dtype), new], 2) for old, new in pairs)
        return nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen, enable_gqa=True)

    return attend
