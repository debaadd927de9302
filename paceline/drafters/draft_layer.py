"""A draft head's decoder layer, its final norm and its output layer over a cache of its own: native, or in torch.

A level of a tree is a pass: its rows are the nodes of the level, and `old` nodes of the levels above are in the cache
already, after the columns that are kept.

    columns   0 .. s - 1 | s .. s + old - 1 | s + old .. s + old + N - 1       s: `starts` of the row
    hold      kept       | levels above     | this level
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from ..core.tree import ancestors
from ..heads.parts import Attention, Mlp, Output, rotation
from ..kernels.library import FORMATS, Held, Layer, Model, Norm, Pass, address, library, run
from ..quant.packed import PackedLinear, pack_linears
from .top_tokens import Best

BLOCK = 64
"""Columns are added to a cache in multiples of this many."""


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
    slots, starts: the slot of each row of the batch, and how many of its columns are kept.
    projects: the rows are yet to be made, by `LayerParts.project`, of what is given in their place [B, N, S].
    ids: the tokens whose embeddings are read beside the rows [B, N].
    parents: the parents of all nodes of the trees [B, old + N] on the CPU, -1 for the last kept column; None: chains.
    old: the number of nodes of the levels above.
    head_rows: the number of last rows that get logits.
    top: how many of the largest logits to find.
    ends: False for a pass that only writes keys and values.
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
    ends: bool = True
    projects: bool = False


@final
class DraftCache:
    """Keys and values of a head, a tensor [slots, H, capacity, d] for each of its layers, grown as needed.

    lengths: the columns of each slot that are kept. The next pass overwrites the columns after them.
    """

    def __init__(
        self, num_slots: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, layers: int = 1
    ):
        # Zeros, not uninitialised memory: a column that is masked weighs 0, and 0 * NaN is NaN.
        size = num_slots, heads, 4 * BLOCK, head_dim
        self.keys = [torch.zeros(size, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros_like(keys) for keys in self.keys]
        self.lengths = [0] * num_slots

    def ensure(self, columns: int) -> None:
        """Make room for this many columns."""
        capacity = self.keys[0].shape[2]
        if columns > capacity:
            more = max(2 * capacity, -(-columns // BLOCK) * BLOCK) - capacity
            for tensors in (self.keys, self.values):
                tensors[:] = [nn.functional.pad(held, (0, 0, 0, more)) for held in tensors]

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.lengths[slot] = 0


@dataclass(frozen=True, eq=False)
class LayerParts:
    """The modules of a decoder layer with its output layer `head`; a norm is None where there is none.

    theta: the base of its rotary embedding.
    beside_norm: the norm of the rows, in a layer that also reads their tokens' `embeddings` [V, E], normed by
        `input_norm`.
    beside_stays: the residual stream begins with the normed rows.
    project: the linear layer of passes that give something else in the place of rows.
    """

    attention: Attention
    mlp: Mlp
    head: nn.Module
    theta: float
    mlp_norm: nn.RMSNorm
    input_norm: nn.RMSNorm | None = None
    final_norm: nn.RMSNorm | None = None
    beside_norm: nn.RMSNorm | None = None
    beside_stays: bool = False
    embeddings: Tensor | None = None
    project: nn.Module | None = None


def runs_natively(weight: Tensor) -> bool:
    """Whether layers with weights like this one run in the native library."""
    return weight.device.type == "cpu" and weight.dtype in FORMATS and library() is not None


class NativeLayer:
    """A layer whose linear layers are packed."""

    def __init__(self, parts: LayerParts):
        self.held = Held()
        made, head, embeddings, d = Layer(), parts.head, parts.embeddings, parts.attention.head_dim
        assert isinstance(head, PackedLinear)
        for module, names in ((parts.attention, ("q", "k", "v", "o")), (parts.mlp, ("gate", "up", "down"))):
            for name in names:
                setattr(made, name, self._matrix(getattr(module, f"{name}_proj")))
        made.heads, made.kv_heads, made.head_dim = made.q.outs // d, made.k.outs // d, d
        made.rotary_dim, made.scale, made.residual = d, d**-0.5, 1.0
        made.input, made.before_mlp, made.beside = map(
            self._norm, (parts.input_norm, parts.mlp_norm, parts.beside_norm)
        )
        made.beside_stays = parts.beside_stays
        self.vocabulary, self._theta, self._head_dim = head.out_features, parts.theta, d
        self._model = Model(
            layers=(Layer * 1)(made), head=self._matrix(head), final_norm=self._norm(parts.final_norm), num_layers=1,
            hidden=int(made.o.outs), embeddings=address(embeddings),
            vocabulary=0 if embeddings is None else len(embeddings), embedding_scale=1.0, logit_scale=1.0,
            embedding_format=0 if embeddings is None else FORMATS[embeddings.dtype],
            cache_format=FORMATS[head.packed.dtype],
        )  # fmt: skip
        if parts.project is not None:
            assert isinstance(parts.project, PackedLinear)
            self._model.project = self._matrix(parts.project)
        self.held.append(embeddings)
        self._tables = torch.empty(2, 0, d)

    def __call__(self, given: LayerPass) -> Level:
        """Raises `MemoryError`."""
        batch, nodes, _ = given.rows.shape
        where = torch.tensor([given.starts, given.slots])
        rows = (given.rows if given.projects else given.rows.float()).contiguous()
        self._reach(max(given.starts) + given.old + nodes)
        held = Held()
        one = Pass(batch=batch, nodes=nodes, old=given.old, capacity=given.keys.shape[2])
        one.max_position = self._tables.shape[1] - 1
        if given.projects:
            one.inputs, one.input_format = address(rows), FORMATS[rows.dtype]
        else:
            one.rows = address(rows)
        one.ids, one.parents = address(given.ids), address(given.parents)
        one.starts, one.slots = address(where[0]), address(where[1])
        one.cos, one.sin, one.keys, one.values = (held.tensors([t]) for t in (*self._tables, given.keys, given.values))
        hidden = torch.empty((batch, nodes, self._model.hidden) if given.ends else 0)
        logits = torch.empty(batch, given.head_rows, self.vocabulary)
        best = None
        if given.ends:
            one.last = address(hidden)
        if given.head_rows:
            one.head_rows, one.logits = given.head_rows, address(logits)
        if given.head_rows and given.top:
            size = batch, given.head_rows, min(given.top, self.vocabulary)
            best = Best(torch.empty(size, dtype=torch.int32), torch.empty(size))
            one.top, one.top_ids, one.top_logps = size[2], address(best.columns), address(best.logps)
        run(self._model, one)
        return Level(hidden, logits, best)

    def _reach(self, length: int) -> None:
        """Have rotations of every position below `length`, and of some more. [2, P, d]."""
        if length > self._tables.shape[1]:
            cos, sin = rotation(torch.arange(2 * length + 512)[None], self._head_dim, self._theta)
            self._tables = torch.stack([cos[0, 0], sin[0, 0]])

    def _matrix(self, linear: PackedLinear) -> Any:
        described = linear.matrix
        self.held.append(described)
        return described.struct

    def _norm(self, norm: nn.RMSNorm | None) -> Norm:
        if norm is None:
            return Norm()
        assert norm.eps is not None
        return Norm(weight=self.held.floats(norm.weight), eps=norm.eps, kind=1)


class TorchLayer:
    """The same layer in torch, for other devices and dtypes."""

    def __init__(self, parts: LayerParts):
        self._parts = parts

    def __call__(self, given: LayerPass) -> Level:
        """As `NativeLayer`, but it does not look for the best logits."""
        parts, attention = self._parts, self._parts.attention
        rows, keys, values, device = given.rows, given.keys, given.values, given.rows.device
        if given.projects:
            assert parts.project is not None
            rows = parts.project(rows)
        x = residual = rows
        if parts.beside_norm is not None and parts.input_norm is not None:
            assert given.ids is not None
            assert parts.embeddings is not None
            normed = parts.beside_norm(rows)
            x = torch.cat([parts.input_norm(nn.functional.embedding(given.ids, parts.embeddings)), normed], -1)
            residual = normed if parts.beside_stays else rows
        elif parts.input_norm is not None:
            x = parts.input_norm(rows)
        begin, count = torch.tensor(given.starts), rows.shape[1]
        positions, seen = _places(begin, given.parents, given.old, count)
        cos, sin = rotation(positions.to(device), attention.head_dim, parts.theta)
        where = torch.tensor(given.slots, device=device)
        columns = (begin[:, None] + given.old + torch.arange(count)).to(device)

        def write(key: Tensor, value: Tensor) -> None:
            # Finite: an overflow in a row that is forgotten must not outlive it.
            keys[where[:, None], :, columns] = torch.nan_to_num(key).transpose(1, 2)
            values[where[:, None], :, columns] = torch.nan_to_num(value).transpose(1, 2)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            write(key, value)
            known = [held[where, :, : seen.shape[-1]] for held in (keys, values)]
            mask = seen.to(device)[:, None]
            return nn.functional.scaled_dot_product_attention(query, *known, attn_mask=mask, enable_gqa=True)

        if not given.ends:
            write(*attention.keys_values(x, cos, sin))
            return Level(rows.new_empty(0), rows.new_empty(0))
        hidden = residual + attention(x, cos, sin, attend)
        hidden = hidden + parts.mlp(parts.mlp_norm(hidden))
        last = hidden[:, hidden.shape[1] - given.head_rows :]
        if not given.head_rows:
            return Level(hidden, hidden.new_empty(0))
        return Level(hidden, parts.head(last if parts.final_norm is None else parts.final_norm(last)))


def make_layer(parts: LayerParts) -> NativeLayer | TorchLayer:
    """The native layer for a packed output layer, else the one in torch."""
    return NativeLayer(parts) if isinstance(parts.head, PackedLinear) else TorchLayer(parts)


def _places(starts: Tensor, parents: Tensor | None, old: int, count: int) -> tuple[Tensor, Tensor]:
    """Positions [B, N] of the `count` newest nodes, and the columns [B, N, S] that each of them sees."""
    total = old + count
    columns = torch.arange(int(starts.max()) + total)
    if parents is None:  # chains
        positions = starts[:, None] + old + torch.arange(count)
        return positions, columns <= positions[..., None]
    sees = ancestors(parents)
    depth = sees.sum(-1) - 1
    seen = (columns < starts[:, None, None]).repeat(1, count, 1)
    index = starts[:, None, None] + torch.arange(total)
    return starts[:, None] + depth[:, old:], seen.scatter(2, index.expand(-1, count, -1), sees[:, old:])


def native_form(head: nn.Module) -> None:
    """Pack the linear layers of an attached head, the target's output rows included; its norms become float32."""
    output = getattr(head, "output", None)
    if isinstance(output, Output) and len(output.rows):
        head.set_submodule("output", linear_of(output.rows))
    for module in head.modules():
        if isinstance(module, nn.RMSNorm):
            module.float()
    pack_linears(head)


def linear_of(weight: Tensor) -> nn.Linear:
    """A layer around weights [out, in] that exist."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return made
