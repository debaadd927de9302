"""An EAGLE head made ready for drafting in torch: joined weights, tables of rotations, and its own cache.

A head is one decoder layer, so that key and value of a pair (f_t, x_{t+1}) depend on nothing but that pair. What was
emitted since the last round is digested by those two products; the rest of the layer runs for the last pair only:

    pairs      n .. T-3      T-2                                          (T tokens, n pairs digested before)
    computed   key, value    key, value, query, attention, MLP, the law of x_T
"""

import copy
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from ..heads.eagle import EagleHead
from ..heads.parts import rotation
from .draft_cache import DraftCache, Rows, side_by_side
from .draft_layer import Level, linear_of

CHUNK = 512
"""Pairs digested at once."""


@final
class EaglePass:
    """A head attached to its target; `EagleHead.forward` over all pairs of a path is the slow and obvious form of it.

    head: copied, so that training it further changes nothing here. embeddings, lm_head: the target's [V, E].
    """

    def __init__(self, head: EagleHead, embeddings: Tensor, lm_head: Tensor, num_slots: int):
        device, dtype = embeddings.device, embeddings.dtype
        head = copy.deepcopy(head).to(device, dtype).eval().requires_grad_(False)
        config, layer = head.config, head.midlayer
        attention, mlp = layer.self_attn, layer.mlp
        self.config, self.draft_ids = config, head.draft_ids
        self._embeddings = (head.embed_tokens.weight if config.own_embeddings else embeddings).detach()
        self._fc = head.fc
        self._query, self._key_value = attention.q_proj, _joined(attention.k_proj, attention.v_proj)
        self._out = attention.o_proj
        self._gate_up, self._down = _joined(mlp.gate_proj, mlp.up_proj), mlp.down_proj
        self._mlp_norm = layer.post_attention_layernorm
        if config.version == 3:
            self._token_norm, self._hidden_norm, self._norm = layer.input_layernorm, layer.hidden_norm, head.norm
        rows = head.lm_head.weight if config.own_lm_head else lm_head.detach().to(device, dtype)[head.draft_ids]
        self._lm_head = linear_of(rows, None)
        self.cache = DraftCache(num_slots, config.num_key_value_heads, config.head_dim, dtype, device)
        self._cos = self._sin = torch.empty(0, device=device)

    def extend_cache(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], states: Sequence[Tensor], most: int = 0
    ) -> Level:
        """Read the pairs that each slot has not digested yet, at least one; the level of the last ones, [B, 1, ...].

        tokens: x_{n+1} .. x_{T-1} of each row. states: f_n .. f_{T-2} of each row, [P, len(states) E].
        """
        rest: list[tuple[Sequence[int], Tensor]] = []
        for slot, ids, known in zip(slots, tokens, states, strict=True):
            begin = 0
            while len(ids) - begin > CHUNK:
                self._digest([slot], [(ids[begin : begin + CHUNK], known[begin : begin + CHUNK])])
                begin += CHUNK
            rest.append((ids[begin:], known[begin:]))
        x, residual, last = self._digest(slots, rest)
        self._round(slots)
        query = self._query(x[last])[:, None]  # [B, 1, Hq d]
        return self._level_of(self._finish(query, residual[last][:, None], self._lengths - 1, self._longest))

    def step(self, tokens: Tensor, hidden: Tensor, parents: Tensor, most: int = 0) -> Level:
        """One level of the trees: what the nodes [B, F] leave behind.

        hidden: h of the level before [B, G, E]. parents: which of its rows each node hangs under, [B, F].
        """
        (batch, width), device = tokens.shape, tokens.device
        every = torch.arange(batch, device=device)[:, None]
        x, residual = self._inputs(
            tokens, hidden[every, parents] if hidden.shape[1] > 1 else hidden.expand(-1, width, -1)
        )
        begin, self._level = self._longest + self._used, self._level + 1
        self._used += width
        self.cache.ensure(begin + width)
        positions = (self._lengths - 1 + self._level)[:, None].expand(batch, width)
        key, value = self._keys_values(x, positions)
        self.cache.write(self._rows, begin, key, value)
        if self._sees is not None or width > 1:  # a single chain sees all there is
            if self._sees is None:
                above = torch.ones(batch, width, begin, dtype=torch.bool, device=device)
            else:
                above = self._sees[every, parents]
            own = torch.eye(width, dtype=torch.bool, device=device).expand(batch, width, width)
            self._sees = torch.cat([above, own], -1)  # [B, F, begin + F]
        return self._level_of(self._finish(self._query(x), residual, positions[:, 0], begin + width))

    def _level_of(self, hidden: Tensor) -> Level:
        """With its logits; nothing is sought among them."""
        return Level(hidden, self._lm_head(self._norm(hidden) if self.config.version == 3 else hidden))

    def _round(self, slots: Sequence[int]) -> None:
        """Begin a tree for each of these slots behind what they have digested; see `draft_cache`.

        _sees: [B, F, columns], what each row of the newest level attends to; None: everything.
        """
        lengths, device = [self.cache.lengths[slot] for slot in slots], self._embeddings.device
        self._rows: Rows = side_by_side(slots, device)
        self._lengths = torch.tensor(lengths, device=device)
        self._longest, self._used, self._level = max(lengths), 0, 0
        self._sees: Tensor | None = None
        if min(lengths) < self._longest:
            self._sees = (torch.arange(self._longest, device=device) < self._lengths[:, None])[:, None]

    def _digest(
        self, slots: Sequence[int], pairs: Sequence[tuple[Sequence[int], Tensor]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of some pairs of each slot, one after another without padding.

        Returns the layer's inputs [P, W], its residual stream [P, E], and where in them the last pair of each row is.
        """
        device = self._embeddings.device
        counts = [len(ids) for ids, _ in pairs]
        begins = [self.cache.lengths[slot] for slot in slots]
        places = [p for begin, count in zip(begins, counts, strict=True) for p in range(begin, begin + count)]
        ids = torch.tensor([[token for row, _ in pairs for token in row], places], device=device)
        states = pairs[0][1] if len(pairs) == 1 else torch.cat([known for _, known in pairs])
        states = states.to(self._embeddings.dtype)
        x, residual = self._inputs(ids[0], self._fc(states) if self.config.version == 3 else states)
        self._rotations(max(places) + 1)
        key, value = self._keys_values(x, ids[1])
        for slot, k, v in zip(slots, key.split(counts), value.split(counts), strict=True):
            self.cache.extend_cache(slot, k, v)
        return x, residual, torch.tensor(counts, device=device).cumsum(0) - 1

    # The layer, piece by piece

    def _inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads [..., W] and the residual stream [..., E]."""
        embedded = nn.functional.embedding(tokens, self._embeddings)
        if self.config.version == 1:
            x = self._fc(torch.cat([embedded, hidden], -1))
            return x, x
        normed = self._hidden_norm(hidden)
        x = torch.cat([self._token_norm(embedded), normed], -1)
        return x, normed if self.config.norm_before_residual else hidden

    def _keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, [..., H, d] each."""
        joined = self._key_value(x).unflatten(-1, (2, self.config.num_key_value_heads, self.config.head_dim))
        key, value = joined.unbind(-3)
        return self._rotated(key, positions), value

    def _finish(self, query: Tensor, residual: Tensor, positions: Tensor, columns: int) -> Tensor:
        """Attention of queries [B, F, Hq d] at `positions` [B] to the first `columns`, then the MLP. [B, F, E]."""
        (batch, width, _), c = query.shape, self.config
        heads, groups = c.num_key_value_heads, c.num_attention_heads // c.num_key_value_heads
        query = self._rotated(query.unflatten(-1, (c.num_attention_heads, c.head_dim)), positions[:, None])
        # The queries of a key head lie in one matrix, so that its keys are read once: [B, H, F G, d]
        query = query.unflatten(2, (heads, groups)).transpose(1, 2).reshape(batch, heads, width * groups, c.head_dim)
        mask = None
        if self._sees is not None:
            mask = self._sees[:, None, :, None].expand(batch, 1, width, groups, columns).flatten(2, 3)
        keys, values = self.cache.keys[self._rows, :, :columns], self.cache.values[self._rows, :, :columns]
        out = nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        out = out.unflatten(2, (width, groups)).transpose(1, 2).reshape(batch, width, -1)
        hidden = residual + self._out(out)
        gate, up = self._gate_up(self._mlp_norm(hidden)).chunk(2, -1)
        return hidden + self._down(nn.functional.silu(gate) * up)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), as x cos + (x2, x1) (-sin, sin). x: [..., H, d]."""
        cos, sin = self._cos[positions].unsqueeze(-2), self._sin[positions].unsqueeze(-2)
        return x * cos + x.roll(self.config.head_dim // 2, -1) * sin

    def _rotations(self, positions: int) -> None:
        """Tables for these positions and for those that a tree may reach. [P, d] each."""
        if positions + CHUNK > len(self._cos):
            every = torch.arange(2 * (positions + CHUNK), device=self._cos.device)
            cos, sin = rotation(every[None], self.config.head_dim, self.config.rope_theta)
            first, second = sin[0, 0].chunk(2, -1)
            self._cos, self._sin = (t.to(self._embeddings.dtype) for t in (cos[0, 0], torch.cat([-first, second], -1)))


def _joined(first: nn.Linear, second: nn.Linear) -> nn.Linear:
    """One layer with the outputs of both."""
    bias = None if first.bias is None else torch.cat([first.bias, second.bias])
    return linear_of(torch.cat([first.weight, second.weight]), bias)
