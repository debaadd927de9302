"""Tree attention: a node attends to the committed prefix and its ancestors, nothing else.

If the layout is `batch_invariant`, a node reads the columns of plain decoding in whole blocks of 64, so that sums are
taken in the same order (`PassLayout.segments`), and a branching tree is computed as the chains it consists of.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import IncompatibleModels
from .masks import Chunk, PassLayout, Segment, Window

NAME = "paceline"


@dataclass(frozen=True)
class Scores:
    """How attention scores are computed. sinks: logits [Hq] that take part in the normalisation only."""

    scale: float
    window: Window = None
    softcap: float | None = None
    sinks: Tensor | None = None


def attend(query: Tensor, key: Tensor, value: Tensor, layout: PassLayout, how: Scores) -> Tensor:
    """Attention over the slot cache: query [B, Hq, N, d], key, value [slots, H, S, d] -> [B, N, Hq, dv]."""
    tree = layout.tree
    if layout.batch_invariant and tree is not None and not tree.is_chain:
        return _attend_chains(query, key, value, layout, how)
    if how.softcap is not None or how.sinks is not None or key.shape[-1] != value.shape[-1]:
        return _attend_rows(query, key, value, layout, how)
    kernel = nn.functional.scaled_dot_product_attention
    (batch, heads, nodes, d), kv_heads = query.shape, key.shape[1]
    if tree is None:  # prefill, many nodes in the same columns of each row: the kernel handles grouped queries itself
        mask = layout.visible(how.window)[0]
        slots, columns = slice(layout.slots[0], layout.slots[0] + batch), mask.shape[1]
        k, v = key[slots, :, :columns], value[slots, :, :columns]
        return kernel(query, k, v, attn_mask=mask, scale=how.scale, enable_gqa=True).transpose(1, 2)
    groups = heads // kv_heads
    segments = layout.segments(how.window, groups, query.dtype)
    # The queries of a key head form one matrix, so that its keys are read once: [B, H, N G, d]
    folded = query.view(batch, kv_heads, groups, nodes, d).transpose(2, 3).reshape(batch, kv_heads, nodes * groups, d)
    parts = []
    for part in segments:
        begin, end, rows, columns = part.nodes.start * groups, part.nodes.stop * groups, *part.mask.shape[2:]
        q = folded[part.rows, :, begin:end]
        q = nn.functional.pad(q, (0, 0, 0, rows - q.shape[2])) if rows != q.shape[2] else q
        k, v = key[part.slots, :, :columns], value[part.slots, :, :columns]
        parts.append(kernel(q, k, v, attn_mask=part.mask, scale=how.scale)[:, :, : end - begin])
    out = parts[0] if len(parts) == 1 else _assembled(parts, segments)
    return out.reshape(batch, kv_heads, nodes, groups, d).permute(0, 2, 1, 3, 4).reshape(batch, nodes, heads, d)


def _assembled(parts: list[Tensor], segments: list[Segment]) -> Tensor:
    """The results of the segments in one tensor: nodes concatenated within a row, then rows."""
    rows: list[Tensor] = []
    for _, group in itertools.groupby(zip(segments, parts, strict=True), key=lambda pair: pair[0].rows.start):
        pieces = [part for _, part in group]
        rows.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2))
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _attend_chains(query: Tensor, key: Tensor, value: Tensor, layout: PassLayout, how: Scores) -> Tensor:
    """Attention over trees as the chains they consist of, each with its keys copied in the order of plain decoding."""
    batch, heads, nodes, _ = query.shape
    out = query.new_zeros(batch, nodes, heads, value.shape[-1])
    for row, (slot, chains) in enumerate(zip(layout.slots, layout.chains, strict=True)):
        for chain in chains:
            columns = chain.columns.clamp(max=key.shape[2] - 1)
            k, v = key[slot, None, :, columns], value[slot, None, :, columns]
            part = attend(query[row, None, :, chain.nodes], k, v, chain.layout, how)
            out[row, chain.path] = part[0, : len(chain.path)]
    return out


def _attend_rows(query: Tensor, key: Tensor, value: Tensor, layout: PassLayout, how: Scores) -> Tensor:
    """Attention with what the kernel lacks: soft caps, sinks, values of another width than keys.

    Products are in the model's dtype, the softmax in float32.
    """
    kv_heads, (_, heads, nodes, _), rows = key.shape[1], query.shape, []
    for row, (slot, mask) in enumerate(zip(layout.slots, layout.visible(how.window), strict=True)):
        columns = mask.shape[1]
        k, v = key[slot, :, :columns], value[slot, :, :columns]
        scores = torch.matmul(query[row].reshape(kv_heads, -1, k.shape[-1]), k.transpose(1, 2))
        scores = scores.view(heads, nodes, columns).float().mul_(how.scale)
        if how.softcap is not None:
            scores = torch.tanh(scores / how.softcap) * how.softcap
        scores.masked_fill_(~mask, float("-inf"))
        if how.sinks is not None:
            scores = torch.cat([scores, how.sinks.float().view(heads, 1, 1).expand(-1, nodes, 1)], -1)
        weights = torch.softmax(scores, -1)[..., :columns]
        rows.append(torch.matmul(weights.to(v.dtype).reshape(kv_heads, -1, columns), v).view(heads, nodes, -1))
    return torch.stack(rows).transpose(1, 2)


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
    """`attend` as the attention function "paceline" of transformers. Models pass the layout on as `paceline_pass`.

    query: [B, Hq, N, d]. key, value: [slots, H, S, d] from `SlotCache.update`. Returns [B, N, Hq, dv].
    """
    if paceline_pass is None:
        raise IncompatibleModels(
            f"{type(module).__name__} was called without the layout of the pass",
            fix="decode through paceline, or give the model back its attention with set_attn_implementation('sdpa')",
        )
    if position_bias is not None:
        raise IncompatibleModels(f"{type(module).__name__} adds a position bias, which trees do not support")
    paceline_pass.num_calls += 1
    config: Any = getattr(module, "config", None)
    if getattr(config, "attn_temperature_tuning", False) and not module.use_rope:
        query = (query * _temperatures(config, paceline_pass)).to(query.dtype)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    window = _window(module, config, sliding_window)
    out = attend(query, key, value, paceline_pass, Scores(scale, window, softcap, s_aux))
    return out.contiguous(), None


def _window(module: Any, config: Any, sliding_window: int | None) -> Window:
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[module.layer_idx] == "chunked_attention":
        return Chunk(config.attention_chunk_size)
    return sliding_window


def _temperatures(config: Any, layout: PassLayout) -> Tensor:
    """What Llama 4 multiplies the queries of layers without rotation with, by their columns. [B, 1, N, 1]."""
    reached = torch.floor((layout.columns + 1) / config.floor_scale)
    return (torch.log1p(reached) * config.attn_scale + 1)[:, None, :, None]


def use_tree_attention(model: Any) -> None:
    """Have the layers of a transformers model call `tree_attention`, as far as its architecture lets them."""
    from transformers import AttentionInterface  # with all that models are made of

    AttentionInterface.register(NAME, tree_attention)
    model.set_attn_implementation(NAME)
    _tune_by_rows(model, False)


def use_plain_attention(model: Any) -> None:
    """Undo `use_tree_attention`."""
    model.set_attn_implementation("eager")
    _tune_by_rows(model, True)


def _tune_by_rows(model: nn.Module, on: bool) -> None:
    """Whether layers multiply queries by their rows in a pass, which are not their columns in a tree."""
    for module in model.modules():
        if hasattr(module, "attn_temperature_tuning"):
            module.attn_temperature_tuning = on and module.config.attn_temperature_tuning  # type: ignore[union-attr]
