"""Says in which formats the weights of a loaded model are held, and why some are not packed for the kernels."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from ..hf.described import Embedding, has_kernels
from ..hf.described_experts import Router
from ..hf.gguf.file import SUFFIX, read_gguf
from ..kernels import load as load_kernels
from ..kernels.library import FORMATS, BlockFormat
from ..llm import LLM
from ..quant.blocks import BlockEmbedding, BlockWeights
from ..quant.packed import PackedLinear, QuantizedLinear
from ..target.loaded import LoadedModel

_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class HeldWeights:
    """Weights that are held alike.

    what: matrices, embeddings, experts, or norms and biases. form: Q4_K, INT8, BF12, bfloat16, ...
    reason: why they are not packed; None: they are.
    """

    what: str
    form: str
    count: int
    num_bytes: int
    reason: str | None

    def __str__(self) -> str:
        packed = "packed" if self.reason is None else f"not packed: {self.reason}"
        return f"{self.count} {self.what} in {self.form}, {self.num_bytes / 1e6:.1f} MB, {packed}"


def held_weights(loaded: LoadedModel) -> list[HeldWeights]:
    """What the memory of a model's weights is, the largest first; shared weights count once."""
    sizes_of: dict[tuple[str, str, str | None], list[int]] = {}
    seen = set[int]()
    for module in loaded.model.modules():
        for what, form, reason, tensors in _held_by(module):
            new = [tensor for tensor in tensors if tensor.data_ptr() not in seen]
            seen |= {tensor.data_ptr() for tensor in new}
            if new:
                sizes_of.setdefault((what, form, reason), []).append(sum(tensor.nbytes for tensor in new))
    rows = [HeldWeights(what, form, len(sizes), sum(sizes), why) for (what, form, why), sizes in sizes_of.items()]
    return sorted(rows, key=lambda row: -row.num_bytes)


def unpacked_formats(llm: LLM, path: str) -> dict[str, str]:
    """Of a GGUF file, the block formats of which some or all tensors are not held as they are, and why."""
    if not path.endswith(SUFFIX):
        return {}
    loaded, again, tensors = llm.loaded, llm.quantized, read_gguf(Path(path)).tensors
    held = Counter(module.form.name for module in loaded.model.modules() if isinstance(module, BlockWeights))
    if again is not None and again.formats:  # all matrices were rounded, maybe to a format that they had
        held.clear()
    matrices = Counter[str]()
    for tensor in tensors:
        if len(tensor.shape) > 1:
            matrices[tensor.kind.name] += prod(tensor.shape[:-2])  # of experts, which are modules of their own
    dtype, reasons = _name(loaded.dtype), dict[str, str]()
    for tensor in tensors:
        form = tensor.kind.name
        if form in _FLOATS or (len(tensor.shape) > 1 and held[form] >= matrices[form]):
            continue
        if again is not None and len(tensor.shape) == 2:
            reasons[form] = "was rounded again: weights=... was given"
            continue
        if form not in BlockFormat.__members__:
            reason = "there are no kernels for it"
        elif loaded.device.type == "cpu" and (kernels := load_kernels()).library is None:
            reason = kernels.reason
        elif not has_kernels(loaded.model.config, loaded.dtype, loaded.device):
            reason = f"models of type {loaded.model.config.model_type} run in torch"
        elif len(tensor.shape) != 2:
            reason = "experts run in torch"
        elif loaded.vision is not None:
            reason = "transformers reads models that see (--mmproj)"
        else:
            reason = "a dtype was asked for"
        reasons[form] = f"became {dtype}: {reason}"
    return reasons


def _held_by(module: nn.Module) -> Iterator[tuple[str, str, str | None, list[Tensor]]]:
    """What, its format, why it is not packed, and the tensors."""
    own, bias = [*module.parameters(recurse=False)], getattr(module, "bias", None)
    for tensor in [*(tensor for tensor in own if tensor.dim() < 2), *([bias] if isinstance(bias, Tensor) else [])]:
        yield "norms and biases", _name(tensor.dtype), "vectors stay as they are", [tensor]
    weights = [tensor for tensor in module.buffers(recurse=False) if tensor is not bias]
    if isinstance(module, BlockWeights):
        yield "embeddings" if isinstance(module, BlockEmbedding) else "matrices", module.form.name, None, weights
    elif isinstance(module, QuantizedLinear):
        reason = None if module.matrix is not None else _reason(weights[0])
        yield "matrices", type(module).__name__.removesuffix("Linear").upper(), reason, weights
    elif isinstance(module, PackedLinear):
        yield "matrices", "BF12" if module.table is not None else _name(module.packed.dtype), None, weights
    for tensor in own:
        if tensor.dim() == 2 and isinstance(module, nn.Embedding | Embedding):
            yield "embeddings", _name(tensor.dtype), "a pass reads single rows", [tensor]
        elif isinstance(module, Router):
            yield "routers", _name(tensor.dtype), "they stay as they are", [tensor]
        elif tensor.dim() == 2:
            yield "matrices", _name(tensor.dtype), _reason(tensor), [tensor]
        elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            yield "convolutions", _name(tensor.dtype), "they stay as they are", [tensor]
        elif tensor.dim() > 2:
            yield "experts", _name(tensor.dtype), "experts run in torch", [tensor]


def _reason(weight: Tensor) -> str:
    if weight.device.type != "cpu":
        return f"torch multiplies on {weight.device.type}"
    if (kernels := load_kernels()).library is None:
        return kernels.reason
    return "torch runs this layer" if weight.dtype in FORMATS else f"there are no kernels for {_name(weight.dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
