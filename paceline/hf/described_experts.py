"""Blocks of experts as modules with transformers' names that hold weights and compute nothing, for `described`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .experts import Expert, Experts, no_gate, num_experts_of


@dataclass(frozen=True)
class Block:
    """The parts of a block of experts, and their names.

    path: of the block in its layer. inner: what the config calls the width of an expert.
    router: with a bias where `biased`, as the experts are then.
    correction: what is added to scores for the choice; "" where there is nothing.
    shared: the MLP beside the experts.
    """

    router: str = "gate"
    biased: bool = False
    correction: str = ""
    shared: str = ""
    path: str = "mlp"
    inner: str = "moe_intermediate_size"


CORRECTION = "e_score_correction_bias"
"""What is added to scores for the choice. It stays float32 where files have it so."""
BLOCKS: dict[str, Block] = {
    **dict.fromkeys(("mixtral", "olmoe", "flex_olmo"), Block(inner="intermediate_size")),
    **dict.fromkeys(("qwen3_moe", "mellum"), Block()),
    "qwen2_moe": Block(shared="shared_expert"),
    "gpt_oss": Block("router", biased=True, inner="intermediate_size"),
    "granitemoe": Block("router", path="block_sparse_moe", inner="intermediate_size"),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text"), Block(shared="shared_expert")),
    **dict.fromkeys(
        ("glm4_moe", "dots1", "solar_open", "exaone_moe", "deepseek_v3", "glm4_moe_lite", "sarvam_mla"),
        Block(correction=f"gate.{CORRECTION}", shared="shared_experts"),
    ),
    "deepseek_v2": Block(shared="shared_experts"),
    "ernie4_5_moe": Block(correction=f"gate.moe_statics.{CORRECTION}", shared="shared_experts"),
    "minimax_m2": Block(correction=CORRECTION, inner="intermediate_size"),
    "hy_v3": Block(correction=CORRECTION, shared="shared_experts"),
}
"""By the type of the text model."""


def has_experts(config: Any, layer: int) -> bool:
    """Whether a layer has experts in the place of an MLP."""
    if config.model_type not in BLOCKS:
        return False
    if (kinds := getattr(config, "mlp_layer_types", None)) is not None:
        return kinds[layer] == "sparse"
    first = getattr(config, "first_k_dense_replace", None) or getattr(config, "moe_layer_start_index", 0)
    step = getattr(config, "decoder_sparse_step", None) or getattr(config, "moe_layer_interval", 1)
    is_plain = layer in (getattr(config, "mlp_only_layers", None) or ())
    last = getattr(config, "moe_layer_end_index", layer)
    return not is_plain and first <= layer <= last and (layer + 1) % step == 0


class Router(nn.Module):
    """The weight of a router. It stays float32 where files have it so."""

    def __init__(self, count: int, width: int, biased: bool, dtype: torch.dtype):
        super().__init__()
        self.weight = _empty(dtype, count, width)
        self.register_parameter("bias", _empty(dtype, count) if biased else None)


class ExpertBlock(nn.Module):
    """The router and the experts of a layer, and the MLP beside them.

    linear: makes a layer of so many inputs and outputs, with or without a bias.
    """

    def __init__(self, config: Any, linear: Callable[[int, int, bool], nn.Module], dtype: torch.dtype):
        super().__init__()
        names, hidden, count = BLOCKS[config.model_type], config.hidden_size, num_experts_of(config)
        inner = getattr(config, names.inner)

        def mlp(size: int, biased: bool = False) -> Expert:
            gate, up = (linear(hidden, size, biased) for _ in range(2))
            return Expert(gate, up, linear(size, hidden, biased))

        self.add_module(names.router, Router(count, hidden, names.biased, dtype))
        self.experts = Experts((mlp(inner, names.biased) for _ in range(count)), no_gate)
        if names.correction:
            path, _, leaf = names.correction.rpartition(".")
            shape = (1, count) if "moe_statics" in path else (count,)
            place = self
            for name in filter(None, path.split(".")):
                if not hasattr(place, name):
                    place.add_module(name, nn.Module())
                place = getattr(place, name)
            place.register_parameter(leaf, _empty(dtype, *shape))
        if names.shared == "shared_expert":
            self.shared_expert = mlp(config.shared_expert_intermediate_size)
            self.shared_expert_gate = linear(hidden, 1, False)
        elif names.shared and (shared := _num_shared(config)):
            self.add_module(names.shared, mlp(inner * shared))


def _num_shared(config: Any) -> int:
    names = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    return next((count for name in names if (count := getattr(config, name, None))), 0)


def _empty(dtype: torch.dtype, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=False)
