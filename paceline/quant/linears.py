"""Replace the linear layers of a module tree by quantised ones: a self-draft's, or the target's own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, cast, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import ConfigError, IncompatibleModels
from .fp8 import Fp8Linear, require_fp8
from .int4 import BITS, GROUP_SIZES, Int4Linear
from .int8 import Int8Linear
from .packed import PackedLinear, Shelf
from .timing import Contest

Weights: TypeAlias = Literal["int8", "int4", "fp8"]
"""Formats of the target's weights."""
Quantized: TypeAlias = Int4Linear | Int8Linear | Fp8Linear
Dense: TypeAlias = nn.Linear | PackedLinear
_Make: TypeAlias = Callable[[Dense], Quantized | None]


@dataclass(frozen=True)
class QuantReport:
    """What became of the linear layers.

    num_quantized: layers in the format. num_kept: layers left as they were because the kernels do not take their
    shape. num_slower: layers left as they were because the quantised form was not faster (`layers="auto"`).
    num_bytes: memory of the quantised layers. lm_head: `"int4"`, `"int8"`, or `"shared"`: left as it was.
    """

    num_quantized: int
    num_kept: int
    num_bytes: int
    lm_head: str
    num_slower: int = 0


def check_weights(weights: str | None) -> Weights | None:
    """Raises `ConfigError` unless `weights` is `"int8"`, `"int4"`, `"fp8"` or None."""
    if weights is not None and weights not in get_args(Weights):
        raise ConfigError("unknown weights", got=repr(weights), expected="'int8', 'int4', 'fp8' or None")
    return cast("Weights | None", weights)


@torch.inference_mode()
def quantize_target(
    model: PreTrainedModel, weights: Weights, group_size: int = 64, layers: Literal["all", "auto"] = "all"
) -> QuantReport:
    """Put quantised layers in the place of the target's own. The output head is INT8; beside FP8 it stays as it was.

    group_size: of INT4. layers: `"auto"` times each shape and keeps what is not slower as it was: which layers these
    are may differ from run to run, and with them the answers.
    Raises `ConfigError` for an unknown option, `IncompatibleModels` where no layer can be quantised.
    """
    if check_weights(weights) is None:
        raise ConfigError("unknown weights", got="None", expected="'int8', 'int4' or 'fp8'")
    _check(group_size, layers)
    if weights == "fp8":
        require_fp8(model.device)

    place = Shelf()

    def make(linear: Dense) -> Quantized | None:
        if weights == "fp8":
            return Fp8Linear(linear) if Fp8Linear.fits(linear) else None
        if weights == "int8":
            return Int8Linear(linear, place) if Int8Linear.fits(linear) else None
        return Int4Linear(linear, group_size, place=place) if Int4Linear.fits(linear, group_size) else None

    def make_head(linear: Dense) -> Quantized | None:
        # Few rows of the vocabulary are near ties, and 4 bits decide them wrongly.
        return Int8Linear(linear, place) if Int8Linear.fits(linear) else make(linear)

    contest = Contest() if layers == "auto" else None
    needs = {
        "int4": f"inputs divisible by {group_size}, and outputs by 16 without native kernels",
        "int8": "inputs divisible by 32 without native kernels",
        "fp8": "inputs and outputs divisible by 16",
    }[weights]
    report = _replace_layers(model, nn.Linear | PackedLinear, make, contest, f"{weights.upper()}", needs)
    return report if weights == "fp8" else _replace_head(model, make_head, contest, report)


