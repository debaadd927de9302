"""A decoder whose passes run in the native library (`paceline.kernels`): one call a pass, whatever the rows are.

A row reads the columns of its own path in the order of the text, and every sum is taken in that order, so its bits are
those of plain decoding whatever shares its pass: trees, other sequences, the text of a prompt, more or fewer threads.

The layers stay transformers' own modules; they are only looked at, to describe them. What they compute here is held
against plain transformers when a model is loaded (`selftest`); what cannot be described is run by transformers.
"""

import ctypes
from collections.abc import Iterable
from ctypes import c_void_p
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import IncompatibleModels
from ..kernels.library import (
    ACTIVATIONS,
    FORMATS,
    Layer,
    Matrix,
    Model,
    Norm,
    Pass,
    Places,
    address,
    addresses,
    library,
    run,
)
from ..kernels.packing import pack
from ..quant.packed import Described
from .gated import Gate, Gated
from .kv_cache import SlotCache
from .layout import PassLayout
from .states import States

MOST_RANK = 256
"""Of the factors of an adapter, as `pass.h` has room for."""

_ROPES = ("default", "linear", "llama3", "yarn")  # fixed frequencies: nothing to update as a text grows


@dataclass(frozen=True)
class Form:
    """In what the layers of a family differ from Llama's.

    norms: the names of the norms before and behind attention and MLP, None where there is none. plus_one: norms
    multiply by 1 + their weight. mlp: "gated", "joined" (gate and up in one matrix) or "plain". whole: q and k are
    normed over all heads together. multiplied: rows are multiplied by `embedding_multiplier`.
    """

    norms: tuple[str | None, str | None, str | None, str | None] = (
        "input_layernorm", None, "post_attention_layernorm", None,
    )  # fmt: skip
    plus_one: bool = False
    whole: bool = False


_FOUR = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_BEHIND = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_LLAMA = Form()
FORMS: dict[str, Form] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "granite", "starcoder2", "seed_oss"), _LLAMA
    ),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"), _LLAMA),
    "gemma": Form(plus_one=True),
    **dict.fromkeys(("gemma2", "gemma3_text"), Form(_FOUR, plus_one=True)),
    **dict.fromkeys(("olmo2", "olmo3"), Form(_BEHIND, whole=True)),
}


class _Unknown(Exception):
    """A layer that cannot be described."""


class NativeDecoder:
    """Runs a model whose layers have been described: embeddings, layers, final norm, head.

    gate: of the adapter that the layers wear.
    """

    def __init__(self, model: PreTrainedModel, described: "Description", gate: Gate | None = None):
        self._model, self._described, self._gate = model, described, gate
        self._base: Any = model.base_model
        self._rotary: Any = self._base.rotary_emb
        self._tables: list[tuple[Tensor, Tensor]] = []
        self._pointers: tuple[Any, Any] | None = None
        self._kept: tuple[ref[Tensor], ref[Tensor], Places, Places] | None = None  # of the cache that was last used
        self._dtype = cast("torch.dtype", model.dtype)

    def forward(
        self, token_ids: Tensor | None, layout: PassLayout, cache: SlotCache, states: States | None, head_rows: int
    ) -> Tensor | None:
        """Raw logits, float32 [B, head_rows, V], of the last nodes of each row; None with `head_rows` 0.

        token_ids: [B, N]; None: those of the tree.

        Fills in the hidden states that `states` asks for, in the dtype of the model.
        """
        found = self._described
        batch, nodes = len(layout.starts), layout.num_nodes
        held: list[object] = []  # what the pass points to

        def hold(tensor: Tensor | None) -> int | None:
            held.append(tensor)
            return address(tensor)

        def integers(numbers: Iterable[int]) -> Any:
            held.append(array := (ctypes.c_int64 * len(listed := [*numbers]))(*listed))
            return _place(array)

        one = Pass(batch=batch, nodes=nodes, head_rows=head_rows, max_position=layout.max_length - 1)
        rows = self._rows(token_ids, layout)
        if rows is not None:
            one.rows = hold(rows)
        elif token_ids is not None:
            one.ids = hold(token_ids.contiguous())
        if layout.tree is not None:
            if rows is None and token_ids is None:
                one.ids = integers(chain.from_iterable(layout.tree.lists.token_ids))
            one.parents = integers(chain.from_iterable(layout.tree.lists.parents))
        one.starts = integers(layout.starts)
        one.slots = integers(layout.slots if layout.slots is not None else range(batch))
        if any(layout.offsets or ()):
            one.offsets = integers(layout.offsets or ())
        if layout.rows is not None and layout.rows.blocks:
            ends, firsts = _blocks(layout)
            one.ends, one.firsts = hold(ends), hold(firsts)
        if layout.is_mask is not None:
            one.is_mask = hold(layout.is_mask.contiguous())
        cos, sin = self._rotations(layout, one, held)
        one.cos, one.sin = cast("c_void_p", cos), cast("c_void_p", sin)
        one.keys, one.values, one.capacity = *self._places(cache), cache.capacity
        if layout.rows is not None and layout.rows.deep:
            deep = addresses(_deep(layout, found.num_layers, held))
            one.deep = _place(deep)
            held.append(deep)
        wanted: list[Tensor | None] = []
        if states is not None:
            hidden = found.model.hidden
            wanted = [torch.empty(batch, nodes, hidden) if i in states else None for i in range(found.num_layers + 1)]
            places = addresses(wanted)
            one.states = _place(places)
            held.append(places)
        logits = torch.empty(batch, head_rows, found.model.head.outs) if head_rows else None
        one.logits = address(logits)
        run(found.model, one)
        if states is not None:
            for index in states:
                state = wanted[index]
                assert state is not None
                states[index] = state.to(self._dtype)
        return logits

    def _places(self, cache: SlotCache) -> tuple[c_void_p, c_void_p]:
        """Where keys and values of each layer lie."""
        keys, values = cache.tensors(self._described.kv_heads, self._described.head_dims, self._dtype)
        kept = self._kept
        if kept is None or kept[0]() is not keys[0] or kept[1]() is not values[-1]:  # all of them change together
            kept = self._kept = (ref(keys[0]), ref(values[-1]), addresses(keys), addresses(values))
        keys, values = kept[2:]
        return _place(keys), _place(values)

    def _rows(self, token_ids: Tensor | None, layout: PassLayout) -> Tensor | None:
        """What enters the first layer, float32 [B, N, E]; None where token ids say it all."""
        if layout.rows is not None:
            rows = layout.rows.embeds
        elif self._gate is not None and self._gate.rows is not None:
            rows = self._gate.embed(self._model.get_input_embeddings()(token_ids))  # type: ignore[operator]
        else:
            return None
        return (rows.float() * self._described.multiplier).contiguous()

    def _rotations(self, layout: PassLayout, one: Pass, held: list[object]) -> tuple[Any, Any]:
        """Cosines and sines: tables by position, or a row for each row of a prompt whose positions have axes."""
        if layout.rows is not None and layout.rows.position_ids is not None:
            one.max_position = -1
            cos, sin = zip(*(self._rotary_at(kind, layout.rows.position_ids) for kind in self._kinds), strict=True)
            held += [cos, sin]
            places = addresses(cos), addresses(sin)
            held += places
            return _place(places[0]), _place(places[1])
        self._reach(max(layout.starts) + max(layout.offsets or (0,)) + layout.num_nodes)
        assert self._pointers is not None
        return _place(self._pointers[0]), _place(self._pointers[1])

    @property
    def _kinds(self) -> list[str | None]:
        return self._described.ropes

    def _reach(self, length: int) -> None:
        """Have tables of every position below `length`, and of some more."""
        if self._tables and len(self._tables[0][0]) >= length:
            return
        every = torch.arange(max(2 * length, 1024))[None]
        if hasattr(self._rotary, "mrope_section"):
            every = every.expand(3, 1, -1)
        self._tables = [self._rotary_at(kind, every) for kind in self._kinds]
        cos, sin = zip(*self._tables, strict=True)
        self._pointers = addresses(cos), addresses(sin)

    def _rotary_at(self, kind: str | None, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        like, more = torch.empty(0), () if kind is None else (kind,)
        cos, sin = self._rotary(like, position_ids, *more)
        times = self._described.rotary_dim // cos.shape[-1]  # some rotations give the half that is repeated
        return cos[0].repeat(1, times).contiguous(), sin[0].repeat(1, times).contiguous()


def _place(array: Any) -> Any:
    return c_void_p(ctypes.addressof(array))


def _blocks(layout: PassLayout) -> tuple[Tensor, Tensor]:
    """For each row the columns that it sees at least, and the first that it sees whatever the window. int32 [N]."""
    assert layout.rows is not None
    start, count = layout.starts[0], layout.num_nodes
    ends = torch.zeros(count, dtype=torch.int32)
    firsts = torch.full((count,), (1 << 31) - 1, dtype=torch.int32)
    for first, last in layout.rows.blocks:
        inside = slice(max(first - start, 0), max(last - start, 0))
        ends[inside] = last
        if layout.rows.blocks_cross_window:
            firsts[inside] = first
    return ends, firsts


def _deep(layout: PassLayout, num_layers: int, held: list[object]) -> list[Tensor | None]:
    """What is added behind each layer, float32 [N, E], zeros where there is no picture."""
    assert layout.rows is not None
    assert layout.rows.is_image is not None
    made: list[Tensor | None] = [None] * num_layers
    for index, features in enumerate(layout.rows.deep):
        full = torch.zeros(layout.num_nodes, features.shape[1])
        full[layout.rows.is_image[0]] = features.float()
        made[index] = full
    held.append(made)
    return made


@dataclass
class Description:
    """A model as the library takes it, and what its pointers point to."""

    model: Model
    held: list[object]
    ropes: list[str | None]
    multiplier: float
    rotary_dim: int
    kv_heads: list[int]
    head_dims: list[int]

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self.model.num_layers)


