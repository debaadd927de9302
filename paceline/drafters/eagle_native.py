"""An EAGLE head as passes of the native library: what `EaglePass` does in torch, a call a level (see `draft_layer`)."""

import copy
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from ..heads.eagle import EagleHead
from ..quant import PackedLinear
from .draft_cache import DraftCache
from .draft_layer import DraftLayer, Level, Norms, linear_of, native_form
from .top_tokens import Best

CHUNK = 512
"""Pairs digested at once."""

_FEW = 8  # pairs at the end that go through the whole layer; those before leave keys and values only


@final
class NativeEagle:
    """A head attached to its target, as `EaglePass`."""

    def __init__(self, head: EagleHead, embeddings: Tensor, lm_head: Tensor, num_slots: int):
        dtype = embeddings.dtype
        head = copy.deepcopy(head).to(embeddings.device, dtype).eval().requires_grad_(False)
        config, layer = head.config, head.midlayer
        self.config, self.draft_ids = config, head.draft_ids
        self._embeddings = (head.embed_tokens.weight if config.own_embeddings else embeddings).detach().contiguous()
        if not config.own_lm_head:
            head.lm_head = linear_of(lm_head.detach().to(dtype)[head.draft_ids])
        native_form(head)
        self._fc = head.fc
        norms, beside = Norms(None, layer.post_attention_layernorm, None), None
        if config.version == 3:
            own = layer.input_layernorm, layer.post_attention_layernorm, head.norm, layer.hidden_norm
            norms, beside = Norms(*own, beside_stays=config.norm_before_residual), self._embeddings
        assert isinstance(head.lm_head, PackedLinear)
        self._layer = DraftLayer(layer.self_attn, layer.mlp, norms, head.lm_head, config.rope_theta, beside)
        heads, d = config.num_key_value_heads, config.head_dim
        self.cache = DraftCache(num_slots, heads, d, dtype, embeddings.device)

    def extend_cache(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], states: Sequence[Tensor], most: int = 0
    ) -> Level:
        """Read the pairs that each slot has not digested yet, at least one; the level of the last ones, [B, 1, ...].

        tokens: x_{n+1} .. x_{T-1} of each row. states: f_n .. f_{T-2} of each row, [P, len(states) E].
        most: as in `step`.
        """
        ids, rows = list[Tensor](), list[Tensor]()
        for slot, row, known in zip(slots, tokens, states, strict=True):
            begin, own = 0, torch.tensor(row)
            while len(row) - begin > _FEW:
                end = min(begin + CHUNK, len(row) - 1)
                self._pass([slot], own[None, begin:end], self._begun(known[begin:end])[None], ends=False)
                self.cache.lengths[slot] += end - begin
                begin = end
            ids.append(own[begin:])
            rows.append(known[begin:])
        counts = [len(row) for row in ids]
        width, ragged = max(counts), min(counts) < max(counts)
        packed = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        hidden = self._begun(nn.utils.rnn.pad_sequence(rows, batch_first=True))
        level = self._pass(slots, packed, hidden, head_rows=width if ragged else 1, top=most)
        for slot, count in zip(slots, counts, strict=True):
            self.cache.lengths[slot] += count
        self._slots, self._parents = list(slots), torch.empty(len(slots), 0, dtype=torch.long)
        self._newest = -1  # number of the first node of the newest level
        ends = torch.tensor(counts) - 1 + torch.arange(len(slots)) * width
        return _picked(level, ends, ragged)

    def step(self, tokens: Tensor, hidden: Tensor, parents: Tensor, most: int = 0) -> Level:
        """One level of the trees: what the nodes [B, F] leave behind, and the `most` largest logits of each.

        hidden: h of the level before [B, G, E]. parents: which of its rows each node hangs under, [B, F].
        """
        (batch, width), before = hidden.shape[:2], self._parents.shape[1]
        places = parents + torch.arange(batch)[:, None] * width
        rows = hidden.flatten(0, 1).index_select(0, places.flatten()).unflatten(0, parents.shape)
        above = parents + self._newest if before else torch.full_like(parents, -1)
        self._parents, self._newest = torch.cat([self._parents, above], 1), before
        return self._pass(self._slots, tokens, rows, self._parents, before, head_rows=tokens.shape[1], top=most)

    def _begun(self, states: Tensor) -> Tensor:
        """What the target's states become, float32. [..., len(states) E] -> [..., E]."""
        return self._fc(states.float()) if self.config.version == 3 else states.float()

    def _pass(
        self,
        slots: Sequence[int],
        ids: Tensor,
        hidden: Tensor,
        parents: Tensor | None = None,
        old: int = 0,
        head_rows: int = 0,
        top: int = 0,
        ends: bool = True,
    ) -> Level:
        """The pairs of tokens [B, N] and hidden [B, N, E] behind what the slots have digested."""
        cache, beside = self.cache, ids.contiguous()
        starts = [cache.lengths[slot] for slot in slots]
        cache.ensure(max(starts) + old + ids.shape[1])
        if self.config.version == 1:
            hidden = self._fc(torch.cat([nn.functional.embedding(ids, self._embeddings).float(), hidden], -1))
            beside = None
        return self._layer(
            cache.keys, cache.values, slots, starts, hidden, beside, parents, old, head_rows, top, ends
        )  # fmt: skip


def _picked(level: Level, ends: Tensor, ragged: bool) -> Level:
    """Only the rows at `ends`, counted over the batch; logits are of these alone unless it is ragged."""
    pick = lambda t: t.flatten(0, 1).index_select(0, ends)[:, None]  # noqa: E731
    if not ragged:
        return Level(pick(level.hidden), level.logits, level.best)
    best = None if level.best is None else Best(pick(level.best.columns), pick(level.best.logps))
    return Level(pick(level.hidden), pick(level.logits), best)
