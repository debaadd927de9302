"""Replaces the linear layers of a model by quantised ones, for a target or a self-draft."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import ConfigError, IncompatibleModels
from .blocks import BlockLinear
from .fp8 import Fp8Linear, require_fp8
from .int4 import BITS, GROUP_SIZES, Int4Linear
from .int8 import Int8Linear
from .packed import PackedLinear, QuantizedLinear, WeightArena

Weights: TypeAlias = Literal["int8", "int4", "fp8"]
"""Formats of the target's weights."""
LmHead: TypeAlias = Literal["int4", "shared"]
"""The output head of a self-draft: its own in 4 bits, or the target's."""
Dense: TypeAlias = nn.Linear | PackedLinear | BlockLinear
_Make: TypeAlias = Callable[[Dense], QuantizedLinear | None]
"""A quantised copy of a layer; None where the kernels do not take its shape."""


@dataclass(frozen=True)
class QuantReport:
    """What was quantised.

    num_quantized, num_kept: how many layers are quantised, and how many are not since the kernels lack their shape.
    num_bytes: the memory of the quantised layers.
    lm_head: "int4", "int8", or "shared" if it is unchanged.
    """

    num_quantized: int
    num_kept: int
    num_bytes: int
    lm_head: str = "shared"


@torch.inference_mode()
def quantize_target(model: PreTrainedModel, weights: Weights, group_size: int = 64) -> QuantReport:
    """Replace the target's own linear layers. The output head becomes INT8; with FP8 layers it is unchanged.

    Raises `ConfigError` for an unknown group size, or for FP8 on a device without it, `IncompatibleModels` if no layer
    can be quantised.
    group_size: how many weights share an INT4 scale.
    """
    if weights == "fp8":
        require_fp8(model.device)
    arena = WeightArena()
    make = _maker(weights, group_size, 4, arena)
    needs = {
        "int4": f"inputs divisible by {group_size}, and outputs by 16 without native kernels",
        "int8": "inputs divisible by 32 without native kernels",
        "fp8": "inputs and outputs divisible by 16",
    }[weights]
    report = _replace_layers(model, Dense, make, f"{weights.upper()}: {needs}")
    if weights == "fp8":
        return report
    # Not INT4, which decides near ties of tokens wrongly.
    make_head = _maker("int8", group_size, 4, arena)
    return _replace_head(model, lambda linear: make_head(linear) or make(linear), report)


@torch.inference_mode()
def quantize_linears(
    model: PreTrainedModel, group_size: int = 32, lm_head: LmHead = "int4", bits: int = 4
) -> QuantReport:
    """Replace the linear layers of a module tree by INT4 ones, which makes it a self-draft.

    Raises `ConfigError` for an unknown group size or bits, `IncompatibleModels` if no layer can be quantised.
    bits: 3 and 2 round further, but take the memory and time of 4; they are for experiments.
    """
    if bits not in BITS:
        raise ConfigError("unknown bits", got=bits, expected="one of " + ", ".join(map(str, BITS)))
    make = _maker("int4", group_size, bits, WeightArena())
    kinds = Dense | Int8Linear | Fp8Linear
    needs = f"INT4: inputs divisible by {group_size}, outputs by 16 without native kernels, and not yet in INT4"
    report = _replace_layers(model, kinds, make, needs)
    return report if lm_head == "shared" else _replace_head(model, make, report)


@torch.inference_mode()
def quantize_head(model: PreTrainedModel, group_size: int, report: QuantReport) -> QuantReport:
    """Replace the output head only, in 4 bits, as `quantize_linears` does; returns the updated report."""
    return _replace_head(model, _maker("int4", group_size, 4, WeightArena()), report)


def _maker(weights: Weights, group_size: int, bits: int, arena: WeightArena) -> _Make:
    if group_size not in GROUP_SIZES:
        raise ConfigError("unknown group size", got=group_size, expected="one of " + ", ".join(map(str, GROUP_SIZES)))

    def make(linear: Dense) -> QuantizedLinear | None:
        if weights == "fp8":
            return Fp8Linear(linear) if Fp8Linear.fits(linear) else None
        if weights == "int8":
            return Int8Linear(linear, arena) if Int8Linear.fits(linear) else None
        return Int4Linear(linear, group_size, bits, arena) if Int4Linear.fits(linear, group_size) else None

    return make


def _replace_layers(model: PreTrainedModel, kinds: object, make: _Make, needs: str) -> QuantReport:
    """Replace the layers of these kinds except the output head. needs: the format and its shapes, for the error."""
    head, made, kept = model.get_output_embeddings(), list[QuantizedLinear](), 0
    for path, module in list(model.named_modules()):
        if module is head or not isinstance(module, nn.Linear | PackedLinear | QuantizedLinear):
            continue
        linear = make(cast(Dense, module)) if isinstance(module, kinds) else None  # type: ignore[arg-type]
        if linear is None:
            kept += 1
        else:
            made.append(linear)
            model.set_submodule(path, linear)
    if not made:
        raise IncompatibleModels(
            "no linear layer of this model can be quantised", got=f"{kept} linear layers that do not fit",
            expected=needs,
        )  # fmt: skip
    return QuantReport(len(made), kept, sum(layer.num_bytes for layer in made))


def _replace_head(model: PreTrainedModel, make: _Make, report: QuantReport) -> QuantReport:
    head = model.get_output_embeddings()
    made = make(cast(Dense, head)) if isinstance(head, Dense | Int8Linear) else None
    if made is None:
        return report
    model.set_output_embeddings(made)
    kind = "int8" if isinstance(made, Int8Linear) else "int4"
    return QuantReport(report.num_quantized + 1, report.num_kept, report.num_bytes + made.num_bytes, kind)