def describe(model: PreTrainedModel) -> Description | None:
    """What the library must know of a model; None where there is no library, or a layer it does not know."""
    config: Any = model.config.get_text_config()
    form = FORMS.get(config.model_type)
    weight: Any = model.get_input_embeddings().weight  # type: ignore[union-attr]
    if form is None or weight.device.type != "cpu" or weight.dtype not in FORMATS or library() is None:
        return None
    ropes = getattr(config, "rope_parameters", None) or {}
    nested = [rope for rope in ropes.values() if isinstance(rope, dict)] or [ropes]
    if any(rope.get("rope_type", "default") not in _ROPES for rope in nested):
        return None
    try:
        return _Describer(model, config, form).described()
    except (_Unknown, AttributeError):
        return None


class _Describer:
    def __init__(self, model: PreTrainedModel, config: Any, form: Form):
        self.model, self.config, self.form = model, config, form
        self.held: list[object] = []
        base: Any = model.base_model
        kinds = getattr(base.rotary_emb, "layer_types", None)
        self.kinds: list[str | None] = list(kinds) if kinds is not None else [None]
        rotary: Any = base.rotary_emb
        cos, _ = rotary(torch.empty(0), self._positions(rotary), *([self.kinds[0]] if kinds else []))
        self.rotary_dim = int(cos.shape[-1])
        if len(getattr(rotary, "inv_freq", ())) == self.rotary_dim:
            self.rotary_dim *= 2

    @staticmethod
    def _positions(rotary: Any) -> Tensor:
        one = torch.zeros(1, 1, dtype=torch.long)
        return one.expand(3, 1, 1) if hasattr(rotary, "mrope_section") else one

    def described(self) -> Description:
        base: Any = self.model.base_model
        layers = [self.layer(layer, index) for index, layer in enumerate(base.layers)]
        array = (Layer * len(layers))(*layers)
        weight: Tensor = base.embed_tokens.weight
        config = self.config
        scale = getattr(base.embed_tokens, "embed_scale", None)
        scale = 1.0 if scale is None else float(torch.as_tensor(scale).to(weight.dtype))
        multiplier = float(getattr(config, "embedding_multiplier", 1.0) or 1.0)
        model = Model(
            layers=array,
            head=self.matrix(self.model.get_output_embeddings()),
            final_norm=self.norm(base.norm),
            embeddings=address(weight.detach()),
            embedding_format=FORMATS[weight.dtype],
            num_layers=len(layers),
            hidden=weight.shape[1],
            vocabulary=weight.shape[0],
            embedding_scale=scale * multiplier,
            logit_scale=1.0 / float(getattr(config, "logits_scaling", 1.0) or 1.0),
            logit_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
            cache_format=FORMATS[cast("torch.dtype", self.model.dtype)],
        )
        self.held += [array, weight]
        heads = [int(layer.kv_heads) for layer in layers], [int(layer.head_dim) for layer in layers]
        return Description(model, self.held, self.kinds, multiplier, self.rotary_dim, *heads)

    def layer(self, layer: Any, index: int) -> Layer:
        attention, mlp, form = layer.self_attn, layer.mlp, self.form
        config = self.config
        heads, kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        made = Layer(heads=heads, kv_heads=kv_heads, head_dim=int(attention.head_dim))
        made.scale, made.residual = float(attention.scaling), float(getattr(config, "residual_multiplier", 1.0) or 1.0)
        made.softcap = float(getattr(attention, "attn_logit_softcapping", None) or 0.0)
        everywhere = None if hasattr(config, "layer_types") else getattr(config, "sliding_window", None)
        made.window = getattr(attention, "sliding_window", everywhere) or 0
        turns = bool(getattr(attention, "use_rope", True))
        kind = getattr(config, "layer_types", [None])[index] if self.kinds[0] is not None else None
        made.rotary_dim, made.rope = self.rotary_dim if turns else 0, self.kinds.index(kind)
        if hasattr(attention, "qkv_proj"):
            made.q = self.matrix(attention.qkv_proj)
        else:
            made.q, made.k, made.v = (self.matrix(getattr(attention, f"{name}_proj")) for name in "qkv")
        made.norm_whole = form.whole
        made.o = self.matrix(attention.o_proj if hasattr(attention, "o_proj") else attention.dense)
        if hasattr(attention, "q_norm"):
            made.q_norm, made.k_norm = self.norm(attention.q_norm), self.norm(attention.k_norm)
        act = getattr(config, "hidden_activation", None) or config.hidden_act
        if act not in ACTIVATIONS:
            raise _Unknown(act)
        made.activation = ACTIVATIONS[act]
        if hasattr(mlp, "gate_up_proj"):
            made.gate, made.up = self.halves(mlp.gate_up_proj)
            made.down = self.matrix(mlp.down_proj)
        elif hasattr(mlp, "c_fc"):
            made.up, made.down = self.matrix(mlp.c_fc), self.matrix(mlp.c_proj)
        else:
            made.gate, made.up, made.down = (self.matrix(getattr(mlp, f"{n}_proj")) for n in ("gate", "up", "down"))
        names = ("input", "after_attention", "before_mlp", "after_mlp")
        for place, name in zip(names, form.norms, strict=True):
            if name is not None:
                setattr(made, place, self.norm(getattr(layer, name)))
        return made

    def norm(self, norm: Any) -> Norm:
        weight = norm.weight.detach().float()
        weight = (weight + 1.0 if self.form.plus_one else weight).contiguous()
        bias = getattr(norm, "bias", None)
        bias = None if bias is None else bias.detach().float().contiguous()
        self.held += [weight, bias]
        eps = float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)
        kind = 2 if isinstance(norm, nn.LayerNorm) else 1
        return Norm(weight=address(weight), bias=address(bias), eps=eps, kind=kind)

    def matrix(self, linear: Any) -> Matrix:
        gated = linear if isinstance(linear, Gated) else None
        base: Any = linear.base if gated else linear
        described: Described = base.matrix  # AttributeError: a layer of another kind
        self.held.append(described)
        if gated is not None:
            self.correct(described.struct, gated.a, gated.b)
        return described.struct

    def correct(self, matrix: Matrix, a: Tensor, b: Tensor) -> None:
        """Let mask rows have b (a x) added. Raises `IncompatibleModels` for a rank that a pass has no room for."""
        if len(a) > MOST_RANK:
            raise IncompatibleModels(
                "the SPACE adapter's rank is too large for a CPU", got=len(a), expected=f"at most {MOST_RANK}"
            )
        matrix.a, matrix.b = (ctypes.pointer(self.factor(one)) for one in (a, b))

    def factor(self, weight: Tensor) -> Matrix:
        packed = pack(weight.detach())
        form = FORMATS[weight.dtype]
        made = Matrix(data=address(packed), outs=weight.shape[0], ins=weight.shape[1], format=form)
        self.held += [packed, made]
        return made

    def halves(self, linear: Any) -> tuple[Matrix, Matrix]:
        """A matrix of two, as both."""
        gated = linear if isinstance(linear, Gated) else None
        base: Any = linear if gated is None else gated.base
        whole: Described = base.matrix
        inner = whole.outs // 2
        parts = whole.part(0, inner), whole.part(inner, whole.outs)
        self.held += parts
        if gated is not None:
            for part, b in zip(parts, gated.b.chunk(2), strict=True):
                self.correct(part.struct, gated.a, b)
        return parts[0].struct, parts[1].struct
