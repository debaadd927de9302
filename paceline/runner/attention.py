"""Tree attention: a node sees the committed prefix and its ancestors, nothing else.

`tree_attention` is registered with transformers under the name "paceline"; the layout of the pass reaches it as the
keyword `paceline_pass`, which models hand through to their attention function untouched.

Two properties are kept on purpose:
- columns are read in whole blocks of 64 and each row of a batch up to its own length, so the bits of a row depend
  neither on how many nodes follow it nor on its neighbours (masked columns add exact zeros);
- with `canonical` set, a branching tree is computed as the chains it consists of, each with its keys in the order
  that plain decoding would have them, because a sum taken in another order has other bits.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ..core.tree import TokenTree
from ..errors import IncompatibleModels
from .kv_cache import round_up

NAME = "paceline"


@dataclass
class PassLayout:
    """Where the nodes of one pass lie: row b has `starts[b]` committed columns, then its N nodes.

    tree is None for a prefill chunk: a plain causal chain of `num_nodes` nodes.
    """

    starts: list[int]
    num_nodes: int
    tree: TokenTree | None
    canonical: bool
    row_multiple: int = 1
    max_length: int = 1 << 30
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    num_calls: int = 0  # layers that went through `tree_attention`
    _masks: dict[int | None, list[Tensor]] = field(default_factory=dict)

    @cached_property
    def depth(self) -> Tensor:
        """Edges to the root. [B, N]."""
        if self.tree is not None:
            return self.tree.depth
        return torch.arange(self.num_nodes, device=self.device).expand(len(self.starts), -1)

    @cached_property
    def position_ids(self) -> Tensor:
        """Committed length + depth. [B, N]. Only padding can reach past the context; it stays on the last place."""
        return (torch.tensor(self.starts, device=self.device)[:, None] + self.depth).clamp_(max=self.max_length - 1)

    def visible(self, window: int | None) -> list[Tensor]:
        """For each row a mask [N, S_b] of columns a node may see; built once per pass and window."""
        if window not in self._masks:
            self._masks[window] = [self._visible(row, window) for row in range(len(self.starts))]
        return self._masks[window]

    def _visible(self, row: int, window: int | None) -> Tensor:
        start, n = self.starts[row], self.num_nodes
        mask = torch.zeros(n, round_up(start + n), dtype=torch.bool, device=self.device)
        mask[:, :start] = True
        if self.tree is None:
            mask[:, start : start + n] = torch.ones(n, n, dtype=torch.bool, device=self.device).tril()
        else:
            mask[:, start : start + n] = self.tree.ancestor_mask[row]
        if window is not None:
            column = torch.arange(mask.shape[1], device=self.device)
            column[start : start + n] = self.position_ids[row]
            mask &= self.position_ids[row][:, None] - column < window
        return mask

    @cached_property
    def leaf_paths(self) -> list[list[list[int]]]:
        """For each row the root-to-leaf paths, root included; a probe without children is a leaf of its own."""
        assert self.tree is not None
        paths: list[list[list[int]]] = []
        for row, parents in enumerate(self.tree.parents.tolist()):
            leaves = sorted(set(range(self.num_nodes)) - set(parents))
            paths.append([[0, *self.tree.path_to(row, leaf)] for leaf in leaves])
        return paths


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Softmax attention of one sequence: query [Hq, R, d], key [H, S, d], value [H, S, dv], mask [R, S] -> [Hq, R, dv].

    The products run in the model's dtype, the softmax in float32. sinks: [Hq] logits that take part in the
    normalisation only.
    """
    heads, rows = query.shape[0], query.shape[1]
    kv_heads, columns = key.shape[0], key.shape[1]
    groups = heads // kv_heads
    scores = torch.matmul(query.reshape(kv_heads, groups * rows, -1), key.transpose(1, 2))
    scores = scores.view(kv_heads, groups, rows, columns).float().mul_(scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores.masked_fill_(~mask, float("-inf"))
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        extra = sinks.float().view(kv_heads, groups, 1, 1).expand(-1, -1, rows, 1)
        weights = torch.softmax(torch.cat([scores, extra], dim=-1), dim=-1)[..., :-1]
    out = torch.matmul(weights.to(value.dtype).view(kv_heads, groups * rows, columns), value)
    return out.view(heads, rows, -1)


def _attend_chains(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    paths: list[list[int]],
    start: int,
    multiple: int,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """A tree as the chains it consists of: each path's keys are first laid out as plain decoding has them."""
    out = query.new_zeros(query.shape[0], query.shape[1], value.shape[-1])
    for path in paths:
        rows = path + [path[-1]] * (round_up(len(path), multiple) - len(path))
        columns = torch.arange(round_up(start + len(path)), device=key.device)
        columns[start : start + len(path)] = torch.tensor(path, device=key.device) + start
        columns.clamp_(max=key.shape[1] - 1)
        position = torch.tensor([start + min(i, len(path) - 1) for i in range(len(rows))], device=key.device)
        order = torch.arange(len(columns), device=key.device)
        mask = order <= position[:, None]
        if window is not None:
            mask &= position[:, None] - order < window
        part = _attend(query[:, rows], key[:, columns], value[:, columns], mask, scale, softcap, sinks)
        out[:, path] = part[:, : len(path)]
    return out


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    paceline_pass: PassLayout | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention over the slot cache, in transformers' convention.

    query: [B, Hq, N, d]. key, value: [B, H, S, d] as `SlotCache.update` returned them. Returns [B, N, Hq, dv].
    """
    if paceline_pass is None:
        raise IncompatibleModels(
            f"{type(module).__name__} was called without the layout of the pass",
            fix="decode through paceline, or give the model back its attention with set_attn_implementation('sdpa')",
        )
    if position_bias is not None:
        raise IncompatibleModels(f"{type(module).__name__} adds a position bias, which trees do not support")
    layout = paceline_pass
    layout.num_calls += 1
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    rows = []
    for row, mask in enumerate(layout.visible(sliding_window)):
        q, k, v = query[row], key[row, :, : mask.shape[1]], value[row, :, : mask.shape[1]]
        if layout.canonical and layout.tree is not None and not layout.tree.is_chain:
            paths, start = layout.leaf_paths[row], layout.starts[row]
            rows.append(
                _attend_chains(q, k, v, paths, start, layout.row_multiple, sliding_window, scale, softcap, s_aux)
            )
        elif layout.tree is None and softcap is None and s_aux is None and k.shape[-1] == v.shape[-1]:
            # Prefill: many rows, so the fused kernel, which never holds the whole score matrix.
            fused = nn.functional.scaled_dot_product_attention
            rows.append(fused(q[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=True)[0])
        else:
            rows.append(_attend(q, k, v, mask, scale, softcap, s_aux))
    return torch.stack(rows).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, tree_attention)
