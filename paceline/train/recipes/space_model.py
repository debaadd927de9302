"""The models that a SPACE run trains: the target as transformers loads it, with peft's low-rank layers in it."""

import copy
from dataclasses import dataclass, replace
from typing import Any, cast, final

import torch
from torch import nn
from transformers import PreTrainedModel

from ...errors import ConfigError
from ...heads.space import SpaceAdapter, SpaceConfig, short
from ...runner.adapters import share_copy
from ..run_folder import need
from .models import layers_of


@dataclass(frozen=True)
class Trained:
    """adapter: masks and factors. plain, adapted: the models of text and masks. module: what its checkpoints hold."""

    adapter: SpaceAdapter
    plain: PreTrainedModel
    adapted: nn.Module
    module: nn.Module


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
    """Masks and transition alone: a fine-tuned model needs no more."""
    bare = SpaceAdapter(replace(adapter.config, rank=0, linears=(), shapes=()))
    bare.load_state_dict({name: t for name, t in adapter.state_dict().items() if not name.startswith("layers.")})
    return bare


def _fresh(plain: PreTrainedModel, config: SpaceConfig) -> SpaceAdapter:
    """Masks begin as the mean embedding with a little noise, which is near what the model has seen."""
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
    layers = layers_of(cast("PreTrainedModel", cast("Any", made).get_base_model()))
    for index, layer in enumerate(layers):
        for name in config.linears:
            factors, linear = adapter.factors(index, name), cast("Any", layer.get_submodule(name))
            assert factors is not None
            with torch.no_grad():
                linear.lora_A["default"].weight.copy_(factors.a)
                linear.lora_B["default"].weight.copy_(factors.b)
            factors.a, factors.b = linear.lora_A["default"].weight, linear.lora_B["default"].weight
    return made
