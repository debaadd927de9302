"""The models that recipes read and train, as transformers loads them, and what of their layers training must know."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from ..errors import ConfigError, IncompatibleModels
from ..hf.checkpoint import check_folder, local_folder, quietly, refused
from ..hf.halves import text_half
from ..hf.vision import is_vlm
from ..methods.heads.parts import last_part
from ..system.hardware import available_memory
from ..target.adapters import decoder_layers
from ..zoo import resolve

_BYTES = 16  # of a parameter in training: itself, its gradient and AdamW's two means in float32
USUAL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _reading(name: str) -> AbstractContextManager[None]:
    return refused(f"the model {name!r} cannot be read for training")


@quietly()
def outlined(name: str) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """The language model of a folder without its weights, and the whole if it reads images. Raises `ConfigError`."""
    place = local_folder(resolve(name))
    check_folder(place)
    with _reading(name), torch.device("meta"):
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
        if not is_vlm(config):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False), None
        whole = AutoModelForImageTextToText.from_config(config, trust_remote_code=False)
    return text_half(whole), whole


@quietly()
def plain_models(name: str, device: torch.device) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """The language model of a folder in float32, frozen, and the whole if it reads images. Raises `ConfigError`."""
    folder = resolve(name)
    with _reading(name):
        reads_images = is_vlm(AutoConfig.from_pretrained(folder, trust_remote_code=False))
        kind: Any = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
        model = kind.from_pretrained(folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False)
    model = model.to(device).eval().requires_grad_(False)
    return (text_half(model), model) if reads_images else (model, None)


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Its decoder layers. Raises `IncompatibleModels` where they are not found."""
    return decoder_layers(model, int(model.config.get_text_config().num_hidden_layers))


def windows_of(model: PreTrainedModel) -> dict[str, int | None]:
    """How many columns each kind of layer sees, None: all; one kind "" where all layers see alike.

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
        for name, module in layers_of(model)[0].named_modules()
        if isinstance(module, nn.Linear)
    }
    chosen = [name for name in linears if last_part(name) in (names or USUAL_LINEARS)] or (
        [] if names else list(linears)
    )
    missing = set(names) - {last_part(name) for name in chosen}
    if missing or not chosen:
        raise ConfigError(
            "head.linears names no linear layer of the model", got=", ".join(sorted(missing)) or "none",
            expected="some of " + ", ".join(last_part(name) for name in linears),
        )  # fmt: skip
    return tuple(chosen), tuple(linears[name] for name in chosen)


def check_memory(parameters: int, module: str, device: torch.device, fix: str) -> None:
    """Raise `ConfigError` where training so many parameters needs more memory than is free."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    if _BYTES * parameters > free:
        raise ConfigError(
            f"training {module} needs more memory than is free", got=f"{_BYTES * parameters / 2**30:.1f} GiB",
            expected=f"at most {free / 2**30:.1f} GiB", fix=fix,
        )  # fmt: skip


def size_of(make: Callable[[], nn.Module]) -> int:
    """Number of parameters of a module, which is made without memory for them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make().parameters())
