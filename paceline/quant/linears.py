"""Replace the linear layers of a module tree by quantised ones."""

import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import ConfigError, IncompatibleModels
from .int4 import GROUP_SIZES, Int4Linear
from .packed import PackedLinear


@dataclass(frozen=True)
class QuantReport:
    """What became of the linear layers.

    num_quantized, num_kept: layers in INT4, and layers whose shape the kernels do not take (shared with the target).
    num_bytes: memory of the INT4 copy. lm_head: `"int4"` or `"shared"`.
    """

    num_quantized: int
    num_kept: int
    num_bytes: int
    lm_head: str


@torch.inference_mode()
def quantize_linears(
    model: PreTrainedModel, group_size: int = 32, lm_head: Literal["auto", "int4", "shared"] = "auto"
) -> QuantReport:
    """Put INT4 layers in the place of `nn.Linear` ones, in this module tree only.

    Raises `ConfigError` for an unknown option, `IncompatibleModels` where no layer can be quantised.
    """
    if group_size not in GROUP_SIZES:
        raise ConfigError("unknown group size", got=group_size, expected="one of " + ", ".join(map(str, GROUP_SIZES)))
    if lm_head not in ("auto", "int4", "shared"):
        raise ConfigError("unknown lm_head", got=repr(lm_head), expected="'auto', 'int4' or 'shared'")
    head = model.get_output_embeddings()
    made: list[Int4Linear] = []
    kept = 0
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear | PackedLinear) or module is head:
            continue
        if Int4Linear.fits(module, group_size):
            made.append(Int4Linear(module, group_size))
            model.set_submodule(name, made[-1])
        else:
            kept += 1
    if not made:
        raise IncompatibleModels(
            "no linear layer of this model can be quantised to INT4",
            got=f"{kept} linear layers",
            expected=f"linear layers with inputs divisible by {group_size} and outputs by 16",
        )
    chosen = "shared"
    if lm_head != "shared" and isinstance(head, nn.Linear | PackedLinear) and Int4Linear.fits(head, group_size):
        packed = Int4Linear(head, group_size)
        if lm_head == "int4" or _seconds(packed, head) < _seconds(head, head):
            model.set_output_embeddings(packed)
            made.append(packed)
            chosen = "int4"
    return QuantReport(len(made), kept, sum(layer.num_bytes for layer in made), chosen)


def _seconds(module: nn.Module, like: nn.Linear | PackedLinear) -> float:
    """Best of a few one-row products."""
    weight = like.weight
    row = torch.randn(1, like.in_features, dtype=weight.dtype, device=weight.device)
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        module(row)
        if row.device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best
