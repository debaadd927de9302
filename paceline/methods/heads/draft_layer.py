"""Runs the decoder layers, final norm and output layer of a draft head on a cache of its own: in kernels, or in torch.

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

from ... import kernels
from ...attention.kv_cache import SlotCache
from ...attention.masks import visible
from ...core.interfaces import Target
from ...core.tree import ancestors
from ...kernels import load
from ...kernels.library import FORMATS
from ...quant.int8 import fits_int8, to_int8
from ...quant.packed import PackedLinear, has_kernels, pack_linears
from ...target.loaded import LoadedModel
from ..eagle.head import EagleHead
from .layers import LayersConfig
from .parts import DraftHead, Output
from .top_tokens import Best


@dataclass(frozen=True, eq=False)
class Level:
    """The results of a pass.

    hidden: the hidden states [B, N, E].
    logits: the logits over the draft vocabulary of the last M rows, [B, M, Vd].
    best: the largest of these logits, if they were requested and kernels found them.
    """

    hidden: Tensor
    logits: Tensor
    best: Best | None = None

    def at(self, rows: slice) -> "Level":
        """Some of its rows that have logits, [B, M, ...]."""
        pick = lambda t: t[:, t.shape[1] - self.logits.shape[1] :][:, rows]  # noqa: E731
        best = None if self.best is None else Best(*map(pick, self.best))
        return Level(pick(self.hidden), pick(self.logits), best)


@dataclass(frozen=True, eq=False)
class LayerPass:
    """One pass over tokens [B, N] and states of some slots of a cache.

    keys, values: the cache of each layer [slots, H, capacity, d], in the dtype of the weights.
    slots, starts: the slot of each row of the batch, and how many columns it has committed.
    ids: the tokens [B, N].
    states: the head's own hidden states [B, N, E], or with `of_target` the target's [B, N, S]; None: it reads tokens.
    parents: the parents of all nodes of the trees [B, old + N] on the CPU, -1: the last committed column. None: chains.
    old: the number of nodes of the levels above.
    head_rows: the number of last rows that get logits.
    top: how many of the largest logits to find, if this layer can.
    noise: what is added to the logits before, float32 [B, Vd]; `Level.logits` are without it.
    kv_only: whether only the keys and values are needed.
    is_block: whether every row sees all rows, as in DFlash.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    slots: Sequence[int]
    starts: Sequence[int]
    ids: Tensor
    states: Tensor | None
    of_target: bool = False
    parents: Tensor | None = None
    old: int = 0
    head_rows: int = 0
    top: int = 0
    noise: Tensor | None = None
    kv_only: bool = False
    is_block: bool = False


def head_cache(target: Target, config: LayersConfig) -> SlotCache:
    """An empty cache for the layers of a head, with the slots of the target; in its dtype, on its device."""
    count, loaded = config.num_hidden_layers, target.loaded
    cache = SlotCache(target.num_slots, target.max_length, count)
    widths = [(config.head_dim, config.head_dim)] * count
    cache.tensors([config.num_key_value_heads] * count, widths, loaded.dtype, loaded.device)
    return cache


def runs_natively(target: LoadedModel, head: DraftHead | None = None) -> bool:
    """Whether the layers of a head for this target run in kernels of our own. head: None: one of known layers."""
    known = head is None or not head.runs_in_torch
    return known and target.dtype in FORMATS and kernels.kernels_for(target.device) is not None


