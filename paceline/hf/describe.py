"""What the native library must know of a model, found by looking at its loaded modules.

The layers stay transformers' own; what they compute in the library is held against plain transformers when a model is
loaded (`selftest`), and a model that cannot be described is run by transformers.
"""

import ctypes
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import IncompatibleModels
from ..kernels.library import ACTIVATIONS, FORMATS, Layer, Matrix, Model, Norm, address, library
from ..kernels.packing import pack
from ..quant.packed import Described

MOST_RANK = 256
"""Of the factors of an adapter, as `pass.h` has room for."""

_ROPES = ("default", "linear", "llama3", "yarn")  # fixed frequencies: nothing to update as a text grows


@dataclass(frozen=True)
class Form:
    """In what the layers of a family differ from Llama's.

    norms: the names of the norms before and behind attention and MLP, None where there is none. plus_one: norms
    multiply by 1 + their weight. whole: q and k are normed over all heads together.
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
        base: Any = getattr(linear, "base", linear)  # below the factors of an adapter, see `runner.adapters.Gated`
        described: Described = base.matrix  # AttributeError: a layer of another kind
        self.held.append(described)
        if base is not linear:
            self.correct(described.struct, linear.a, linear.b)
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
        base: Any = getattr(linear, "base", linear)
        whole: Described = base.matrix
        inner = whole.outs // 2
        parts = whole.part(0, inner), whole.part(inner, whole.outs)
        self.held += parts
        if base is not linear:
            for part, b in zip(parts, linear.b.chunk(2), strict=True):
                self.correct(part.struct, linear.a, b)
        return parts[0].struct, parts[1].struct
