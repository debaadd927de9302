"""A draft head's decoder layer, its final norm and its output layer as one pass of the native library (CPU).

A level of a tree is a pass: its rows are the nodes of the level, and `old` nodes of the levels above lie in the cache
already, behind the columns that are kept.

    columns   0 .. s - 1 | s .. s + old - 1 | s + old .. s + old + N - 1       s: `starts` of the row
    hold      kept       | levels above     | this level
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..heads.parts import Attention, Mlp, Output, rotation
from ..kernels.library import FORMATS, Layer, Model, Norm, Pass, address, addresses, library, run
from ..quant import PackedLinear, pack_linears
from .top_tokens import Best


@dataclass(frozen=True, eq=False)
class Level:
    """What rows leave behind. hidden: [B, N, E]. logits: over the draft vocabulary [B, M, Vd], of the last M of them.

    best: the largest of these logits, where they were asked for.
    """

    hidden: Tensor
    logits: Tensor
    best: Best | None = None


@dataclass(frozen=True)
class Norms:
    """Of a layer; None where there is none. beside, beside_stays: as in `Layer` of the kernels."""

    input: nn.RMSNorm | None
    mlp: nn.RMSNorm
    final: nn.RMSNorm | None
    beside: nn.RMSNorm | None = None
    beside_stays: bool = False


class DraftLayer:
    """A layer whose linear layers are packed, over keys and values [slots, H, capacity, d] in the type of the weights.

    embeddings: [V, E], for layers that read a token's embedding beside each row.
    """

    def __init__(
        self,
        attention: Attention,
        mlp: Mlp,
        norms: Norms,
        head: PackedLinear,
        theta: float,
        embeddings: Tensor | None = None,
    ):
        self.held: list[object] = []
        made = Layer()
        linears = {name: getattr(attention, f"{name}_proj") for name in "qkvo"}
        for name in ("gate", "up", "down"):
            linears[name] = getattr(mlp, f"{name}_proj")
        for name, linear in linears.items():
            setattr(made, name, self._matrix(linear))
        d = attention.head_dim
        made.heads, made.kv_heads, made.head_dim = made.q.outs // d, made.k.outs // d, d
        made.rotary_dim, made.scale, made.residual = d, d**-0.5, 1.0
        made.input, made.before_mlp, made.beside = map(self._norm, (norms.input, norms.mlp, norms.beside))
        made.beside_stays = norms.beside_stays
        self.size, self.vocabulary, self._theta = int(made.o.outs), head.out_features, theta
        self._head_dim = d
        self._model = Model(
            layers=(Layer * 1)(made), head=self._matrix(head), final_norm=self._norm(norms.final), num_layers=1,
            hidden=self.size, embeddings=address(embeddings),
            vocabulary=0 if embeddings is None else len(embeddings), embedding_scale=1.0, logit_scale=1.0,
            embedding_format=0 if embeddings is None else FORMATS[embeddings.dtype],
            cache_format=FORMATS[head.packed.dtype],
        )  # fmt: skip
        self.held.append(embeddings)
        self._tables, self._rotations = torch.empty(2, 0, d), (c_void_p(), c_void_p())
        self._cached: tuple[Tensor, Tensor, Any, Any] | None = None  # keys and values of the last pass, and where

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether layers with weights like this one run here."""
        return weight.device.type == "cpu" and weight.dtype in FORMATS and library() is not None

    def __call__(
        self,
        keys: Tensor,
        values: Tensor,
        slots: Sequence[int],
        starts: Sequence[int],
        rows: Tensor,
        ids: Tensor | None = None,
        parents: Tensor | None = None,
        old: int = 0,
        head_rows: int = 0,
        top: int = 0,
        ends: bool = True,
    ) -> Level:
        """One pass over rows [B, N, E] of these slots; with `ends` False it only leaves keys and values.

        ids: tokens that stand beside the rows [B, N]. parents: of all nodes of the trees [B, old + N], -1 the last kept
        column; None: chains. top: so many of the largest logits are found. Raises `MemoryError`.
        """
        batch, nodes, _ = rows.shape
        where = torch.tensor([starts, slots])
        rows = rows.float().contiguous()
        self._reach(max(starts) + old + nodes)
        if self._cached is None or self._cached[0] is not keys:
            self._cached = keys, values, addresses([keys]), addresses([values])
        one = Pass(batch=batch, nodes=nodes, old=old, capacity=keys.shape[2], max_position=self._tables.shape[1] - 1)
        one.rows, one.ids, one.parents = address(rows), address(ids), address(parents)
        one.starts, one.slots = address(where[0]), address(where[1])
        one.cos, one.sin = self._rotations
        one.keys, one.values = _place(self._cached[2]), _place(self._cached[3])
        hidden = torch.empty(rows.shape if ends else 0)
        logits = torch.empty(batch, head_rows, self.vocabulary)
        best = None
        if ends:
            one.last = address(hidden)
        if head_rows:
            one.head_rows, one.logits = head_rows, address(logits)
        if head_rows and top:
            size = batch, head_rows, min(top, self.vocabulary)
            best = Best(torch.empty(size, dtype=torch.int32), torch.empty(size))
            one.top, one.top_ids, one.top_logps = size[2], address(best.columns), address(best.logps)
        run(self._model, one)
        return Level(hidden, logits, best)

    def _reach(self, length: int) -> None:
        """Have rotations of every position below `length`, and of some more. [2, P, d]."""
        if length > self._tables.shape[1]:
            cos, sin = rotation(torch.arange(2 * length + 512)[None], self._head_dim, self._theta)
            self._tables = torch.stack([cos[0, 0], sin[0, 0]])
            self._pointers = addresses([self._tables[0]]), addresses([self._tables[1]])
            self._rotations = _place(self._pointers[0]), _place(self._pointers[1])

    def _matrix(self, linear: PackedLinear) -> Any:
        described = linear.matrix
        self.held.append(described)
        return described.struct

    def _norm(self, norm: nn.RMSNorm | None) -> Norm:
        if norm is None:
            return Norm()
        weight = norm.weight.detach().float().contiguous()
        self.held.append(weight)
        assert norm.eps is not None
        return Norm(weight=address(weight), eps=norm.eps, kind=1)


def native_form(head: nn.Module) -> None:
    """Pack the linear layers of an attached head, lent output rows included; its norms become float32."""
    lent = getattr(head, "output", None)
    if isinstance(lent, Output) and len(lent.rows):
        head.set_submodule("output", linear_of(lent.rows))
    for module in head.modules():
        if isinstance(module, nn.RMSNorm):
            module.float()
    pack_linears(head)


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A layer around weights [out, in] that exist."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    made.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return made


def _place(array: Any) -> Any:
    return c_void_p(ctypes.addressof(array))
