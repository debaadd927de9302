"""Describes a loaded model for the native library, from its modules: transformers' own, or those of `described`.

`target.self_test` compares the results of the library with plain transformers. A model that cannot be described is run
by transformers.
"""

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..errors import IncompatibleModels
from ..kernels.library import ACTIVATIONS, FORMATS, Layer, Matrix, Model, Norm, Pointers, address, library
from ..kernels.packing import pack
from ..quant.blocks import BlockEmbedding
from ..quant.packed import PackedMatrix

if TYPE_CHECKING:
    from transformers import PreTrainedModel
MAX_RANK = 256
"""The largest rank of an adapter's factors, `INNER` of `pass.h`."""


@dataclass(frozen=True)
class Form:
    """How the layers of an architecture differ from Llama's.

    norms: the names of the norms before and after attention and before and after the MLP; None if absent.
    plus_one: whether norms multiply by 1 + their weight.
    whole: whether q and k are normed over all heads together; head_norms: each head on its own.
    qkv_bias: whether q, k and v have biases, whatever the config says.
    joined: whether q, k and v are one matrix, and gate and up; then a part of each head may be rotated.
    layer_norm: whether norms are layer norms, and the MLP has no gate.
    scaled: whether embeddings are multiplied by the root of their width.
    value_norms: whether each head's values are normed, too; then scores are not scaled, and layers end in a scalar.
    """

    norms: tuple[str | None, str | None, str | None, str | None] = (
        "input_layernorm", None, "post_attention_layernorm", None,
    )  # fmt: skip
    plus_one: bool = False
    whole: bool = False
    head_norms: bool = False
    qkv_bias: bool = False
    joined: bool = False
    layer_norm: bool = False
    scaled: bool = False
    value_norms: bool = False


_FOUR = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_BEHIND = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
FORMS: dict[str, Form] = {
    **dict.fromkeys(("llama", "mistral", "smollm3", "granite", "seed_oss"), Form()),
    **dict.fromkeys(("qwen2", "qwen2_vl_text", "qwen2_5_vl_text"), Form(qkv_bias=True)),
    **dict.fromkeys(("qwen3", "qwen3_vl_text"), Form(head_norms=True)),
    "phi3": Form(joined=True),
    "starcoder2": Form(layer_norm=True),
    "gemma": Form(plus_one=True, scaled=True),
    "gemma2": Form(_FOUR, plus_one=True, scaled=True),
    "gemma3_text": Form(_FOUR, plus_one=True, head_norms=True, scaled=True),
    **dict.fromkeys(
        ("gemma4_text", "gemma4_unified_text"), Form(_FOUR, head_norms=True, scaled=True, value_norms=True)
    ),
    **dict.fromkeys(("olmo2", "olmo3"), Form(_BEHIND, whole=True)),
}


_FIXED_ROPES = ("default", "linear", "llama3", "yarn", "proportional")


def ropes_of(config: Any) -> list[dict[str, Any]]:
    """The rope parameters of a text config: one dict for each kind of layer, or one for all."""
    ropes = getattr(config, "rope_parameters", None) or {}
    return [rope for rope in ropes.values() if isinstance(rope, dict)] or [ropes]


