"""Replaces the linear layers of a model by quantised ones, for a target or a self-draft."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from .. import kernels
from ..errors import ConfigError, IncompatibleModels
from ..kernels.library import BlockFormat
from .block_rounding import round_matrix
from .blocks import BlockEmbedding, BlockLinear
from .fp8 import Fp8Linear, require_fp8
from .int4 import BITS, GROUP_SIZES, Int4Linear, fits_int4, to_int4
from .int8 import Int8Linear, fits_int8, to_int8
from .mixes import BlockMix, head_format, is_block_weights, layer_format
from .packed import PackedLinear, QuantizedLinear, WeightArena, has_kernels

if TYPE_CHECKING:
    from transformers import PreTrainedModel
Weights: TypeAlias = Literal["int8", "int4", "fp8"] | BlockMix
"""Formats of the target's weights."""
LmHead: TypeAlias = Literal["int4", "shared"]
"""The output head of a self-draft: its own in 4 bits, or the target's."""
Dense: TypeAlias = nn.Linear | PackedLinear | BlockLinear
_Layer: TypeAlias = nn.Linear | PackedLinear | QuantizedLinear
_Make: TypeAlias = Callable[[_Layer], QuantizedLinear | None]
"""A quantised copy of a layer; None where the kernels do not take its shape, or it has no more bits."""


@dataclass(frozen=True)
class QuantReport:
    """What was quantised.

    num_quantized, num_kept: how many layers are quantised, and how many are not since the kernels lack their shape.
    num_bytes: the memory of the quantised layers.
    lm_head: "int4", "int8", a block format such as "q6_k", or "shared" if it is unchanged.
    formats: how many matrices have which block format, embeddings and output layer included.
    """

    num_quantized: int
    num_kept: int
    num_bytes: int
    lm_head: str = "shared"
    formats: Mapping[str, int] = field(default_factory=dict[str, int])


@torch.inference_mode()
def quantize_target(model: "PreTrainedModel", weights: Weights, group_size: int = 64) -> QuantReport:
    """Replace the target's own linear layers that have more bits. The output head becomes INT8, but for FP8 layers.

    Block formats replace embeddings and output head, too: the model becomes that of the file that
    `hf.gguf_writer.write_gguf` writes.

    Raises `ConfigError` for an unknown group size, or for FP8 or block formats on a device without them,
    `IncompatibleModels` if no layer can be quantised.
    group_size: how many weights share an INT4 scale.
    """
    if is_block_weights(weights):
        return _to_blocks(model, weights)
    if weights == "fp8":
        require_fp8(model.device)
    arena = WeightArena()
    make = _maker(weights, group_size, 4, arena)
    needs = {
        "int4": f"inputs divisible by {group_size}",
        "int8": "inputs divisible by 32",
        "fp8": "inputs divisible by 16",
    }[weights]
    report = _replace_layers(model, make, f"{weights.upper()}: {needs}, more bits than that")
    if weights == "fp8":
        return report
    head = model.get_output_embeddings()
    if isinstance(head, _Layer) and bits_of(head) <= 8:
        return report
    # Not INT4, which decides near ties of tokens wrongly.
    return _replace_head(model, {"int8": _maker("int8", group_size, 4, arena), "int4": make}, report)


@torch.inference_mode()
def quantize_linears(
    model: "PreTrainedModel", group_size: int = 32, lm_head: LmHead = "int4", bits: int = 4
) -> QuantReport:
    """Replace the linear layers of a module tree by INT4 ones, which makes it a self-draft.

    Raises `ConfigError` for an unknown group size or bits, `IncompatibleModels` if no layer can be quantised.
    """
    if bits not in BITS:
        raise ConfigError("unknown bits", got=bits, expected="one of " + ", ".join(map(str, BITS)))
    make = _maker("int4", group_size, bits, WeightArena())
    needs = f"INT{bits}: inputs divisible by {group_size}, more bits than that"
    report = _replace_layers(model, make, needs)
    return report if lm_head == "shared" else _replace_head(model, {"int4": make}, report)


@torch.inference_mode()
def quantize_head(model: "PreTrainedModel", group_size: int, report: QuantReport) -> QuantReport:
    """Replace the output head only, in 4 bits, as `quantize_linears` does; returns the updated report."""
    return _replace_head(model, {"int4": _maker("int4", group_size, 4, WeightArena())}, report)


