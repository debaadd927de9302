"""Runs the decoder layer, final norm and output layer of a draft head on a cache of its own: natively, or in torch.

Each level of a tree is one pass. Its rows are the nodes of the level; the `old` nodes of the levels above are in the
cache already, after the committed columns.

    columns   0 .. s - 1 | s .. s + old - 1 | s + old .. s + old + N - 1       s: `starts` of the row
    hold      committed  | levels above     | this level
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.kv_cache import SlotCache
from ..attention.masks import visible
from ..core.interfaces import TargetView
from ..core.tree import ancestors
from ..heads.parts import DecoderLayer, LayerConfig, Output, rotation
from ..kernels import load
from ..kernels.library import FORMATS, Layer, Model, Norm, Pass, Pointers, address, library, run
from ..quant.int8 import Int8Linear
from ..quant.packed import PackedLinear, pack_linears
from .top_tokens import Best

Packed = PackedLinear | Int8Linear
"""A linear layer for the native kernels."""


@dataclass(frozen=True, eq=False)
class Level:
    """The results of a pass.

    hidden: the hidden states [B, N, E].
    logits: the logits over the draft vocabulary of the last M rows, [B, M, Vd].
    best: the largest of these logits, if they were requested and the native library found them.
    """

    hidden: Tensor
    logits: Tensor
    best: Best | None = None

    def at(self, row: int) -> "Level":
        """One of its rows, [B, 1, ...]."""
        pick = lambda t: t[:, row : row + 1]  # noqa: E731
        best = None if self.best is None else Best(*map(pick, self.best))
        return Level(pick(self.hidden), pick(self.logits), best)


@dataclass(frozen=True, eq=False)
class LayerPass:
    """One pass over rows [B, N, E] of some slots of a cache.

    keys, values: the cache [slots, H, capacity, d], in the dtype of the weights.
    slots, starts: the slot of each row of the batch, and how many columns it has committed.
    rows: the inputs [B, N, E]; with `needs_projection` the inputs [B, N, S] of `LayerParts.project`.
    ids: the tokens [B, N] of an EAGLE-3 layer, which also reads their embeddings.
    parents: the parents of all nodes of the trees [B, old + N] on the CPU, -1: the last committed column. None: chains.
    old: the number of nodes of the levels above.
    head_rows: the number of last rows that get logits.
    top: how many of the largest logits to find.
    kv_only: whether the pass only writes keys and values.
    """

    keys: Tensor
    values: Tensor
    slots: Sequence[int]
    starts: Sequence[int]
    rows: Tensor
    ids: Tensor | None = None
    parents: Tensor | None = None
    old: int = 0
    head_rows: int = 0
    top: int = 0
    kv_only: bool = False
    needs_projection: bool = False


def head_cache(target: TargetView, config: LayerConfig, num_layers: int = 1) -> SlotCache:
    """An empty cache for the layers of a head, with the slots of the target; in its dtype, on its device."""
    cache = SlotCache(target.num_slots, target.max_length, num_layers)
    heads, dims = [config.num_key_value_heads] * num_layers, [config.head_dim] * num_layers
    cache.tensors(heads, dims, target.loaded.dtype, target.loaded.device)
    return cache


@dataclass(frozen=True, eq=False)
class LayerParts:
    """The modules that a pass runs: a decoder layer, its norms (None if absent) and its output layer `head`.

    theta: the base of its rotary embedding.
    hidden_norm: of an EAGLE-3 layer, which reads the normed rows beside the `embeddings` [V, E] of their tokens, normed
        by `input_norm`.
    norm_before_residual: whether the residual stream of such a layer starts with the normed rows.
    project: the linear layer for passes with `needs_projection`.
    """

    layer: DecoderLayer
    head: nn.Module
    theta: float
    input_norm: nn.RMSNorm | None = None
    final_norm: nn.RMSNorm | None = None
    hidden_norm: nn.RMSNorm | None = None
    norm_before_residual: bool = False
    embeddings: Tensor | None = None
    project: nn.Module | None = None


def runs_natively(weight: Tensor) -> bool:
    """Whether layers with weights like this one run in the native library."""
    return weight.device.type == "cpu" and weight.dtype in FORMATS and library() is not None


class NativeLayer:
    """Runs a layer in the native library; its linear layers are packed."""

    def __init__(self, parts: LayerParts):
        self.pointers = Pointers()
        layer, made, head, embeddings = parts.layer, Layer(), parts.head, parts.embeddings
        d = layer.self_attn.head_dim
        assert isinstance(head, Packed)
        for module, names in ((layer.self_attn, ("q", "k", "v", "o")), (layer.mlp, ("gate", "up", "down"))):
            for name in names:
                setattr(made, name, self._matrix(getattr(module, f"{name}_proj")))
        made.heads, made.kv_heads, made.head_dim = made.q.outs // d, made.k.outs // d, d
        made.rotary_dim, made.scale, made.residual = d, d**-0.5, 1.0
        norms = parts.input_norm, layer.post_attention_layernorm, parts.hidden_norm
        made.input, made.before_mlp, made.hidden_norm = map(self._norm, norms)
        made.norm_before_residual = parts.norm_before_residual
        self.vocabulary, self._theta, self._head_dim = head.out_features, parts.theta, d
        self._model = Model(
            layers=(Layer * 1)(made), head=self._matrix(head), final_norm=self._norm(parts.final_norm), num_layers=1,
            hidden=int(made.o.outs), embeddings=address(embeddings),
            vocabulary=0 if embeddings is None else len(embeddings), embedding_scale=1.0, logit_scale=1.0,
            embedding_format=0 if embeddings is None else FORMATS[embeddings.dtype],
        )  # fmt: skip
        if parts.project is not None:
            assert isinstance(parts.project, Packed)
            self._model.project = self._matrix(parts.project)
        self.pointers.append(embeddings)
        self._tables = torch.empty(2, 0, d)  # cosines and sines by position

    def __call__(self, given: LayerPass) -> Level:
        """Raises `MemoryError`."""
        batch, nodes, _ = given.rows.shape
        where = torch.tensor([given.starts, given.slots])
        rows = (given.rows if given.needs_projection else given.rows.float()).contiguous()
        self._extend_tables(max(given.starts) + given.old + nodes)
        pointers = Pointers()
        one = Pass(batch=batch, nodes=nodes, old=given.old, capacity=given.keys.shape[2])
        self._model.cache_format = FORMATS[given.keys.dtype]
        one.max_position = self._tables.shape[1] - 1
        if given.needs_projection:
            one.inputs, one.input_format = address(rows), FORMATS[rows.dtype]
        else:
            one.rows = address(rows)
        one.ids, one.parents = address(given.ids), address(given.parents)
        one.starts, one.slots = address(where[0]), address(where[1])
        one.cos, one.sin, one.keys, one.values = (
            pointers.tensors([t]) for t in (*self._tables, given.keys, given.values)
        )
        hidden = torch.empty(0 if given.kv_only else (batch, nodes, self._model.hidden))
        logits = torch.empty(batch, given.head_rows, self.vocabulary)
        best = None
        if not given.kv_only:
            one.last_hidden = address(hidden)
        if given.head_rows:
            one.head_rows, one.logits = given.head_rows, address(logits)
        if given.head_rows and given.top:
            size = batch, given.head_rows, min(given.top, self.vocabulary)
            best = Best(torch.empty(size, dtype=torch.int32), torch.empty(size))
            one.top, one.top_ids, one.top_logps = size[2], address(best.columns), address(best.logps)
        run(self._model, one)
        return Level(hidden, logits, best)

    def _extend_tables(self, length: int) -> None:
        """Make the tables [2, P, d] hold at least all positions below `length`."""
        if length > self._tables.shape[1]:
            cos, sin = rotation(torch.arange(2 * length + 512)[None], self._head_dim, self._theta)
            self._tables = torch.stack([cos[0, 0], sin[0, 0]])

    def _matrix(self, linear: Packed) -> Any:
        matrix = linear.matrix
        assert matrix is not None
        self.pointers.append(matrix)
        return matrix.struct

    def _norm(self, norm: nn.RMSNorm | None) -> Norm:
        if norm is None:
            return Norm()
        assert norm.eps is not None
        return Norm(weight=self.pointers.floats(norm.weight), eps=norm.eps, kind=1)


class TorchLayer:
    """Runs the same layer in torch, for other devices and dtypes."""

    def __init__(self, parts: LayerParts):
        self._parts = parts

    def __call__(self, given: LayerPass) -> Level:
        """As `NativeLayer`, but without the largest logits."""
        parts, attention = self._parts, self._parts.layer.self_attn
        rows, keys, values, device = given.rows, given.keys, given.values, given.rows.device
        if given.needs_projection:
            assert parts.project is not None
            rows = parts.project(rows)
        x = residual = rows
        if parts.hidden_norm is not None and parts.input_norm is not None:
            assert given.ids is not None
            assert parts.embeddings is not None
            normed = parts.hidden_norm(rows)
            x = torch.cat([parts.input_norm(nn.functional.embedding(given.ids, parts.embeddings)), normed], -1)
            residual = normed if parts.norm_before_residual else rows
        elif parts.input_norm is not None:
            x = parts.input_norm(rows)
        begin, count = torch.tensor(given.starts), rows.shape[1]
        positions, seen = _positions_and_mask(begin, given.parents, given.old, count)
        cos, sin = rotation(positions.to(device), attention.head_dim, parts.theta)
        where = torch.tensor(given.slots, device=device)
        columns = (begin[:, None] + given.old + torch.arange(count)).to(device)

        def write(key: Tensor, value: Tensor) -> None:
            # Finite: an overflow in a dropped row must not reach later ones as 0 * NaN.
            keys[where[:, None], :, columns] = torch.nan_to_num(key).transpose(1, 2)
            values[where[:, None], :, columns] = torch.nan_to_num(value).transpose(1, 2)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            write(key, value)
            cached = [tensor[where, :, : seen.shape[-1]] for tensor in (keys, values)]
            mask = seen.to(device)[:, None]
            return nn.functional.scaled_dot_product_attention(query, *cached, attn_mask=mask, enable_gqa=True)

        if given.kv_only:
            write(*attention.keys_values(x, cos, sin))
            return Level(rows.new_empty(0), rows.new_empty(0))
        hidden = parts.layer.add(residual, x, cos, sin, attend)
        last = hidden[:, hidden.shape[1] - given.head_rows :]
        if not given.head_rows:
            return Level(hidden, hidden.new_empty(0))
        return Level(hidden, parts.head(last if parts.final_norm is None else parts.final_norm(last)))


def make_layer(parts: LayerParts) -> NativeLayer | TorchLayer:
    """The native layer if the output layer is packed, else the one in torch."""
    return NativeLayer(parts) if isinstance(parts.head, Packed) else TorchLayer(parts)


def _positions_and_mask(starts: Tensor, parents: Tensor | None, old: int, count: int) -> tuple[Tensor, Tensor]:
    """Positions [B, N] of the `count` newest nodes, and the attention mask [B, N, S] over the columns."""
    total = old + count
    chains = torch.ones(len(starts), total, total, dtype=torch.bool).tril()
    mask = (chains if parents is None else ancestors(parents))[:, old:]
    return starts[:, None] + mask.sum(-1) - 1, visible(starts, mask, int(starts.max()) + total)


def pack_head(head: nn.Module) -> None:
    """Pack the linear layers of an attached head, the target's output rows included, and make its norms float32.

    Those of 16 bits become INT8: half the bytes to read, with the same acceptance (docs/results.md, "Heads in INT8").
    The portable kernels, which convert every code, would take twice the time.
    """
    output = getattr(head, "output", None)
    if isinstance(output, Output) and len(output.rows):
        head.set_submodule("output", linear_of(output.rows))
    for module in head.modules():
        if isinstance(module, nn.RMSNorm):
            module.float()
    has_16_bits = any(module.weight.dtype.itemsize == 2 for module in head.modules() if isinstance(module, nn.Linear))
    pack_linears(head, Int8Linear if has_16_bits and load().isa != "portable" else PackedLinear)


def linear_of(weight: Tensor) -> nn.Linear:
    """A linear layer that holds these weights [out, in]."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return made
