"""The models that a SPACE run trains: the target as transformers loads it, with peft's low-rank layers in it.

gated   plain model reads the text; the same tensors under low-rank layers read the mask tokens
full    one model reads both; low-rank layers are merged into it in the end, or (`lora: false`) every weight is trained
"""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ...errors import ConfigError, IncompatibleModels
from ...heads.space import SpaceAdapter, SpaceConfig, short
from ...runner import LoadedModel, wrap_model
from ...runner.adapters import decoder_layers, share_copy
from ..extras import need

USUAL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Trained:
    """adapter: masks and factors. plain, adapted: as `SpaceRecipe` takes them. module: what its checkpoints hold."""

    adapter: SpaceAdapter
    plain: PreTrainedModel
    adapted: nn.Module
    module: nn.Module


def plain_model(folder: str, device: torch.device) -> PreTrainedModel:
    """The target in float32 as transformers has it, frozen. Raises `ConfigError`."""
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"the model {folder!r} cannot be read for training", got=str(error)) from error
    return cast("Any", model).to(device).eval().requires_grad_(False)


def layers_of_model(model: PreTrainedModel) -> nn.ModuleList:
    """Its decoder layers. Raises `IncompatibleModels` where they are not found."""
    return decoder_layers(model, int(model.config.get_text_config().num_hidden_layers))


def windows_of(model: PreTrainedModel) -> dict[str, int | None]:
    """How far each kind of layer sees, None: to the beginning; one kind "" where all layers see alike.

    transformers takes a mask for each kind of `layer_types` where a model mixes them, else one for all layers. Raises
    `IncompatibleModels` for kinds of layers whose masks are not known.
    """
    config = model.config.get_text_config()
    window: int | None = getattr(config, "sliding_window", None)
    kinds = set[str](getattr(config, "layer_types", None) or ())
    others = kinds - {"full_attention", "sliding_attention"}
    if others:
        raise IncompatibleModels("mask tokens cannot be trained in these layers", got=", ".join(sorted(others)))
    if len(kinds) == 2:
        return {"full_attention": None, "sliding_attention": window}
    return {"": None if kinds == {"full_attention"} else window}


def linears_of(model: PreTrainedModel, names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
    """Full names within a layer, and shapes, of the linear layers that end in these; empty: the usual ones, or all.

    Raises `ConfigError` for a name that is not there.
    """
    linears = {
        name: (module.out_features, module.in_features)
        for name, module in layers_of_model(model)[0].named_modules()
        if isinstance(module, nn.Linear)
    }
    chosen = [name for name in linears if short(name) in (names or USUAL)] or ([] if names else list(linears))
    missing = set(names) - {short(name) for name in chosen}
    if missing or not chosen:
        raise ConfigError(
            "head.linears names no linear layer of the model", got=", ".join(sorted(missing)) or "none",
            expected="some of " + ", ".join(short(name) for name in linears),
        )  # fmt: skip
    return tuple(chosen), tuple(linears[name] for name in chosen)


def with_factors(plain: PreTrainedModel, config: SpaceConfig, start: SpaceAdapter | None) -> Trained:
    """Low-rank layers of peft over the model's own tensors; those of the adapter are the same parameters.

    start: an adapter of this shape, or one without factors, which get theirs.
    """
    adapter = _fresh(plain, config)
    if start is not None:
        adapter.load_state_dict(start.state_dict(), strict=start.config.rank > 0)
    adapted = share_copy(plain)
    if config.rank:
        adapted = _inject(adapted, adapter)
    return Trained(adapter, plain, adapted, adapter)


def whole(plain: PreTrainedModel, config: SpaceConfig, start: SpaceAdapter | None) -> Trained:
    """Every weight of the model is trained, and the mask embeddings with it. Raises `ConfigError`."""
    if start is not None and start.config.rank:
        raise ConfigError(
            "start has low-rank factors, for which there is no place where every weight is trained",
            got=f"rank {start.config.rank}", expected="an adapter without factors", fix="head.lora=true",
        )  # fmt: skip
    adapter = start if start is not None else _fresh(plain, replace(config, rank=0, linears=(), shapes=()))
    model = plain.requires_grad_(True)
    return Trained(adapter, model, model, Whole(adapter, model))


@final
class Whole(nn.Module):
    """A model and its mask embeddings as one module."""

    def __init__(self, adapter: SpaceAdapter, model: nn.Module):
        super().__init__()
        self.config = adapter.config
        self.adapter, self.model = adapter, model


def merge(trained: Trained) -> PreTrainedModel:
    """The fine-tuned model, without any low-rank layer left."""
    model = copy.deepcopy(trained.adapted)
    return cast("Any", model).merge_and_unload() if hasattr(model, "merge_and_unload") else cast("Any", model)


def without_factors(adapter: SpaceAdapter) -> SpaceAdapter:
    """Masks and transition alone: what a fine-tuned model still needs."""
    bare = SpaceAdapter(replace(adapter.config, rank=0, linears=(), shapes=()))
    bare.load_state_dict({name: t for name, t in adapter.state_dict().items() if not name.startswith("layers.")})
    return bare


def save_merged(
    folder: Path, trained: Trained, target: LoadedModel, tokenizer: PreTrainedTokenizerBase | None
) -> LoadedModel:
    """Write the fine-tuned model as transformers does, in the target's dtype, and load it."""
    model = cast("Any", merge(trained)).to(target.dtype)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return wrap_model(model, tokenizer, f"{target.name}-tuned")


def _fresh(plain: PreTrainedModel, config: SpaceConfig) -> SpaceAdapter:
    """Masks begin as the mean embedding with a little noise: what a model has seen is near that."""
    adapter = SpaceAdapter(config)
    embeddings = cast("torch.Tensor", cast("Any", plain.get_input_embeddings()).weight).detach()
    with torch.no_grad():
        spread = embeddings.std(0)
        adapter.masks.copy_(embeddings.mean(0) + 0.1 * torch.randn_like(adapter.masks).to(spread) * spread)
    return adapter.to(embeddings.device)


def _inject(model: PreTrainedModel, adapter: SpaceAdapter) -> nn.Module:
    peft, config = need("peft", "training SPACE"), adapter.config
    chosen = peft.LoraConfig(r=config.rank, lora_alpha=config.rank, target_modules=[short(n) for n in config.linears])
    made = peft.get_peft_model(model, chosen)
    layers = layers_of_model(cast("PreTrainedModel", cast("Any", made).get_base_model()))
    for index, layer in enumerate(layers):
        for name in config.linears:
            factors, linear = adapter.factors(index, name), cast("Any", layer.get_submodule(name))
            assert factors is not None
            with torch.no_grad():
                linear.lora_A["default"].weight.copy_(factors.a)
                linear.lora_B["default"].weight.copy_(factors.b)
            factors.a, factors.b = linear.lora_A["default"].weight, linear.lora_B["default"].weight
    return made
