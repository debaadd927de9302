"""Describes a loaded model for our kernels, from its modules: transformers' own, or those of `described`.

`target.self_test` compares the results of the kernels with plain transformers. A model that cannot be described is run
by transformers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from .. import kernels
from ..attention.recurrent import RecurrentLayer
from ..kernels.library import ACTIVATIONS, FORMATS
from ..quant.blocks import BlockEmbedding
from .corrections import Places
from .latent import is_latent, latent_of
from .recurrent import RecurrentDescription, is_recurrent
from .rotary import has_fixed_ropes, rotary_dim_of, rotary_of
from .routing import BESIDE, experts_of, part_of
from .skipped import Skipped

if TYPE_CHECKING:
    from transformers import PreTrainedModel
_PLE = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")


@dataclass(frozen=True)
class Form:
    """How the layers of an architecture differ from Llama's.

    norms: the names of the norms before and after attention and before and after the MLP; None if absent.
    plus_one: whether norms multiply by 1 + their weight.
    whole: whether q and k are normed over all heads together; head_norms: each head on its own.
    qkv_bias: whether q, k and v have biases, whatever the config says.
    joined, joined_mlp: whether q, k and v are one matrix; gate and up.
    layer_norm: whether norms are layer norms, and the MLP has no gate.
    attention_norms: as `norms`, in layers with attention alone.
    gated: whether the output of attention is gated, by as many more outputs of q.
    scaled: whether embeddings are multiplied by the root of their width.
    value_norms: whether each head's values are normed, too; then scores are not scaled, and layers end in a scalar.
    sinks: whether heads have a score of no column.
    pairs: whether neighbours in a head are rotated together, and not its halves, where the config does not say it.
    partial: whether a part of each head may be rotated.
    windows_rotate: whether layers without a window are not rotated where others have one.
    bare_out: whether the output of attention has no bias, whatever the config says.
    """

    norms: tuple[str | None, str | None, str | None, str | None] = (
        "input_layernorm", None, "post_attention_layernorm", None,
    )  # fmt: skip
    plus_one: bool = False
    whole: bool = False
    head_norms: bool = False
    qkv_bias: bool = False
    joined: bool = False
    joined_mlp: bool = False
    layer_norm: bool = False
    attention_norms: tuple[str | None, ...] = ()
    gated: bool = False
    scaled: bool = False
    value_norms: bool = False
    sinks: bool = False
    pairs: bool = False
    partial: bool = False
    windows_rotate: bool = False
    bare_out: bool = False


_FOUR = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_BEHIND = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_AROUND = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
FORMS: dict[str, Form] = {
    **dict.fromkeys(("llama", "mistral", "smollm3", "granite", "seed_oss"), Form()),
    **dict.fromkeys(("qwen2", "qwen2_vl_text", "qwen2_5_vl_text"), Form(qkv_bias=True)),
    **dict.fromkeys(("mixtral", "granitemoe", "granitemoeshared"), Form()),
    "gpt_oss": Form(sinks=True),
    "qwen2_moe": Form(qkv_bias=True),
    "olmoe": Form(whole=True),
    **dict.fromkeys(("axk1", "deepseek_v3", "glm4_moe_lite", "minicpm3", "sarvam_mla", "youtu"), Form()),
    "deepseek_v2": Form(pairs=True),
    **dict.fromkeys(("qwen3", "qwen3_vl_text"), Form(head_norms=True)),
    **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_text"), Form(head_norms=True)),
    **dict.fromkeys(("dots1", "hy_v3", "mellum"), Form(head_norms=True)),
    "exaone_moe": Form(head_norms=True, windows_rotate=True),
    "exaone4": Form(_BEHIND, head_norms=True, windows_rotate=True),
    **dict.fromkeys(("glm4_moe", "sarvam_moe"), Form(head_norms=True, partial=True, bare_out=True)),
    "solar_open": Form(partial=True, bare_out=True),
    "minimax_m2": Form(whole=True, partial=True),
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe"), Form(pairs=True)),
    "glm": Form(joined_mlp=True, pairs=True, partial=True, bare_out=True),
    "glm4": Form(_AROUND, joined_mlp=True, pairs=True, partial=True, bare_out=True),
    "granitemoe_swa": Form(sinks=True),
    "phi3": Form(joined=True, joined_mlp=True, partial=True, bare_out=True),
    "starcoder2": Form(layer_norm=True),
    **dict.fromkeys(("bamba", "falcon_h1"), Form(("input_layernorm", None, "pre_ff_layernorm", None))),
    "granitemoehybrid": Form(),
    **dict.fromkeys(("mamba2", "nemotron_h"), Form(("norm", None, None, None))),
    **dict.fromkeys(("lfm2", "lfm2_moe"), Form(("operator_norm", None, "ffn_norm", None), head_norms=True)),
    "lfm3": Form(("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"), head_norms=True),
    "olmo_hybrid": Form(attention_norms=_BEHIND, whole=True),
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
        Form(head_norms=True, plus_one=True, gated=True, partial=True),
    ),
    "gemma": Form(plus_one=True, scaled=True),
    "gemma2": Form(_FOUR, plus_one=True, scaled=True),
    "gemma3_text": Form(_FOUR, plus_one=True, head_norms=True, scaled=True),
    **dict.fromkeys(
        ("gemma4_text", "gemma4_unified_text"), Form(_FOUR, head_norms=True, scaled=True, value_norms=True)
    ),
    **dict.fromkeys(("olmo2", "olmo3", "flex_olmo"), Form(_BEHIND, whole=True)),
}


def head_dim_of(config: Any) -> int:
    """The size of a head, which not all families name."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def is_described(config: Any) -> bool:
    """Whether the layers of a text config are of a form that is known."""
    return config.model_type in FORMS