def _to_blocks(model: "PreTrainedModel", weights: str) -> QuantReport:
    if kernels.kernels_for(model.device) is None:
        raise ConfigError(
            f"weights in blocks, as {weights}, are for kernels that this device does not have", got=str(model.device),
            expected="a CPU for which they can be compiled, or CUDA with Triton",
            fix='use "int8" or "int4", or leave weights out',
        )  # fmt: skip
    config: Any = model.config.get_text_config()
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    place, layers, kept, formats = WeightArena(), list[BlockLinear](), 0, Counter[str]()

    def in_blocks(path: str, weight: Tensor, form: BlockFormat | None) -> Any:
        if form is None:
            return None
        formats[form.name] += 1
        blocks = round_matrix(form, weight.detach(), path)
        return replace(blocks, data=place(blocks.data)) if has_kernels(model.device) else blocks

    def put(path: str, linear: Any, weight: Tensor, blocks: Any) -> None:
        nonlocal kept
        if blocks is None:
            kept += 1
        else:
            layers.append(BlockLinear(blocks, linear.bias, weight.dtype))
            model.set_submodule(path, layers[-1])

    has_experts = any(".experts." in path for path, _ in model.named_modules())
    for path, module in list(model.named_modules()):
        if isinstance(module, Dense) and module is not head:
            form = layer_format(weights, path, config.num_hidden_layers, module.in_features, has_experts)
            put(path, module, weight := cast("Tensor", module.weight), in_blocks(path, weight, form))
    if not layers:
        raise IncompatibleModels(
            "no linear layer of this model can be quantised", got=f"{kept} linear layers that do not fit",
            expected=f"{weights.upper()}: inputs divisible by 32",
        )  # fmt: skip
    table, weight, path = embedding.weight, head.weight, _path_of(model, head)
    top = in_blocks(path, weight, head_format(weights, weight.shape[1]))
    is_tied = table.shape == weight.shape and torch.equal(table, weight)
    put(path, head, weight, top)
    below = (
        top if is_tied else in_blocks("embeddings", table, layer_format(weights, "", 0, table.shape[1], has_experts))
    )
    if below is not None:
        scale = getattr(embedding, "scalar_embed_scale", getattr(embedding, "embed_scale", None))
        model.set_input_embeddings(BlockEmbedding(below, table.dtype, scale))
    report = QuantReport(len(layers), kept, sum(layer.num_bytes for layer in layers), "shared", dict(formats))
    return report if top is None else replace(report, lm_head=top.form.name.lower())


def _path_of(model: nn.Module, module: nn.Module) -> str:
    return next(path for path, other in model.named_modules() if other is module)


def _maker(weights: Weights, group_size: int, bits: int, arena: WeightArena) -> _Make:
    if group_size not in GROUP_SIZES:
        raise ConfigError("unknown group size", got=group_size, expected="one of " + ", ".join(map(str, GROUP_SIZES)))

    def make(linear: _Layer) -> QuantizedLinear | None:
        if bits_of(linear) <= {"fp8": 8, "int8": 8}.get(weights, bits):
            return None
        if weights == "fp8":
            return Fp8Linear(linear) if Fp8Linear.fits(linear) else None
        if weights == "int8":
            return to_int8(linear, arena) if fits_int8(linear) else None
        return to_int4(linear, group_size, bits, arena) if fits_int4(linear, group_size) else None

    return make


def bits_of(linear: _Layer) -> int:
    """The bits of a weight; scales do not count."""
    if isinstance(linear, BlockLinear):
        return linear.form.bits
    return linear.bits if isinstance(linear, Int4Linear) else 8 if isinstance(linear, Int8Linear | Fp8Linear) else 16


def _replace_layers(model: "PreTrainedModel", make: _Make, needs: str) -> QuantReport:
    """Replace the layers except the output head. needs: the format and its shapes, for the error."""
    head, layers, kept = model.get_output_embeddings(), list[QuantizedLinear](), 0
    for path, module in list(model.named_modules()):
        if module is head or not isinstance(module, _Layer):
            continue
        linear = make(module)
        if linear is None:
            kept += 1
        else:
            layers.append(linear)
            model.set_submodule(path, linear)
    if not layers:
        raise IncompatibleModels(
            "no linear layer of this model can be quantised", got=f"{kept} linear layers that do not fit",
            expected=needs,
        )  # fmt: skip
    return QuantReport(len(layers), kept, sum(layer.num_bytes for layer in layers))


def _replace_head(model: "PreTrainedModel", makers: Mapping[str, _Make], report: QuantReport) -> QuantReport:
    """Replace the output head by the first kind that fits."""
    head = model.get_output_embeddings()
    for kind, make in makers.items():
        if isinstance(head, _Layer) and (layer := make(head)):
            model.set_output_embeddings(layer)
            return QuantReport(report.num_quantized + 1, report.num_kept, report.num_bytes + layer.num_bytes, kind)
    return report