def head_dim_of(config: Any) -> int:
    """The size of a head, which not all families name."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def is_described(config: Any) -> bool:
    """Whether the layers of a text config are of a form that is known. Experts are not."""
    return config.model_type in FORMS and not getattr(config, "enable_moe_block", False)


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


def has_fixed_ropes(config: Any) -> bool:
    """Whether the rope frequencies of a text config are fixed, that is, do not depend on the length of the text."""
    return all(rope.get("rope_type", "default") in _FIXED_ROPES for rope in ropes_of(config))


def describe(model: "PreTrainedModel") -> "Description | None":
    """The description of a model; None if there is no library, or if it does not support the model."""
    config: Any = model.config.get_text_config()
    if not is_described(config) or model.device.type != "cpu" or model.dtype not in FORMATS:
        return None
    if library() is None or not has_fixed_ropes(config):
        return None
    try:
        return Description(model)
    except (KeyError, AttributeError):  # a layer of another kind
        return None


class Description:
    """A model as a structure of the library, and the memory that its pointers point to.

    ropes: the kinds of rotary embeddings, and how many numbers of a head each rotates; layers refer to them by index.
    kv_heads, head_dims: of the layers that make keys and values, which come first.
    image_token: what stands for images in per-layer inputs; None where there are none.
    multiplier: the factor for embeddings that are passed in.
    """

    def __init__(self, model: "PreTrainedModel"):
        self._config: Any = model.config.get_text_config()
        self._form = FORMS[self._config.model_type]
        self._held, self._dtype = Pointers(), cast("torch.dtype", model.dtype)
        base: Any = model.base_model
        kinds = getattr(base.rotary_emb, "layer_types", [None])
        self.ropes: dict[str | None, int] = {kind: self._rotary_dim(base.rotary_emb, kind) for kind in kinds}
        self._key_layers = key_layers_of(self._config)
        self.multiplier = float(getattr(self._config, "embedding_multiplier", 1.0) or 1.0)
        layers = list[Layer]()
        for index, layer in enumerate(base.layers):
            layers.append(self._layer(layer, index, layers))
        makers = [layer for layer in layers if not layer.shared_kv]
        self.kv_heads, self.head_dims = [layer.kv_heads for layer in makers], [layer.head_dim for layer in makers]
        self.num_layers = len(layers)
        array = (Layer * len(layers))(*layers)
        table, form, scale = self._embeddings(base.embed_tokens)
        self._held += [array, table]
        self.model = Model(
            layers=array,
            head=self._matrix(model.get_output_embeddings()),
            final_norm=self._norm(base.norm),
            embeddings=address(table),
            embedding_format=form,
            num_layers=len(layers),
            hidden=base.embed_tokens.embedding_dim,
            vocabulary=base.embed_tokens.num_embeddings,
            embedding_scale=scale * self.multiplier,
            logit_scale=1.0 / float(getattr(self._config, "logits_scaling", 1.0) or 1.0),
            logit_softcap=float(getattr(self._config, "final_logit_softcapping", None) or 0.0),
            cache_format=FORMATS[self._dtype],
        )
        self.image_token = self._describe_ple(base) if getattr(base, "hidden_size_per_layer_input", None) else None

    def _embeddings(self, embedding: Any) -> tuple[Tensor, int, float]:
        """The table, its format, and what its rows are multiplied with."""
        scale = getattr(embedding, "embed_scale", None)
        scale = 1.0 if scale is None else float(torch.as_tensor(scale).to(self._dtype))
        if isinstance(embedding, BlockEmbedding):
            return embedding.data, embedding.form, scale
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
        model.ple_table, model.ple_scale, model.ple_norm = address(table), scale * 2.0**-0.5, norm
        model.ple_project = self._matrix(base.per_layer_model_projection)
        model.ple_size = int(base.hidden_size_per_layer_input)
        return int(self._config.pad_token_id or 0)

    @staticmethod
    def _rotary_dim(rotary: Any, kind: str | None) -> int:
        positions = torch.zeros(1, 1, dtype=torch.long)
        positions = positions.expand(3, 1, 1) if hasattr(rotary, "mrope_section") else positions
        cos, _ = rotary(torch.empty(0), positions, *(() if kind is None else (kind,)))
        dim = int(cos.shape[-1])
        return 2 * dim if len(getattr(rotary, "inv_freq", ())) == dim else dim

    def _layer(self, layer: Any, index: int, before: list[Layer]) -> Layer:
        attention, mlp, config = layer.self_attn, layer.mlp, self._config
        everywhere = None if hasattr(config, "layer_types") else getattr(config, "sliding_window", None)
        kind = None if None in self.ropes else config.layer_types[index]
        back = index - self._key_layers[index]
        struct = Layer(
            heads=int(config.num_attention_heads),
            head_dim=int(attention.head_dim),
            scale=float(attention.scaling),
            residual=float(getattr(config, "residual_multiplier", 1.0) or 1.0),
            softcap=float(getattr(attention, "attn_logit_softcapping", None) or 0.0),
            window=getattr(attention, "sliding_window", everywhere) or 0,
            rotary_dim=self.ropes[kind] if getattr(attention, "use_rope", True) else 0,
            rope=[*self.ropes].index(kind),
            shared_kv=back,
            scalar=float(getattr(layer, "layer_scalar", 0.0)),
            norm_whole=self._form.whole,
            activation=ACTIVATIONS[getattr(config, "hidden_activation", None) or config.hidden_act],
            o=self._matrix(attention.o_proj if hasattr(attention, "o_proj") else attention.dense),
        )
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
            if hasattr(attention, name):
                setattr(struct, name, self._norm(getattr(attention, name)))
        if hasattr(layer, "per_layer_input_gate"):
            struct.ple_gate = self._matrix(layer.per_layer_input_gate)
            struct.ple_out = self._matrix(layer.per_layer_projection)
            struct.after_ple = self._norm(layer.post_per_layer_input_norm)
        if hasattr(mlp, "gate_up_proj"):
            struct.gate, struct.up = self._matrices(mlp.gate_up_proj, 2)
            struct.down = self._matrix(mlp.down_proj)
        elif hasattr(mlp, "c_fc"):
            struct.up, struct.down = self._matrix(mlp.c_fc), self._matrix(mlp.c_proj)
        else:
            struct.gate, struct.up, struct.down = (
                self._matrix(getattr(mlp, f"{n}_proj")) for n in ("gate", "up", "down")
            )
        places = ("input", "after_attention", "before_mlp", "after_mlp")
        for place, name in zip(places, self._form.norms, strict=True):
            if name is not None:
                setattr(struct, place, self._norm(getattr(layer, name)))
        return struct

    def _norm(self, norm: Any, times: float = 1.0) -> Norm:
        """A norm, whose output is multiplied with `times`."""
        weight = getattr(norm, "weight", None)
        if weight is not None:
            weight = (weight.float() + (1.0 if self._form.plus_one else 0.0)) * times
        eps = float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)
        kind = 2 if isinstance(norm, nn.LayerNorm) else 1
        return Norm(self._held.floats(weight), self._held.floats(getattr(norm, "bias", None)), eps, kind)

    def _matrix(self, linear: Any) -> Matrix:
        return self._matrices(linear, 1)[0]

    def _matrices(self, linear: Any, count: int) -> list[Matrix]:
        """The outputs of a linear layer as `count` matrices of the same size."""
        base: Any = getattr(linear, "base", linear)  # below the factors of an adapter, see `AdaptedLinear`
        whole: PackedMatrix = base.matrix  # AttributeError: a layer of another kind
        size = whole.outs // count
        parts = [whole.part(first, first + size) for first in range(0, whole.outs, size)]
        self._held += parts
        if base is not linear:
            for part, b in zip(parts, linear.b.chunk(count), strict=True):
                self._correct(part.struct, linear.a, b)
        return [part.struct for part in parts]

    def _correct(self, matrix: Matrix, a: Tensor, b: Tensor) -> None:
        """Add the correction b (a x) in mask rows. Raises `IncompatibleModels` if its rank is too large."""
        if len(a) > MAX_RANK:
            raise IncompatibleModels(
                "the SPACE adapter's rank is too large for a CPU", got=len(a), expected=f"at most {MAX_RANK}"
            )
        factors = [PackedMatrix(len(factor), factor.shape[1], pack(factor.detach()), None) for factor in (a, b)]
        self._held += factors
        matrix.a, matrix.b = (ctypes.pointer(factor.struct) for factor in factors)
