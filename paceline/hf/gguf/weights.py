"""The tensors of a GGUF file under their names in transformers."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias, cast

import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from torch import Tensor
from transformers import PretrainedConfig

from ...errors import ConfigError
from ...kernels.library import BlockFormat
from ...quant.packed import WeightArena, blocks_of
from ...system.files import Progress
from ..describe import head_dim_of
from ..described import CPU, EXPERTS
from ..experts import num_experts_of
from .config import FORMS, ROPE_FACTORS, class_of, not_understood
from .file import GGUFFile, GGUFTensor

_Part = Callable[[Tensor], Tensor]
Shape: TypeAlias = tuple[int, ...]
ROUTER = "ffn_gate_inp.weight"
CORRECTION = "exp_probs_b.bias"
"""What is added to scores for the choice of experts."""
_EACH = "{}"
_EXPERT = re.compile(r"(.+\.experts\.)\d+(\.(gate|up|down)_proj\.(weight|bias))")


def read_weights(
    file: GGUFFile,
    config: PretrainedConfig,
    shapes: Mapping[str, Shape],
    dtype: torch.dtype,
    progress: Progress,
    kept: Mapping[str, BlockFormat],
    device: torch.device = CPU,
    place_of: Callable[[str], WeightArena] = lambda _: WeightArena(),
) -> Iterator[tuple[str, Any]]:
    """Every tensor in `dtype`, or in blocks of the kept formats, with its name in transformers, one after another.

    Beside blocks, and where transformers keeps them so, routers stay float32: what is near decides which experts a row
    takes. What is added to their scores does always. Layers that guess the tokens after the next are left out.

    shapes: of all weights, by these names. device: of whose kernels the blocks are. place_of: where a weight's go.
    Raises `ConfigError` for a tensor that has no name.
    """
    form = FORMS[file.architecture]
    places = places_of(file.architecture, config, shapes)
    exact = bool(kept)  # without blocks, as transformers has it, whose modelling code takes a second to import
    if not exact and num_experts_of(config):
        exact = "gate.weight" in (class_of(config)._keep_in_fp32_modules_strict or ())
    layers = file.metadata[f"{file.architecture}.block_count"]
    left_out = tuple(f"blk.{index}." for index in range(config.num_hidden_layers, layers))
    parts: dict[str, Tensor] = {}  # weights that the file has in several tensors
    filled: Counter[str] = Counter()
    for done, tensor in enumerate(file.tensors, start=1):
        is_router = tensor.name.endswith(ROUTER)
        is_exact = tensor.name.endswith(CORRECTION) or (is_router and exact and tensor.kind.name == "F32")
        kind = torch.float32 if is_exact else dtype
        if tensor.name == ROPE_FACTORS or tensor.name.startswith(left_out):  # the former is read by the config
            continue
        if tensor.name not in places:
            not_understood(file, f"a tensor {tensor.name!r}", f"those of {file.architecture}")
        place, part = places[tensor.name]
        if _EACH in place:
            whole = num_experts_of(config), *shapes[place.replace(_EACH, "0")]
            if tensor.shape != whole:
                not_understood(file, f"{tensor.name!r} of shape {list(tensor.shape)}", f"{list(whole)}")
        for name, one in _each_expert(place, tensor):
            order = None
            if form.interleaved and name.endswith(("q_proj.weight", "k_proj.weight")):
                order = rotary_order(one.shape[0], head_dim_of(config))
            if len(one.shape) == 2 and one.kind.name in kept and not is_router:
                weight: Any = _blocks(file, one, order, kept, device, place_of(name))
                is_finite = weight.is_finite
            else:
                minus = 1 if form.plus_one and one.name.endswith("norm.weight") else 0
                weight = torch.cat([(rows - minus).to(kind) for rows in file.values(one)]).view(one.shape)
                weight = weight if order is None else weight[order]
                is_finite = bool(weight.isfinite().all())
            if not is_finite:
                raise ConfigError(
                    f"the tensor {tensor.name!r} of {str(file.path)!r} holds other than finite numbers",
                    fix="fetch it again",
                )
            if part is None or not isinstance(weight, Tensor):
                yield name, weight
            else:
                all = parts.setdefault(name, torch.empty(shapes[name], dtype=kind))
                target = part(all)
                if tuple(target.shape) != one.shape:
                    not_understood(file, f"{one.name!r} of shape {list(one.shape)}", f"{list(target.shape)}")
                filled[name] += target.copy_(weight).numel()
                if filled[name] == all.numel():
                    yield name, parts.pop(name)
        progress("convert", done, len(file.tensors))


def _each_expert(name: str, tensor: GGUFTensor) -> Iterator[tuple[str, GGUFTensor]]:
    """A tensor and its name; of one that holds those of all experts, each expert's."""
    if _EACH not in name:
        yield name, tensor
        return
    size = tensor.num_bytes // tensor.shape[0]
    for index in range(tensor.shape[0]):
        start = tensor.start + index * size
        yield name.replace(_EACH, str(index)), replace(tensor, shape=tensor.shape[1:], start=start, num_bytes=size)