class NativeLayer:
    """Runs the layers of an attached head, see `pack_head`, in the kernels of its device.

    project: what makes the rows that the first layer reads, in every pass with `pairs` (of a token's embedding and a
        state), and otherwise of the target's states; None: that layer reads embeddings.
    context: a norm in the place of each layer's first; then all layers only make keys and values of the same rows.
    """

    def __init__(self, head: Any, project: nn.Module | None, pairs: bool, context: nn.RMSNorm | None = None):
        table, config = head.embeddings.detach().contiguous(), head.config
        self._device, self._kernels = table.device, kernels.kernels_for(table.device)
        self.pointers, self._head = self._kernels.Pointers(), head
        output = self._matrix(head.lm_head if head.owns_rows else head.output)
        self.vocabulary, self._pairs, self._context = config.draft_vocab_size, pairs, context
        layers = [self._made(layer) for layer in head.layers]
        norms = (self._norm(getattr(head, name, None)) for name in ("norm", "enorm", "hnorm"))
        first = self._kernels.Matrix() if project is None else self._matrix(project)
        self._model = self._kernels.Model(
            self.pointers.structures(self._kernels.Layer, layers), output, first, *norms,
            embeddings=self.pointers.tensor(table), embedding_format=FORMATS[table.dtype], vocabulary=len(table),
            num_layers=len(layers), hidden=config.hidden_size, embedding_scale=1.0, logit_scale=1.0,
            projects_pairs=pairs,
        )  # fmt: skip
        self.max_length, self._cos, self._sin = 0, 0, 0  # of the tables by position

    def __call__(self, inputs: LayerPass) -> Level:
        """Raises `MemoryError`."""
        (batch, nodes), address = inputs.ids.shape, self._kernels.address
        self.extend_tables(max(inputs.starts) + inputs.old + nodes)
        pointers = self._kernels.Pointers()
        native = self._kernels.Pass(batch=batch, nodes=nodes, old=inputs.old, capacity=inputs.keys[0].shape[2])
        native.kv_only = self._context is not None
        self._model.cache_format = FORMATS[inputs.keys[0].dtype]
        native.max_position, native.cos, native.sin = self.max_length - 1, self._cos, self._sin
        if inputs.states is not None:
            rows = self._head.normed(inputs.states) if inputs.of_target else inputs.states
            if inputs.of_target or self._pairs:
                native.inputs, native.input_format = pointers.tensor(rows.contiguous()), FORMATS[rows.dtype]
            else:
                native.rows = pointers.floats(rows)
        native.ids, native.parents = pointers.tensor(inputs.ids.contiguous()), address(inputs.parents)
        if inputs.is_block:
            ends = torch.tensor(inputs.starts, dtype=torch.int32)[:, None] + nodes
            native.block_ends = pointers.tensor(ends.expand(-1, nodes).contiguous())
        native.starts, native.slots = pointers.integers(inputs.starts), pointers.integers(inputs.slots)
        native.keys, native.values = pointers.tensors(inputs.keys), pointers.tensors(inputs.values)
        hidden = torch.empty(0 if inputs.kv_only else (batch, nodes, self._model.hidden), device=self._device)
        logits = torch.empty(batch, inputs.head_rows, self.vocabulary, device=self._device)
        best = None
        if not inputs.kv_only:
            native.last_hidden = address(hidden)
        if inputs.head_rows:
            native.head_rows, native.logits = inputs.head_rows, address(logits)
        if inputs.head_rows and inputs.top:
            size = batch, inputs.head_rows, min(inputs.top, self.vocabulary)
            columns = torch.empty(size, dtype=torch.int32, device=self._device)
            best = Best(columns, torch.empty(size, device=self._device))
            native.top, native.top_ids, native.top_logps = size[2], address(best.columns), address(best.logps)
            native.noise = address(inputs.noise)
        self._kernels.run(self._model, native)
        if getattr(self._head.config, "norm_output", False) and not inputs.kv_only:
            hidden = self._head.norm(hidden.to(self._head.norm.weight.dtype))
        return Level(hidden, logits, best)

    @property
    def hidden_size(self) -> int:
        """E, the width of the head's states."""
        return self._model.hidden

    def level_on_device(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], starts: Tensor, slots: Tensor, ids: Tensor,
        rows: Tensor, parents: Tensor, top: int, noise: Tensor | None, longest: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """A level of trees by the kernels of a GPU, of which the host knows nothing.

        It returns hidden [B, F, E], and the best children [B, F, top] and their log-probabilities.
        starts, slots: int32 [B]. ids: [B, F]. rows: the head's states of the parents [B, F, E]. parents: of all nodes,
        [B, old + F]. longest: the most columns that a node may read. noise: [B, Vd].
        """
        (batch, nodes), device = ids.shape, ids.device
        step = self._kernels.Pass(
            batch=batch, nodes=nodes, old=parents.shape[1] - nodes, capacity=keys[0].shape[2], keys=keys, values=values,
            max_position=self.max_length - 1, cos=self._cos, sin=self._sin, head_rows=nodes, top=top, noise=noise,
        )  # fmt: skip
        if self._pairs:
            step.inputs = rows
        else:
            step.rows = rows
        size = batch, nodes, top
        step.last_hidden = torch.empty(batch, nodes, self.hidden_size, device=device)
        step.logits = torch.empty(batch, nodes, self.vocabulary, device=device)
        step.top_ids, step.top_logps = (
            torch.empty(size, dtype=torch.int32, device=device),
            torch.empty(size, device=device),
        )
        zeros, sizes = torch.zeros_like(starts), torch.full_like(starts, nodes)
        numbers = starts, slots, zeros, sizes, zeros, zeros, ids.int().flatten(), parents.int().flatten()
        inputs = self._kernels.Inputs(*numbers, None, None, longest)
        self._kernels.compute(self._model, step, inputs)
        hidden = step.last_hidden
        if getattr(self._head.config, "norm_output", False):
            hidden = self._head.norm(hidden.to(self._head.norm.weight.dtype)).float()
        return hidden, step.top_ids.long(), step.top_logps

    def _made(self, layer: Any) -> Any:
        config, native = self._head.config, self._kernels.Layer()
        for module, names in ((layer.self_attn, ("q", "k", "v", "o")), (layer.mlp, ("gate", "up", "down"))):
            for name in names:
                setattr(native, name, self._matrix(getattr(module, f"{name}_proj")))
        d = config.head_dim
        native.heads, native.kv_heads, native.head_dim = config.num_attention_heads, config.num_key_value_heads, d
        native.rotary_dim, native.scale, native.is_gated = config.rotary_dim, d**-0.5, config.output_gate
        native.attention_times = native.gate_times = native.mlp_times = 1.0
        norms = getattr(layer, "input_layernorm", None), layer.post_attention_layernorm
        native.input, native.before_mlp = map(self._norm, norms)
        if self._context is not None:
            native.input = self._norm(self._context)
        native.hidden_norm = self._norm(getattr(layer, "hidden_norm", None))
        if config.qk_norm:
            native.q_norm, native.k_norm = self._norm(layer.self_attn.q_norm), self._norm(layer.self_attn.k_norm)
        native.norm_before_residual = getattr(config, "norm_before_residual", False)
        return native

    def extend_tables(self, length: int) -> None:
        """Make the tables of cosines and sines [P, d] hold at least all positions below `length`."""
        if length > self.max_length:
            most, held = 2 * length + 512, self._kernels.Pointers()
            tables = self._head.rotation(torch.arange(most, device=self._device)[None])
            cos, sin = (held.tensors([table[0, 0].contiguous()]) for table in tables)
            self.max_length, self._tables, self._cos, self._sin = most, held, cos, sin  # together, should memory end

    def _matrix(self, linear: nn.Module) -> Any:
        matrix = self._kernels.matrix_of(linear)
        self.pointers.append(matrix)
        return matrix.struct

    def _norm(self, norm: nn.RMSNorm | None) -> Any:
        if norm is None:
            return self._kernels.Norm()
        assert norm.eps is not None
        return self._kernels.Norm(weight=self.pointers.floats(norm.weight), eps=norm.eps, kind=1)


