"""Replace the linear layers of a module tree by quantised ones: a self-draft's, or the target's own."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, cast, final, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import ConfigError, IncompatibleModels
from .fp8 import Fp8Linear, require_fp8
from .int4 import BITS, GROUP_SIZES, Int4Linear
from .int8 import Int8Linear
from .packed import PackedLinear, QuantizedLinear, Shelf, device_of

Weights: TypeAlias = Literal["int8", "int4", "fp8"]
"""Formats of the target's weights."""
Dense: TypeAlias = nn.Linear | PackedLinear
_Make: TypeAlias = Callable[[Dense], QuantizedLinear | None]
"""A quantised copy of a layer; None where the kernels do not take its shape."""


@dataclass(frozen=True)
class QuantReport:
    """How many linear layers were quantised, and why others were not.

    num_quantized: the layers in the format.
    num_kept: the layers left as they were because the kernels do not take their shape.
    num_slower: the layers left as they were because the quantised form was not faster (`layers="auto"`).
    num_bytes: the memory of the quantised layers.
    lm_head: "int4", "int8", or "shared" if it was left as it was.
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
    """Replace the target's own linear layers. The output head becomes INT8; with FP8 layers it stays as it was.

    group_size: the weights that share an INT4 scale.
    layers: "auto" times each shape and leaves a layer as it was where the quantised one is not faster. Which layers
        these are may differ from run to run, and with them the answers.

    Raises `ConfigError` for an unknown option, `IncompatibleModels` where no layer can be quantised.
    """
    if check_weights(weights) is None:
        raise ConfigError("unknown weights", got="None", expected="'int8', 'int4' or 'fp8'")
    _check(group_size, layers)
    if weights == "fp8":
        require_fp8(model.device)
    place = Shelf()
    make = _maker(weights, group_size, 4, place)
    needs = {
        "int4": f"inputs divisible by {group_size}, and outputs by 16 without native kernels",
        "int8": "inputs divisible by 32 without native kernels",
        "fp8": "inputs and outputs divisible by 16",
    }[weights]
    timing = ShapeTiming() if layers == "auto" else None
    report = _replace_layers(model, nn.Linear | PackedLinear, make, timing, weights.upper(), needs)
    if weights == "fp8":
        return report
    # Not INT4: few rows of the vocabulary are near ties, and 4 bits decide them wrongly.
    make_head = _maker("int8", group_size, 4, place)
    return _replace_head(model, lambda linear: make_head(linear) or make(linear), timing, report)


@torch.inference_mode()
def quantize_linears(
    model: PreTrainedModel,
    group_size: int = 32,
    lm_head: Literal["auto", "int4", "shared"] = "auto",
    bits: int = 4,
    layers: Literal["all", "auto"] = "all",
) -> QuantReport:
    """Replace the linear layers by INT4 ones, in this module tree only: a draft of the model it was copied from.

    The model's own weights may be INT8 or FP8.

    lm_head: "auto" times both forms and takes the faster.
    layers: "auto" does so for each shape.
    bits: 3 and 2 round further and draft worse, in the memory and time of 4: they show what such a draft would bring.

    Raises `ConfigError` for an unknown option, `IncompatibleModels` where no layer can be quantised.
    """
    _check(group_size, layers, lm_head)
    if bits not in BITS:
        raise ConfigError("unknown bits", got=bits, expected="one of " + ", ".join(map(str, BITS)))
    make = _maker("int4", group_size, bits, Shelf())
    kinds = nn.Linear | PackedLinear | Int8Linear | Fp8Linear
    needs = f"inputs divisible by {group_size}, outputs by 16 without native kernels, and not yet in INT4"
    timing = ShapeTiming() if layers == "auto" else None
    report = _replace_layers(model, kinds, make, timing, "INT4", needs)
    if lm_head == "shared":
        return report
    return _replace_head(model, make, ShapeTiming() if lm_head == "auto" else None, report)


@torch.inference_mode()
def quantize_head(
    model: PreTrainedModel, group_size: int, lm_head: Literal["auto", "int4", "shared"], report: QuantReport
) -> QuantReport:
    """Replace the output head alone, in 4 bits, as `quantize_linears` does; returns the report with it."""
    _check(group_size, "all", lm_head)
    if lm_head == "shared":
        return report
    make = _maker("int4", group_size, 4, Shelf())
    return _replace_head(model, make, ShapeTiming() if lm_head == "auto" else None, report)


def _check(group_size: int, layers: str, lm_head: str = "shared") -> None:
    if group_size not in GROUP_SIZES:
        raise ConfigError("unknown group size", got=group_size, expected="one of " + ", ".join(map(str, GROUP_SIZES)))
    if layers not in ("all", "auto"):
        raise ConfigError("unknown layers", got=repr(layers), expected="'all' or 'auto'")
    if lm_head not in ("auto", "int4", "shared"):
        raise ConfigError("unknown lm_head", got=repr(lm_head), expected="'auto', 'int4' or 'shared'")


def _maker(weights: Weights, group_size: int, bits: int, place: Shelf) -> _Make:
    def make(linear: Dense) -> QuantizedLinear | None:
        if weights == "fp8":
            return Fp8Linear(linear) if Fp8Linear.fits(linear) else None
        if weights == "int8":
            return Int8Linear(linear, place) if Int8Linear.fits(linear) else None
        return Int4Linear(linear, group_size, bits, place) if Int4Linear.fits(linear, group_size) else None

    return make


def _replace_layers(
    model: PreTrainedModel, kinds: object, make: _Make, timing: "ShapeTiming | None", name: str, needs: str
) -> QuantReport:
    head = model.get_output_embeddings()
    made: list[QuantizedLinear] = []
    kept = slower = 0
    for path, module in list(model.named_modules()):
        if module is head or not isinstance(module, nn.Linear | PackedLinear | QuantizedLinear):
            continue
        linear = make(cast(Dense, module)) if isinstance(module, kinds) else None  # type: ignore[arg-type]
        if linear is None:
            kept += 1
        elif timing is not None and not timing.faster(linear, module):
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


def _replace_head(
    model: PreTrainedModel, make: _Make, timing: "ShapeTiming | None", report: QuantReport
) -> QuantReport:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear | PackedLinear | Int8Linear):
        return report
    made = make(cast(Dense, head))
    if made is None or (timing is not None and not timing.faster(made, head)):
        return report
    model.set_output_embeddings(made)
    format = "int8" if isinstance(made, Int8Linear) else "int4"
    count, size = report.num_quantized + 1, report.num_bytes + made.num_bytes
    return replace(report, num_quantized=count, num_bytes=size, lm_head=format)


_CACHE = 64 << 20  # bytes read between two products, so that no weights are still in the processor's cache
TRIES = 5


@final
class ShapeTiming:
    """Times two layers of one shape for one row, once per pair of kinds and shape, and remembers the answer."""

    def __init__(self):
        self._known: dict[tuple[object, ...], bool] = {}
        self._other = torch.empty(0)

    def faster(self, new: nn.Module, old: nn.Module) -> bool:
        """True iff `new` takes less time than `old`; both are linear layers of one shape."""
        key = (type(new), type(old), old.in_features, old.out_features)
        if key not in self._known:
            row = torch.randn(1, int(old.in_features), dtype=torch.bfloat16, device=device_of(new))  # type: ignore[arg-type]
            row = row.to(next((p.dtype for p in old.parameters() if p.is_floating_point()), row.dtype))
            ours, theirs = float("inf"), float("inf")
            for _ in range(TRIES):  # in turns, so that other load on the machine slows both
                ours = min(ours, self._seconds(new, row))
                theirs = min(theirs, self._seconds(old, row))
            self._known[key] = ours < theirs
        return self._known[key]

    def _seconds(self, module: nn.Module, row: Tensor) -> float:
        if row.device.type == "cpu":
            if not len(self._other):
                self._other = torch.zeros(_CACHE // 4)
            self._other.sum()
        begin = time.perf_counter()
        module(row)
        if row.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin
