"""The only file that knows the inside of transformers: loading, what a model can do, and how to call it."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..errors import ConfigError, IncompatibleModels
from ..modules import SpaceAdapter
from ..quant import pack_linears
from .adapter import put_on, share_copy
from .attention import NAME
from .fingerprint import fingerprint, remember
from .fused import FusedDecoder, fuse, is_fused
from .gated import Gate
from .kv_cache import SlotCache
from .layout import PassLayout
from .placement import device_of, dtype_of
from .selftest import Reference, plain_reference
from .states import States

_LINEAR_KINDS = ("linear_attention", "mamba", "recurrent", "conv", "ssm", "rwkv", "hybrid")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A causal language model, ready for trees, with what the engine must know about it.

    fused: runs the model where its layers are of the Llama form. attends_trees: the model routes through our attention
    function; otherwise it is given a 4-D mask. reference: what plain transformers says on a few made-up tokens, to
    hold the tree pass against. context: the most tokens a sequence may have. mixes_rows: experts make a row's
    numerics depend on the others. fingerprint: which checkpoint it is, see `runner.fingerprint`. gate: of the adapter
    that the model wears.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    context: int
    eos_ids: frozenset[int]
    attends_trees: bool
    mixes_rows: bool
    reference: Reference
    fingerprint: str
    fused: FusedDecoder | None = None
    gate: Gate | None = None

    @property
    def vocab_size(self) -> int:
        """Rows of the output head, padding included."""
        return self.model.get_output_embeddings().out_features  # type: ignore[union-attr, return-value]

    @property
    def device(self) -> torch.device:
        """Where the token embeddings live."""
        return self.model.get_input_embeddings().weight.device  # type: ignore[union-attr, return-value]

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.model.dtype

    @property
    def num_layers(self) -> int:
        """Decoder layers; also the index of the last hidden state, which has been through the final norm."""
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        """E, the width of the hidden states."""
        return int(self.model.config.get_text_config().hidden_size)

    def forward(self, token_ids: Tensor, layout: PassLayout, cache: SlotCache, states: States | None = None) -> Tensor:
        """Raw logits [B, N, V] of every node of a pass. Fills in the hidden states that `states` asks for.

        Where `layout.is_mask` is given, the adapter's gate is open for these rows during the pass.
        """
        if layout.is_mask is None or self.gate is None:
            return self._logits(token_ids, layout, cache, states)
        with self.gate.opened(token_ids, layout.is_mask) as plain_ids:
            return self._logits(plain_ids, layout, cache, states)

    def _logits(self, token_ids: Tensor, layout: PassLayout, cache: SlotCache, states: States | None) -> Tensor:
        if self.fused is not None:
            return self.fused.logits(token_ids, layout, cache, states)
        return self._call(self.model, token_ids, layout, cache, states).logits

    def prefill(self, token_ids: Tensor, layout: PassLayout, cache: SlotCache, states: States | None = None) -> None:
        """Fill the cache; the output head is left out, since nothing reads its logits."""
        if self.fused is not None:
            self.fused.hidden(token_ids, layout, cache, states)
            return
        self._call(self.model.base_model, token_ids, layout, cache, states)

    def _call(self, module: nn.Module, token_ids: Tensor, layout: PassLayout, cache: SlotCache, states: States | None):
        options: dict[str, object] = {"position_ids": layout.position_ids, "past_key_values": cache, "use_cache": True}
        if states:
            options["output_hidden_states"] = True
        if self.attends_trees:
            options["paceline_pass"] = layout
        else:
            options["attention_mask"] = layout.mask_4d(self.model.dtype)
        if self.gate is not None and layout.is_mask is not None:
            embeddings: nn.Module = self.model.get_input_embeddings()  # type: ignore[assignment]
            out = module(inputs_embeds=self.gate.embed(embeddings(token_ids)), **options)
        else:
            out = module(input_ids=token_ids, **options)
        for index in states or ():
            states[index] = out.hidden_states[index]  # type: ignore[index]
        return out

    def with_model(self, model: PreTrainedModel) -> "LoadedModel":
        """The same description around another module of the same architecture, which wears nothing."""
        return replace(self, model=model, fused=FusedDecoder(model) if is_fused(model) else None, gate=None)

    def wearing(self, adapter: SpaceAdapter) -> "LoadedModel":
        """The same model with an adapter on, in a module tree of its own. Raises `IncompatibleModels` without a fit."""
        model = share_copy(self.model)
        gate = put_on(model, adapter, self.device, self.dtype)
        return replace(self, model=model, fused=FusedDecoder(model, gate) if is_fused(model) else None, gate=gate)


def load_model(
    name_or_path: str,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a model folder or hub id. Weights come from safetensors only.

    dtype: None keeps the checkpoint's. device: None takes CUDA where there is one.
    Raises `ConfigError` for a name, dtype or file that cannot be read, `IncompatibleModels` for what is no causal LM.
    """
    place, kind = device_of(device), dtype_of(dtype)
    try:
        config = AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"no model at {name_or_path!r}",
            got=_first_line(error),
            expected="a folder with config.json, a hub id, or a name that `paceline models` lists",
        ) from error
    known = trust_remote_code or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if config.is_encoder_decoder or not known:
        raise _not_causal(name_or_path, config)
    _refuse_state(config)
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            name_or_path,
            config=config,
            dtype=kind or "auto",
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:  # every reader of weight files raises its own kind
        raise ConfigError(
            f"the weights of {name_or_path!r} cannot be read",
            got=_first_line(error),
            expected="complete *.safetensors files that match config.json",
            fix="fetch the model again",
        ) from error
    # transformers fills what is missing with random numbers and goes on
    for what, keys in (("lacks", loaded["missing_keys"]), ("has misshapen", loaded["mismatched_keys"])):
        if keys:
            example = sorted(map(str, keys))[0]
            raise ConfigError(
                f"{name_or_path!r} {what} weights",
                got=f"{len(keys)} of them, for example {example}",
                expected="every tensor of the architecture in config.json",
                fix="fetch the model again, or name the right folder",
            )
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{name_or_path!r} has no usable tokenizer", got=_first_line(error)) from error
    model = model.to(place).requires_grad_(False)  # pyright: ignore[reportArgumentType]
    return _prepare(model, tokenizer, Path(name_or_path).name)


def wrap_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, name: str = "") -> LoadedModel:
    """Describe a model that the caller loaded. It stays as it is: ours is a second module tree over its tensors."""
    return _prepare(share_copy(model), tokenizer, name)


def _prepare(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str) -> LoadedModel:
    """Refuse what cannot be decoded in trees; route the attention through ours and pack the linear layers."""
    if model.config.is_encoder_decoder or model.get_output_embeddings() is None:
        raise _not_causal(name or type(model).__name__, model.config)
    config = model.config.get_text_config()
    _refuse_state(config)
    if model.config._attn_implementation == NAME:  # wrapped before: the reference needs an attention of its own again
        model.set_attn_implementation("eager")
    if getattr(model, "_is_stateful", False):
        raise _cannot_roll_back(config.model_type, "recurrent state")
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        raise IncompatibleModels(
            f"{config.model_type} uses ALiBi, whose biases follow columns and not tree positions",
            expected="a model with rotary or learned positions",
        )
    eos = getattr(model.generation_config, "eos_token_id", None)
    eos = eos if eos is not None else config.eos_token_id
    eos_ids = frozenset([eos] if isinstance(eos, int) else eos or [])
    mixes = any((getattr(config, key, None) or 0) > 1 for key in _EXPERTS)
    model.eval()
    which = fingerprint(model)
    remember(model, which)
    reference = plain_reference(model)
    attends = _route_attention(model)
    if not attends and any(kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or []):
        raise IncompatibleModels(f"{config.model_type} mixes sliding windows with an attention of its own")
    fused = attends and (is_fused(model) or fuse(model))
    pack_linears(model)
    name, context = name or config.model_type, _context(config)
    decoder = FusedDecoder(model) if fused else None
    return LoadedModel(model, tokenizer, name, context, eos_ids, attends, mixes, reference, which, decoder)


@torch.inference_mode()
def _route_attention(model: PreTrainedModel) -> bool:
    """True if every layer goes through our attention function; False leaves it its own, driven by 4-D masks.

    Found by trying: some architectures take attention functions but do not hand keywords through to them.
    """
    place: torch.device = model.get_input_embeddings().weight.device  # type: ignore[union-attr, assignment]
    cache = SlotCache(1, 8)
    layout = PassLayout(cache.begin([cache.allocate()], 2), 2, None, False, device=place)  # type: ignore[arg-type]
    try:
        model.set_attn_implementation(NAME)
        model(
            input_ids=torch.zeros(1, 2, dtype=torch.long, device=place),
            position_ids=layout.position_ids,
            past_key_values=cache,
            use_cache=True,
            paceline_pass=layout,
        )
        if layout.num_calls == len(cache) > 0:
            return True
    except (IncompatibleModels, ValueError, TypeError, KeyError):
        pass
    model.set_attn_implementation("eager")
    return False


def _refuse_state(config) -> None:
    text = config.get_text_config()
    for kind in getattr(text, "layer_types", None) or []:
        if any(word in kind for word in _LINEAR_KINDS):
            raise _cannot_roll_back(text.model_type, f"{kind} layers")
        if kind not in ("full_attention", "sliding_attention"):
            raise IncompatibleModels(
                f"{text.model_type} has layers of kind {kind!r}", expected="full_attention or sliding_attention"
            )


def _not_causal(name: str, config) -> IncompatibleModels:
    return IncompatibleModels(
        f"{name!r} is not a causal language model",
        got=f"model type {config.model_type!r}",
        expected="a decoder-only model that AutoModelForCausalLM loads",
    )


def _cannot_roll_back(model_type: str, what: str) -> IncompatibleModels:
    return IncompatibleModels(
        f"{model_type} keeps a running state that cannot forget rejected tokens",
        got=what,
        expected="attention layers, whose cache can be cut back to the accepted tokens",
    )


def _context(config) -> int:
    """Longest sequence; capped where positions are rescaled by length, since a pass would rescale all its rows."""
    context = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 1 << 20
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *[r for r in rope.values() if isinstance(r, dict)]]
    for one in ropes:
        if one.get("rope_type") in ("dynamic", "longrope"):
            original = one.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None) or context
            context = min(context, int(original))
    return int(context)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