class TorchLayer:
    """Runs the head itself in torch, for other devices and dtypes."""

    def __init__(self, head: EagleHead):
        self._head = head

    def __call__(self, inputs: LayerPass) -> Level:
        """As `NativeLayer`, but without the largest logits."""
        device, count = inputs.keys[0].device, inputs.ids.shape[1]
        caches = iter(zip(inputs.keys, inputs.values, strict=True))  # of each layer
        begin = torch.tensor(inputs.starts)
        positions, seen = _positions_and_mask(begin, inputs.parents, inputs.old, count)
        where, mask = torch.tensor(inputs.slots, device=device), seen.to(device)[:, None]
        columns = (begin[:, None] + inputs.old + torch.arange(count)).to(device)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            # Finite: an overflow in a dropped row must not reach later ones as 0 * NaN.
            keys, values = next(caches)
            keys[where[:, None], :, columns] = torch.nan_to_num(key).transpose(1, 2)
            values[where[:, None], :, columns] = torch.nan_to_num(value).transpose(1, 2)
            cached = [tensor[where, :, : seen.shape[-1]] for tensor in (keys, values)]
            return nn.functional.scaled_dot_product_attention(query, *cached, attn_mask=mask, enable_gqa=True)

        assert inputs.states is not None
        states = self._head.begin(inputs.states) if inputs.of_target else inputs.states
        hidden = self._head(inputs.ids, states, positions.to(device), attend)
        return Level(hidden, self._head.logits(hidden[:, count - inputs.head_rows :]))


def _positions_and_mask(starts: Tensor, parents: Tensor | None, old: int, count: int) -> tuple[Tensor, Tensor]:
    """Positions [B, N] of the `count` newest nodes, and the attention mask [B, N, S] over the columns."""
    total = old + count
    chains = torch.ones(len(starts), total, total, dtype=torch.bool).tril()
    mask = (chains if parents is None else ancestors(parents))[:, old:]
    return starts[:, None] + mask.sum(-1) - 1, visible(starts, mask, int(starts.max()) + total)


def pack_head(head: DraftHead) -> None:
    """Give an attached head the target's output rows as a linear layer; on a CPU, pack its linear layers, too.

    Those of 16 bits become INT8: half the bytes to read, with the same acceptance (docs/log/2026-11-results.md).
    The portable kernels, which convert every code, would take twice the time. Everything else becomes float32.
    """
    for name, output in list(head.named_modules()):
        if isinstance(output, Output) and len(output.rows):
            head.set_submodule(name, linear_of(output.rows))
    if not has_kernels(head.embeddings.device):
        return
    for module in head.modules():
        if isinstance(module, nn.RMSNorm):
            module.float()
    has_16_bits = any(module.weight.dtype.itemsize == 2 for module in head.modules() if isinstance(module, nn.Linear))
    rounds = has_16_bits and load().isa != "portable"
    pack_linears(head, lambda linear, place: (to_int8 if rounds and fits_int8(linear) else PackedLinear)(linear, place))


def linear_of(weight: Tensor) -> nn.Linear:
    """A linear layer that holds these weights [out, in]."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return linear
