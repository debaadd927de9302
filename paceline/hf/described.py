"""A model that kernels run, as modules with transformers' names that hold weights and compute nothing.

Weights come one after another, in any order; each goes straight into the form of the kernels.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .. import kernels
from ..kernels.library import ACTIVATIONS, FORMATS
from ..quant.blocks import BlockEmbedding, BlockLinear
from ..quant.file_arena import FileArena
from ..quant.packed import PackedLinear, WeightArena, linear_of
from .checkpoint import Stored
from .describe import FORMS, Form, config_of, head_dim_of, is_described, key_layers_of
from .described_experts import BLOCKS, CORRECTION, ExpertBlock, Router, has_experts
from .experts import num_experts_of
from .fingerprint import identified, remember, sample
from .latent import LatentAttention
from .rotary import has_fixed_ropes

CPU = torch.device("cpu")
HEAD, TABLE, EXPERTS = "lm_head.weight", "model.embed_tokens.weight", ".experts."
_DTYPES = ("BF16", "F16", "F32", "F64")  # of safetensors files


def has_kernels(config: PretrainedConfig, dtype: torch.dtype, device: torch.device = CPU) -> bool:
    """Whether the kernels of a device run models of this config with weights in this dtype, or in blocks."""
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    known = is_described(config) and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and activation in ACTIVATIONS
    known = known and type(config).__module__.startswith("transformers.")
    sees_all = getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision")
    known = known and not sees_all and dtype in FORMATS and has_fixed_ropes(config)
    found = kernels.kernels_for(device)
    if num_experts_of(config):
        known = known and config.model_type in BLOCKS
    if known and (num_experts_of(config) or getattr(config, "kv_lora_rank", None) or FORMS[config.model_type].pairs):
        known = hasattr(found, "Experts")  # kernels of a CPU
    return known and found is not None


class DescribedModel(nn.Module):
    """A causal language model of `describe.FORMS`, without weights until it takes them.

    shapes: of every weight, by its name in transformers. A tied output layer has none of its own.
    experts_place: where those of experts go, until it has taken them. experts_on_disk: whether that was a file.
    """

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device = CPU):
        super().__init__()
        self.config: Any = config
        self.device = device
        self.generation_config = GenerationConfig.from_model_config(config)
        self.model = _Decoder(self.config, dtype)
        self.lm_head: nn.Module = _linear(self.config.hidden_size, self.config.vocab_size, False, dtype)
        self._place, self.experts_place = WeightArena(), WeightArena()
        self.experts_on_disk = False
        self._samples = dict[str, tuple[tuple[int, ...], bytes]]()
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.state_dict().items()}
        if self.config.tie_word_embeddings:
            del self.shapes[HEAD]

    @property
    def dtype(self) -> torch.dtype:
        """Of embedded rows, of the cache and of weights that are not in blocks."""
        return cast("Tensor", self.model.norm.weight).dtype

    @property
    def base_model(self) -> "_Decoder":
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value

    def take(self, weights: Iterable[tuple[str, Any]]) -> dict[str, list[Any]]:
        """Take weights by their names, one after another; returns the report of `checkpoint.check_loaded_weights`.

        Tensors are copied, so that nothing of the file that they may map stays in use.
        """
        unexpected, misshapen, own = list[str](), list[tuple[str, Any, Any]](), self.shapes
        for name, weight in weights:
            if name not in own:
                unexpected.append(name)
            elif tuple(weight.shape) != own[name]:
                misshapen.append((name, tuple(weight.shape), own[name]))
            else:
                self._put(name, weight)
        missing = [name for name in own if name not in self._samples]
        remember(self, identified(self.config, self._samples))
        self.experts_on_disk = isinstance(self.experts_place, FileArena)
        self.experts_place.close()
        self._samples, self._place, self.experts_place = {}, WeightArena(), WeightArena()
        self.requires_grad_(False).eval()
        return {"missing_keys": missing, "mismatched_keys": misshapen, "unexpected_keys": unexpected}

    def place_of(self, name: str) -> WeightArena:
        """Where the weights of a layer go."""
        return self.experts_place if EXPERTS in name else self._place

    def _put(self, name: str, weight: Any) -> None:
        path, _, leaf = name.rpartition(".")
        module = self.get_submodule(path)
        routes = isinstance(module, Router) or leaf == CORRECTION
        if isinstance(weight, Tensor) and not (routes and weight.dtype is torch.float32):
            weight = weight.to(self.dtype)
        if leaf == "weight" and isinstance(module, nn.Linear):
            self._put_matrix(path, weight, module.bias)
        elif not isinstance(weight, Tensor):
            table = BlockEmbedding(weight, self.dtype, cast("Embedding", module).embed_scale)
            self.set_submodule(path, table)
            self._note(name, table)
        else:
            setattr(module, leaf, nn.Parameter(weight.to(self.device, copy=True), requires_grad=False))
            self._note(name, weight)
        if name == TABLE and self.config.tie_word_embeddings:
            self._put_matrix(HEAD.rpartition(".")[0], weight)

    def _put_matrix(self, path: str, weight: Any, bias: Tensor | None = None) -> None:
        if not isinstance(weight, Tensor):
            layer: nn.Module = BlockLinear(weight, bias, self.dtype)
            self._note(f"{path}.weight", layer)
        else:
            self._note(f"{path}.weight", weight)
            layer = linear_of(weight, bias)
            if PackedLinear.fits(layer):
                layer = PackedLinear(layer, self.place_of(path))
            else:
                layer.weight = nn.Parameter(weight.to(self.device, copy=True), requires_grad=False)
        self.set_submodule(path, layer)

    def _note(self, name: str, weight: Any) -> None:
        self._samples[name] = tuple(weight.shape), sample(weight)


def outlined(
    config: PretrainedConfig, dtype: Any, stored: Mapping[str, Stored], has_spare_biases: bool = False
) -> DescribedModel | None:
    """The model of a checkpoint, without weights. None where transformers must read it.

    That is a model without native passes, one whose weights do not have the names and shapes of its architecture, and
    one that would have to be refused: transformers knows old names, and what is wrong.

    has_spare_biases: layers that have no bias may be stored with one.
    """
    pad = getattr(config, "pad_token_id", None)
    if not has_kernels(config, dtype) or (pad is not None and pad >= config.vocab_size):
        return None
    try:
        model = DescribedModel(config, dtype)
    except (AttributeError, TypeError, KeyError, ValueError, ArithmeticError, RuntimeError):
        return None
    spare = {f"{name.removesuffix('.weight')}.bias" for name in model.shapes} if has_spare_biases else set[str]()
    for layer in model.base_model.shared_layers:  # which some files have keys for
        spare |= {f"model.layers.{layer}.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm", "v_norm")}
    if model.shapes.keys() != stored.keys() - (spare - model.shapes.keys()):
        return None
    fits = all(stored[name].shape == shape for name, shape in model.shapes.items())
    return model if fits and all(tensor.dtype in _DTYPES for tensor in stored.values()) else None


class _Decoder(nn.Module):
    def __init__(self, config: Any, dtype: torch.dtype):
        super().__init__()
        form = FORMS[config.model_type]
        scale = config.hidden_size**0.5 if form.scaled else getattr(config, "scale_emb", None)
        self.shared_layers = [layer for layer, other in enumerate(key_layers_of(config)) if other != layer]
        self.embed_tokens: Any = Embedding(config.vocab_size, config.hidden_size, scale, dtype)
        self.layers = nn.ModuleList(_Layer(config, form, index, dtype) for index in range(config.num_hidden_layers))
        self.norm = _norm(config, form, config.hidden_size, dtype)
        self.rotary_emb = Rotary(config)
        size = self.hidden_size_per_layer_input = getattr(config, "hidden_size_per_layer_input", 0)
        if size:
            width = config.num_hidden_layers * size
            self.embed_tokens_per_layer = Embedding(config.vocab_size_per_layer_input, width, size**0.5, dtype)
            self.per_layer_model_projection = _linear(config.hidden_size, width, False, dtype)
            self.per_layer_projection_norm = _norm(config, form, size, dtype)


class _Layer(nn.Module):
    def __init__(self, config: Any, form: Form, index: int, dtype: torch.dtype):
        super().__init__()
        is_shared, kinds = key_layers_of(config)[index] != index, getattr(config, "layer_types", None)
        if kinds is not None and kinds[index] == "linear_attention":
            self.linear_attn = _DeltaNet(config, dtype)
        elif getattr(config, "kv_lora_rank", None):
            self.self_attn: nn.Module = LatentAttention(config, partial(_linear, dtype=dtype), dtype)
        else:
            self.self_attn = _Attention(config, form, index, is_shared, dtype)
        if has_experts(config, index):
            block = ExpertBlock(config, partial(_linear, dtype=dtype), dtype)
            self.add_module(BLOCKS[config.model_type].path, block)
        else:
            self.mlp = _Mlp(config, form, 2 if is_shared and config.use_double_wide_mlp else 1, dtype)
        if form.value_norms:
            self.layer_scalar = nn.Parameter(torch.empty(1, dtype=dtype, device="meta"), requires_grad=False)
        if size := getattr(config, "hidden_size_per_layer_input", 0):
            self.per_layer_input_gate = _linear(config.hidden_size, size, False, dtype)
            self.per_layer_projection = _linear(size, config.hidden_size, False, dtype)
            self.post_per_layer_input_norm = _norm(config, form, config.hidden_size, dtype)
        for name in filter(None, form.norms):
            self.add_module(name, _norm(config, form, config.hidden_size, dtype))


class _Attention(nn.Module):
    def __init__(self, config: Any, form: Form, index: int, is_shared: bool, dtype: torch.dtype):
        super().__init__()
        own = config_of(config, index)
        d = self.head_dim = head_dim_of(own)
        wide, narrow, hidden = config.num_attention_heads * d, own.num_key_value_heads * d, config.hidden_size
        scalar = 1.0 if form.value_norms else getattr(config, "query_pre_attn_scalar", None) or d
        self.scaling = float(getattr(config, "attention_multiplier", None) or scalar**-0.5)
        self.attn_logit_softcapping = getattr(config, "attn_logit_softcapping", None)
        self.sliding_window = getattr(config, "sliding_window", None)
        if hasattr(config, "layer_types"):
            slides = getattr(config, "use_sliding_window", True) and config.layer_types[index] == "sliding_attention"
            self.sliding_window = self.sliding_window if slides else None
        self.use_rope = bool(config.no_rope_layers[index]) if hasattr(config, "no_rope_layers") else True
        all_biased = getattr(config, "use_bias", False)
        biased = all_biased or getattr(config, "attention_bias", False)
        self.v_proj: nn.Module | None = None
        if form.joined:
            self.qkv_proj = _linear(hidden, wide + 2 * narrow, False, dtype)
        else:
            k_is_v = self.sliding_window is None and getattr(config, "attention_k_eq_v", False)
            for name in "q" if is_shared else "qk" if k_is_v else "qkv":
                size = narrow if name != "q" else 2 * wide if form.gated else wide
                setattr(self, f"{name}_proj", _linear(hidden, size, biased or form.qkv_bias, dtype))
        out_biased = not form.bare_out and (all_biased or getattr(config, "attention_out_bias", biased))
        self.o_proj = _linear(wide, hidden, out_biased, dtype)
        if (form.whole or form.head_norms) and getattr(config, "use_qk_norm", True):
            self.q_norm = _norm(config, form, wide if form.whole else d, dtype)
            if not is_shared:
                self.k_norm = _norm(config, form, narrow if form.whole else d, dtype)
        if form.sinks:
            self.sinks = nn.Parameter(torch.empty(config.num_attention_heads, dtype=dtype, device="meta"))
        if form.value_norms and not is_shared:
            self.v_norm = nn.RMSNorm(d, config.rms_norm_eps, elementwise_affine=False)


class _DeltaNet(nn.Module):
    def __init__(self, config: Any, dtype: torch.dtype):
        super().__init__()
        self.num_v_heads, self.num_k_heads = config.linear_num_value_heads, config.linear_num_key_heads
        self.head_k_dim, self.head_v_dim = config.linear_key_head_dim, config.linear_value_head_dim
        hidden, values = config.hidden_size, self.num_v_heads * self.head_v_dim
        self.conv_dim = 2 * self.num_k_heads * self.head_k_dim + values
        self.conv1d = nn.Conv1d(
            *(self.conv_dim, self.conv_dim, config.linear_conv_kernel_dim), groups=self.conv_dim, bias=False,
            device="meta", dtype=dtype,
        )  # fmt: skip
        for name in ("dt_bias", "A_log"):
            self.register_parameter(name, nn.Parameter(torch.empty(self.num_v_heads, device="meta", dtype=dtype)))
        self.norm = nn.RMSNorm(self.head_v_dim, config.rms_norm_eps, device="meta", dtype=dtype)
        sizes = {"qkv": self.conv_dim, "z": values, "b": self.num_v_heads, "a": self.num_v_heads}
        if config.model_type == "qwen3_next":
            sizes = {"qkvz": self.conv_dim + values, "ba": 2 * self.num_v_heads}
        for name, size in sizes.items():
            self.add_module(f"in_proj_{name}", _linear(hidden, size, False, dtype))
        self.out_proj = _linear(values, hidden, False, dtype)


class _Mlp(nn.Module):
    def __init__(self, config: Any, form: Form, times: int, dtype: torch.dtype):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size * times
        biased = getattr(config, "use_bias", False) or getattr(config, "mlp_bias", False)
        if form.layer_norm:
            self.c_fc, self.c_proj = _linear(hidden, inner, biased, dtype), _linear(inner, hidden, biased, dtype)
            return
        if form.joined_mlp:
            self.gate_up_proj = _linear(hidden, 2 * inner, biased, dtype)
        else:
            self.gate_proj, self.up_proj = (_linear(hidden, inner, biased, dtype) for _ in range(2))
        self.down_proj = _linear(inner, hidden, biased, dtype)


class Embedding(nn.Module):
    """Token embeddings. scale: what rows are multiplied with, in their dtype."""

    def __init__(self, count: int, width: int, scale: float | None, dtype: torch.dtype):
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.embed_scale = count, width, scale
        self.weight = nn.Parameter(torch.empty(count, width, dtype=dtype, device="meta"), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[...] -> [..., E]."""
        rows = nn.functional.embedding(token_ids, self.weight)
        return rows if self.embed_scale is None else rows * torch.tensor(self.embed_scale, dtype=rows.dtype)