def key_layers_of(config: Any) -> list[int]:
    """For each layer of a text config, the layer whose keys and values it reads.

    The last `num_kv_shared_layers` read those of the last layer of their kind before them.
    """
    count, kinds = config.num_hidden_layers, getattr(config, "layer_types", None) or []
    own = count - (getattr(config, "num_kv_shared_layers", None) or 0)
    shared = (max(other for other in range(own) if kinds[other] == kinds[layer]) for layer in range(own, count))
    return [*range(own), *shared]


def config_of(config: Any, which: int | str | None) -> Any:
    """The config of a layer, or of all layers of a kind, which may have heads of their own."""
    return config if which is None or not hasattr(config, "per_layer_config") else config.per_layer_config[which]


def _weights(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


def _leave_out(struct: Any, layer: nn.Module) -> None:
    """Take from a described layer what is skipped."""
    for part in layer.children():
        if isinstance(part, Skipped) and part.is_attention:
            struct.q.data = struct.latent = None
        elif isinstance(part, Skipped):
            struct.up.data = struct.experts = None


def describe(model: "PreTrainedModel") -> "Description | None":
    """The description of a model; None if there are no kernels for its device, or if they do not support it."""
    config: Any = model.config.get_text_config()
    if not is_described(config) or model.dtype not in FORMATS or not has_fixed_ropes(config):
        return None
    if kernels.kernels_for(cast("torch.device", model.device)) is None:
        return None
    try:
        return Description(model)
    except (KeyError, AttributeError):  # a layer of another kind
        return None


class Description:
    """A model as a structure for kernels, and the memory that its pointers point to.

    kernels: of its device, see `kernels.kernels_for`.
    ropes: the kinds of rotary embeddings, and how many numbers of a head each rotates; layers refer to them by index.
    kv_heads, head_dims, value_dims: of the layers that make keys and values, which come first.
    image_token: what stands for images in per-layer inputs; None where there are none.
    multiplier: the factor for embeddings that are passed in.
    recurrent: what recurrent layers keep.
    num_experts: of all layers.
    places: where rows can be corrected.
    """

    def __init__(self, model: "PreTrainedModel"):
        self._config: Any = model.config.get_text_config()
        self._form = FORMS[self._config.model_type]
        self.kernels: Any = kernels.kernels_for(cast("torch.device", model.device))
        self.places = Places(model, self.kernels)
        self._held, self._dtype = self.kernels.Pointers(), cast("torch.dtype", model.dtype)
        self.recurrent: list[RecurrentLayer] = []
        self._experts_on_disk = getattr(model, "experts_on_disk", False)
        base: Any = model.base_model
        rotary, embedding = rotary_of(base), model.get_input_embeddings()
        kinds = getattr(rotary, "layer_types", [None])
        self.ropes: dict[str | None, int] = {kind: rotary_dim_of(rotary, kind) for kind in kinds}
        self._key_layers = key_layers_of(self._config)
        self.multiplier = self._times("embedding_multiplier")
        layers = list[Any]()
        for index, layer in enumerate(base.layers):
            layers.append(self._layer(layer, index, layers))
        makers = [layer for layer in layers if not layer.shared_kv]
        self.kv_heads, self.head_dims = [layer.kv_heads for layer in makers], [layer.head_dim for layer in makers]
        self.value_dims = [0 if getattr(layer, "latent", None) else layer.head_dim for layer in makers]
        for struct, layer in zip(layers, base.layers, strict=True):
            _leave_out(struct, layer)
        self.num_layers = len(layers)
        self.num_experts = sum(layer.experts.contents.count for layer in layers if getattr(layer, "experts", None))
        table, form, scale = self._embeddings(embedding)
        self._held.append(table)
        self.model = self.kernels.Model(
            layers=self._held.structures(self.kernels.Layer, layers),
            head=self._bare(model.get_output_embeddings()),
            final_norm=self._norm(part_of(base, "norm", "final_layernorm", "norm_f", "embedding_norm")),
            embeddings=self.kernels.address(table),
            embedding_format=form,
            num_layers=len(layers),
            hidden=embedding.embedding_dim,
            vocabulary=embedding.num_embeddings,
            embedding_scale=scale * self.multiplier,
            logit_scale=self._times("lm_head_multiplier") / self._times("logits_scaling"),
            logit_softcap=float(getattr(self._config, "final_logit_softcapping", None) or 0.0),
            cache_format=FORMATS[self._dtype],
        )
        self.image_token = self._describe_ple(base) if getattr(base, "hidden_size_per_layer_input", None) else None

    def _embeddings(self, embedding: Any) -> tuple[Any, int, float]:
        """The table, its format, and what its rows are multiplied with."""
        scale = getattr(embedding, "embed_scale", None)
        scale = 1.0 if scale is None else float(torch.as_tensor(scale).to(self._dtype))
        if isinstance(embedding, BlockEmbedding):
            return embedding.table, embedding.form, scale
        table: Tensor = embedding.weight.detach()
        return table, FORMATS[table.dtype], scale

    def _describe_ple(self, base: Any) -> int:
        """Describe per-layer inputs: (norm(projection / sqrt(E)) + table row) / sqrt(2); returns the token of images.

        The constants are in the norm and the scale of the table: norm(c x) is norm(x) with an epsilon of eps / c^2.
        """
        model, norm = self.model, self._norm(base.per_layer_projection_norm, 2.0**-0.5)
        norm.eps *= model.hidden
        table, model.ple_format, scale = self._embeddings(base.embed_tokens_per_layer)
        self._held.append(table)
        if base.embed_tokens_per_layer.num_embeddings < model.vocabulary:
            raise KeyError("tokens without a row")
        model.ple_table, model.ple_scale, model.ple_norm = self.kernels.address(table), scale * 2.0**-0.5, norm
        model.ple_project = self._bare(base.per_layer_model_projection)
        model.ple_size = int(base.hidden_size_per_layer_input)
        return int(self._config.pad_token_id or 0)

    def _times(self, name: str) -> float:
        """A factor of the config; 1 where it has none."""
        return float(getattr(self._config, name, None) or 1.0)

    def _layer(self, layer: nn.Module, index: int, before: list[Any]) -> Any:
        names, times = self._form.norms, self._times("residual_multiplier")
        if (depth := getattr(self._config, "scale_depth", None)) is not None:  # MiniCPM
            times = depth / self._config.num_hidden_layers**0.5
        gate, down = getattr(self._config, "mlp_multipliers", (1.0, 1.0))
        struct = self.kernels.Layer(head_dim=1, attention_times=times, gate_times=gate, mlp_times=times * down)
        struct.scalar = float(getattr(layer, "layer_scalar", 0.0))
        parts = {name: part for name, part in layer.named_children() if any(True for _ in _weights(part))}
        norms = {*self._form.norms, *self._form.attention_norms, *_PLE, *BESIDE, "router", "experts"}
        for part in [part for name, part in parts.items() if name not in norms]:
            part = part.base if isinstance(part, Skipped) else part
            if is_recurrent(part):
                recurrent = RecurrentDescription(part, index, self._matrix, self._held, self.kernels)
                recurrent.struct.times = times * self._times("ssm_out_multiplier")
                struct.recurrent = self._held.pointer(recurrent.struct)
                self.recurrent.append(recurrent.kept)
            elif hasattr(part, "q_proj") or hasattr(part, "qkv_proj") or is_latent(part):
                self._attention(struct, part, index, before)
                names = self._form.attention_norms or names
            elif hasattr(part, "experts"):
                self._experts(struct, part)
            else:
                self._mlp(struct, part)
        if "experts" in parts:  # beside the MLP, as in Gemma 4
            self._experts(struct, layer)
        if (struct.up.data is not None or struct.experts) and struct.q.data is None and not struct.recurrent:
            names = (None, None, *names[:2])
        if _PLE[0] in parts:
            struct.ple_gate, struct.ple_out = (self._matrix(parts[name]) for name in _PLE[:2])
            struct.after_ple = self._norm(parts[_PLE[2]])
        places = ("input", "after_attention", "before_mlp", "after_mlp")
        for place, name in zip(places, names, strict=True):
            if name in parts:
                setattr(struct, place, self._norm(parts[name]))
        return struct

    def _mlp(self, struct: Any, mlp: Any) -> None:
        struct.activation = self._activation()
        if (joined := getattr(mlp, "gate_up_proj", getattr(mlp, "input_linear", None))) is not None:
            struct.gate, struct.up = self._matrices(joined, 2)
            struct.down = self._matrix(part_of(mlp, "down_proj", "output_linear"))
        elif hasattr(mlp, "w1"):
            struct.gate, struct.up, struct.down = (self._matrix(getattr(mlp, name)) for name in ("w1", "w3", "w2"))
        else:
            struct.up = self._matrix(part_of(mlp, "up_proj", "c_fc"))
            struct.down = self._matrix(part_of(mlp, "down_proj", "c_proj"))
            if hasattr(mlp, "gate_proj"):
                struct.gate = self._matrix(mlp.gate_proj)

    def _experts(self, struct: Any, block: Any) -> None:
        """The experts of a block, and the MLP beside them."""
        made = experts_of(block, self._config, self._bare, self._norm, self._held, self.kernels)
        for name in ("shared_expert", "shared_experts"):
            if getattr(block, name, None) is not None:
                self._mlp(struct, getattr(block, name))
        if (norm := getattr(block, "post_mlp_layernorm", None)) is not None:
            struct.after_mlp = self._norm(norm)
        made.in_file = self._experts_on_disk
        struct.activation, struct.experts = self._activation(), self._held.pointer(made)

    def _activation(self) -> int:
        config, names = self._config, ("mlp_hidden_act", "hidden_activation", "hidden_act")
        return ACTIVATIONS[next(filter(None, (getattr(config, n, None) for n in names)), "silu")]

    def _attention(self, struct: Any, attention: Any, index: int, before: list[Any]) -> None:
        config, back = self._config, index - self._key_layers[index]
        everywhere = None if hasattr(config, "layer_types") else getattr(config, "sliding_window", None)
        kind = None if None in self.ropes else config.layer_types[index]
        into = self._times("attention_in_multiplier")
        struct.heads = int(config.num_attention_heads)
        struct.scale = float(attention.scaling) * into * into * self._times("key_multiplier")
        struct.attention_times *= into * self._times("attention_out_multiplier")
        struct.softcap = float(getattr(attention, "attn_logit_softcapping", None) or 0.0)
        slides = getattr(attention, "is_sliding", True)
        struct.window = (getattr(attention, "sliding_window", everywhere) or 0) if slides else 0
        rotates = struct.window or not (self._form.windows_rotate and config.sliding_window)
        struct.rotary_dim = self.ropes[kind] if rotates and getattr(attention, "use_rope", True) else 0
        struct.rope, struct.shared_kv = [*self.ropes].index(kind), back
        struct.norm_whole, struct.is_gated = self._form.whole, self._form.gated
        struct.rotary_pairs = getattr(config, "rope_interleave", self._form.pairs)
        sinks = getattr(attention, "sinks", None)
        if (struct.rotary_pairs or sinks is not None) and not hasattr(self.kernels, "Experts"):
            raise AttributeError("kernels of a GPU, which have neither")
        if getattr(attention, "g_proj", None) is not None:
            raise AttributeError("one gate for each head")
        struct.o = self._matrix(part_of(attention, "o_proj", "dense", "out_proj"))
        struct.sinks = self._held.floats(sinks)
        if is_latent(attention):
            latent_of(struct, attention, self._matrix, self._norm, self._held, self.kernels)
            return
        struct.head_dim = int(attention.head_dim)
        if hasattr(attention, "qkv_proj"):
            struct.q, struct.kv_heads = self._matrix(attention.qkv_proj), int(config.num_key_value_heads)
        elif back:
            struct.q, struct.kv_heads = self._matrix(attention.q_proj), before[-back].kv_heads
        else:
            struct.q, struct.k = self._matrix(attention.q_proj), self._matrix(attention.k_proj)
            struct.kv_heads = struct.k.outs // struct.head_dim
            if attention.v_proj is not None:
                struct.v = self._matrix(attention.v_proj)
        for name in ("q_norm", "k_norm", "v_norm"):
            if (norm := getattr(attention, name, getattr(attention, f"{name[0]}_layernorm", None))) is not None:
                setattr(struct, name, self._norm(norm))

    def _norm(self, norm: Any, times: float = 1.0) -> Any:
        """A norm, whose output is multiplied with `times`."""
        weight = getattr(norm, "weight", None)
        if weight is not None:
            weight = (weight.float() + (1.0 if self._form.plus_one else 0.0)) * times
        eps = float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)
        kind = 2 if isinstance(norm, nn.LayerNorm) else 1
        return self.kernels.Norm(self._held.floats(weight), self._held.floats(getattr(norm, "bias", None)), eps, kind)

    def _matrix(self, linear: Any) -> Any:
        return self._matrices(linear, 1)[0]

    def _matrices(self, linear: Any, count: int) -> list[Any]:
        """The outputs of a linear layer as `count` matrices of the same size, which can be corrected."""
        parts = self._parts(linear, count)
        self.places.give(linear, parts)
        return parts

    def _bare(self, linear: Any) -> Any:
        """A linear layer that cannot be corrected."""
        return self._parts(linear, 1)[0]

    def _parts(self, linear: Any, count: int) -> list[Any]:
        whole = self.kernels.matrix_of(linear)  # AttributeError: a layer of another kind
        size = whole.outs // count
        parts = [whole.part(first, first + size) for first in range(0, whole.outs, size)]
        self._held += parts
        return [part.struct for part in parts]