@torch.inference_mode()
def quantize_linears(
    model: PreTrainedModel,
    group_size: int = 32,
    lm_head: Literal["auto", "int4", "shared"] = "auto",
    bits: int = 4,
    layers: Literal["all", "auto"] = "all",
) -> QuantReport:
    """Put INT4 layers in the place of the others, in this module tree only: a draft of the model it was copied from.

    The model's own weights may be INT8 or FP8.

    lm_head: `"auto"` times both and takes the faster. layers: `"auto"` does so for each shape.
    bits: 3 and 2 round further and draft worse, in the memory and time of 4: they answer what such a draft would earn.
    Raises `ConfigError` for an unknown option, `IncompatibleModels` where no layer can be quantised.
    """
    _check(group_size, layers)
    if lm_head not in ("auto", "int4", "shared"):
        raise ConfigError("unknown lm_head", got=repr(lm_head), expected="'auto', 'int4' or 'shared'")
    if bits not in BITS:
        raise ConfigError("unknown bits", got=bits, expected="one of " + ", ".join(map(str, BITS)))

    place = Shelf()

    def make(linear: Dense) -> Quantized | None:
        return Int4Linear(linear, group_size, bits, place) if Int4Linear.fits(linear, group_size) else None

    kinds = nn.Linear | PackedLinear | Int8Linear | Fp8Linear
    contest = Contest() if layers == "auto" else None
    needs = f"inputs divisible by {group_size}, outputs by 16 without native kernels, and not yet in INT4"
    report = _replace_layers(model, kinds, make, contest, "INT4", needs)
    if lm_head == "shared":
        return report
    return _replace_head(model, make, Contest() if lm_head == "auto" else None, report)


@torch.inference_mode()
def quantize_head(
    model: PreTrainedModel, group_size: int, lm_head: Literal["auto", "int4", "shared"], report: QuantReport
) -> QuantReport:
    """The output head alone, in 4 bits, as `quantize_linears` has it; returns the report with it."""
    if lm_head not in ("auto", "int4", "shared"):
        raise ConfigError("unknown lm_head", got=repr(lm_head), expected="'auto', 'int4' or 'shared'")
    if lm_head == "shared":
        return report

    def make(linear: Dense) -> Quantized | None:
        return Int4Linear(linear, group_size, place=Shelf()) if Int4Linear.fits(linear, group_size) else None

    return _replace_head(model, make, Contest() if lm_head == "auto" else None, report)


def _check(group_size: int, layers: str) -> None:
    if group_size not in GROUP_SIZES:
        raise ConfigError("unknown group size", got=group_size, expected="one of " + ", ".join(map(str, GROUP_SIZES)))
    if layers not in ("all", "auto"):
        raise ConfigError("unknown layers", got=repr(layers), expected="'all' or 'auto'")


def _replace_layers(
    model: PreTrainedModel, kinds: object, make: _Make, contest: Contest | None, name: str, needs: str
) -> QuantReport:
    head = model.get_output_embeddings()
    made: list[Quantized] = []
    kept = slower = 0
    for path, module in list(model.named_modules()):
        if module is head or not isinstance(module, nn.Linear | PackedLinear | Quantized):
            continue
        linear = make(cast(Dense, module)) if isinstance(module, kinds) else None  # type: ignore[arg-type]
        if linear is None:
            kept += 1
        elif contest is not None and not contest.faster(linear, module):
            slower += 1
        else:
            made.append(linear)
            model.set_submodule(path, linear)
    if not made and not slower:
        raise IncompatibleModels(
            f"no linear layer of this model can be quantised to {name}",
            got=f"{kept} linear layers",
            expected=f"linear layers with {needs}",
        )
    return QuantReport(len(made), kept, sum(layer.num_bytes for layer in made), "shared", slower)


def _replace_head(model: PreTrainedModel, make: _Make, contest: Contest | None, report: QuantReport) -> QuantReport:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear | PackedLinear | Int8Linear):
        return report
    made = make(cast(Dense, head))
    if made is None or (contest is not None and not contest.faster(made, head)):
        return report
    model.set_output_embeddings(made)
    format = "int8" if isinstance(made, Int8Linear) else "int4"
    count, size = report.num_quantized + 1, report.num_bytes + made.num_bytes
    return replace(report, num_quantized=count, num_bytes=size, lm_head=format)