class Rotary(nn.Module):
    """Cosines and sines of rotary positions, of each kind of layer where they differ (`layer_types`)."""

    def __init__(self, config: Any):
        super().__init__()
        if isinstance(next(iter(config.rope_parameters.values())), dict):
            self.layer_types = sorted(set(config.layer_types))
        self._config, self._known = config, dict[str | None, tuple[Tensor, float]]()

    def forward(self, like: Tensor, position_ids: Tensor, kind: str | None = None) -> tuple[Tensor, Tensor]:
        """[B, N] -> [B, N, d] each, in the dtype of `like`."""
        if kind not in self._known:
            self._known[kind] = _frequencies(self._config, kind)
        frequencies, factor = self._known[kind]
        angles = position_ids[..., None].float() * frequencies.to(position_ids.device)
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * factor).to(like.dtype), (angles.sin() * factor).to(like.dtype)


def _frequencies(config: Any, kind: str | None) -> tuple[Tensor, float]:
    """Angles per position, float32 [d / 2], and the factor of cosines and sines, as transformers computes them."""
    rope = config.rope_parameters if kind is None else config.rope_parameters[kind]
    if rope["rope_type"] != "default":
        options = {} if kind is None else {"layer_type": kind}
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), **options)
    form = FORMS[config.model_type]
    share = rope.get("partial_rotary_factor", 1.0) if form.partial else 1.0
    d = int(head_dim_of(config_of(config, kind)) * share)
    return 1.0 / (rope["rope_theta"] ** (torch.arange(0, d, 2, dtype=torch.float32) / d)), 1.0


def _linear(ins: int, outs: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
    weight, bias_of = (torch.empty(*shape, device="meta", dtype=dtype) for shape in ((outs, ins), (outs,)))
    return linear_of(weight, bias_of if bias else None)


def _norm(config: Any, form: Form, width: int, dtype: torch.dtype) -> nn.Module:
    if form.layer_norm:
        return nn.LayerNorm(width, config.norm_epsilon, device="meta", dtype=dtype)
    return nn.RMSNorm(width, config.rms_norm_eps, device="meta", dtype=dtype)