def places_of(architecture: str, config: Any, shapes: Mapping[str, Shape]) -> dict[str, tuple[str, _Part | None]]:
    """Of each tensor that a file may have: its name in transformers, and what part of that one it is, None: all.

    shapes: of the model's tensors. One that files have no place for is under "None". A name with {} stands for those of
    all experts, which the tensor holds one after another.
    """
    (number,) = [number for number, name in MODEL_ARCH_NAMES.items() if name == architecture]
    names = get_tensor_name_map(number, config.num_hidden_layers)
    places: dict[str, tuple[str, _Part | None]] = {}
    for name, shape in shapes.items():
        stem, _, leaf = name.rpartition(".")
        if leaf == "e_score_correction_bias":
            places[f"blk.{stem.split('.')[2]}.{CORRECTION}"] = name, _only if shape[0] == 1 else None
        elif each := _EXPERT.fullmatch(name):
            place = f"blk.{stem.split('.')[2]}.ffn_{each[3]}_exps.{leaf}"
            places[place] = f"{each[1]}{_EACH}{each[2]}", None
        elif EXPERTS in name:
            block = f"blk.{stem.split('.')[2]}"
            places |= {f"{block}.{key}": (name, part) for key, part in _stacked(leaf, FORMS[architecture].mixed)}
        elif (known := names.get_name(stem) or names.get_name(f"{stem}.layer")) is not None:
            places[f"{known}.{leaf}"] = name, _only if shape[0] == 1 else None
        else:  # a parameter of its own
            places[f"{names.get_name(name)}.weight"] = name, None
    return places


def _stacked(leaf: str, mixed: bool) -> list[tuple[str, _Part]]:
    """The tensors that make up one of all experts: [experts, out, in], or the biases."""
    ending = "bias" if leaf.endswith("_bias") else "weight"
    turned = _turned if mixed and ending == "weight" else _whole
    if leaf.startswith("down"):
        return [(f"ffn_down_exps.{ending}", turned)]
    if mixed:
        halves = [lambda all, i=i: turned(all)[:, i::2] for i in (0, 1)]
    else:
        halves = [lambda all, i=i: turned(all).chunk(2, dim=1)[i] for i in (0, 1)]
    return [(f"ffn_{side}_exps.{ending}", half) for side, half in zip(("gate", "up"), halves, strict=True)]


def _only(rows: Tensor) -> Tensor:
    """The only row, which files hold as a vector."""
    return rows[0]


def _whole(all: Tensor) -> Tensor:
    return all


def _turned(all: Tensor) -> Tensor:
    return all.transpose(1, 2)


def rotary_order(rows: int, head_dim: int) -> Tensor:
    """Where a file has the rows of q and k, int64 [rows].

    Of one head with head_dim 6, the rows hold dimensions

        GGUF  0 3 1 4 2 5   ->   Hugging Face  0 1 2 3 4 5
    """
    return torch.arange(rows).view(-1, head_dim // 2, 2).transpose(1, 2).flatten()


def _blocks(
    file: GGUFFile,
    tensor: GGUFTensor,
    order: Tensor | None,
    kept: Mapping[str, BlockFormat],
    device: torch.device,
    arena: WeightArena,
) -> Any:
    """A matrix as it is in the file, its rows in this order."""
    rows = None if order is None else order.numpy()

    def read(some: slice) -> Tensor:
        data = file.bytes_of(tensor)  # mapped for this piece, after which its pages are given back
        return torch.from_numpy(data[some] if rows is None else data[rows[some]])

    return blocks_of(kept[tensor.kind.name], cast("Any", tensor.shape), read, device, room=arena.room)
