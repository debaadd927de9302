"""Describes layers of experts for our kernels: their weights, and how rows choose by the configs of transformers."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, cast

from torch import nn

from ..errors import IncompatibleModels, NumericsError
from ..kernels.library import SCORINGS, BlockFormat
from ..quant.packed import matrix_of_weight
from .experts import Experts, num_chosen_of, num_experts_of

MAX_EXPERTS = 1024
_BLOCKS = frozenset(map(int, BlockFormat))


@dataclass(frozen=True)
class Routing:
    """How an architecture turns the logits of its router into a choice and weights.

    scoring: what makes scores of logits, over all experts.
    divides: whether weights are divided by their sum; None: as `norm_topk_prob` says.
    more_sum: what is added to the sum.
    of_group: how many scores of a group are added up to choose groups.
    clamped: whether inner rows are gpt-oss': gate sigmoid(alpha gate) (up + 1), both cut to a limit.
    """

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    divides: bool | None = None
    more_sum: float = 0.0
    of_group: int = 0
    clamped: bool = False


_DEEPSEEK = Routing("sigmoid", more_sum=1e-20, of_group=2)
ROUTINGS: dict[str, Routing] = {
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_omni_moe_text", "qwen3_next"), Routing()),
    **dict.fromkeys(("olmoe", "flex_olmo", "mellum"), Routing()),
    **dict.fromkeys(("qwen3_vl_moe_text", "qwen3_5_moe_text"), Routing(divides=True)),
    **dict.fromkeys(("mixtral", "granitemoe", "granitemoeshared", "granitemoehybrid"), Routing(divides=True)),
    **dict.fromkeys(("granitemoe_swa", "gemma4_text", "gemma4_unified_text", "ernie4_5_moe"), Routing(divides=True)),
    "gpt_oss": Routing(divides=True, clamped=True),
    "deepseek_v2": Routing(divides=False, of_group=1),
    **dict.fromkeys(("axk1", "deepseek_v3", "glm4_moe_lite", "sarvam_mla"), _DEEPSEEK),
    **dict.fromkeys(("glm4_moe", "dots1", "solar_open", "exaone_moe", "nemotron_h", "sarvam_moe"), _DEEPSEEK),
    "hy_v3": Routing("sigmoid", divides=True, more_sum=1e-20),
    "minimax_m2": Routing("sigmoid", divides=True),
    "lfm2_moe": Routing("sigmoid", more_sum=1e-6),
}
"""By the type of the text model."""


BESIDE = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
"""The norms of experts beside an MLP: of its output, and of what they read and give."""
_CORRECTIONS = ("e_score_correction_bias", "expert_bias")
_FACTORS = ("routed_scaling_factor", "router_scaling_factor", "route_scale")


def part_of(module: Any, *names: str) -> Any:
    """The first of these that a module has. Raises AttributeError."""
    return getattr(module, next((name for name in names if hasattr(module, name)), names[0]))


def experts_of(
    block: Any, config: Any, matrix: Callable[[Any], Any], norm: Callable[..., Any], held: Any, kernels: Any
) -> Any:
    """The `Experts` of a block of a model. matrix, norm: describe a linear layer, and a norm.

    Raises AttributeError for experts that could not be taken apart, KeyError for an unknown way of choosing,
    `IncompatibleModels` for experts that contradict their router or one another.
    """
    experts, router = block.experts, part_of(block, "gate", "router")
    if not isinstance(experts, Experts):
        raise AttributeError("experts that could not be taken apart")
    if not isinstance(getattr(block, "fc1_latent_proj", None), nn.Identity | None):
        raise AttributeError("experts of a smaller width")
    scored: Any = next((part for name in ("proj", "gate", "wg") if (part := getattr(router, name, None))), router)
    made, weight = kernels.Experts(count=len(experts)), matrix_of_weight(scored.weight.detach())
    if weight.outs != made.count:
        raise IncompatibleModels("a router scores another number of experts", got=weight.outs, expected=made.count)
    if made.count > MAX_EXPERTS:
        raise IncompatibleModels("a layer has too many experts", got=made.count, expected=f"at most {MAX_EXPERTS}")
    held.append(weight)
    made.router = weight.struct
    made.router.bias = held.floats(getattr(scored, "bias", None))
    _choose(made, config, router)
    places = (router, block, getattr(router, "moe_statics", None))
    biases = (getattr(place, name, None) for place in places for name in _CORRECTIONS)
    made.choice_bias = held.floats(next((bias for bias in biases if bias is not None), None))
    made.scale = held.floats(getattr(router, "per_expert_scale", None))
    for name in ("gate", "up", "down"):
        layers = [getattr(expert, f"{name}_proj") for expert in cast("Any", experts)]
        if layers[0] is not None:
            setattr(made, name, held.structures(kernels.Matrix, [matrix(one) for one in layers]))
    _check(made, weight.ins)
    if (gate := getattr(block, "shared_expert_gate", None)) is not None:
        made.shared_gate = matrix(gate)
    if hasattr(block, BESIDE[0]):
        made.after_shared, made.experts_norm, made.after_experts = (norm(getattr(block, name)) for name in BESIDE)
        scale = router.scale.detach().float() * router.scalar_root_size
        made.router_norm = kernels.Norm(held.floats(scale), None, float(router.eps), 1)
    return made


_ROUTER = re.compile(r"(.*\.)?(gate|router)(\.wg|\.layer|\.proj|\.gate|\.moe_statics)?\.\w+")


def check_routers(name: str, model: nn.Module) -> None:
    """Raise `IncompatibleModels` for more experts of a row than there are, `NumericsError` for NaN in a router."""
    config, held = cast("Any", model).config.get_text_config(), chain(model.named_parameters(), model.named_buffers())
    if count := num_experts_of(config):
        chosen = num_chosen_of(config) or 1
        if isinstance(count, int) and isinstance(chosen, int):
            _check_chosen(chosen, count)
        for path, weight in held:
            if (_ROUTER.fullmatch(path) or path.endswith(_CORRECTIONS)) and not bool(weight.isfinite().all()):
                raise NumericsError(
                    f"a router of {name!r} holds NaN or infinity", got=path, expected="finite numbers",
                    fix="fetch the weights again",
                )  # fmt: skip


def _check_chosen(chosen: int, count: int) -> None:
    if not 0 < chosen <= count:
        raise IncompatibleModels(
            "rows cannot choose so many experts", got=f"{chosen} of {count}", expected=f"1 to {count}",
            fix='check "num_experts_per_tok" in config.json',
        )  # fmt: skip


def _check(struct: Any, hidden: int) -> None:
    """Raises `IncompatibleModels` unless the experts read and make rows of this size, in one format."""
    inner = int(struct.up[0].outs)
    for name, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
        if matrices := getattr(struct, name):
            expected = (*shape, *_blocks(matrices[0]))
            for index in range(struct.count):
                one = matrices[index]
                if (got := (one.outs, one.ins, *_blocks(one))) != expected:
                    message = f'"{name}_proj" of expert {index} does not fit the others'
                    about = "[{}, {}] in format {} for inputs in {} bits"
                    raise IncompatibleModels(message, got=about.format(*got), expected=about.format(*expected))


def _blocks(matrix: Any) -> tuple[int, int]:
    return (matrix.format, matrix.input_bits) if matrix.format in _BLOCKS else (0, 0)


def _choose(struct: Any, config: Any, router: Any) -> None:
    """Fill the fields that say how a row chooses. Raises `IncompatibleModels` for a choice that cannot be made."""
    rule, count = ROUTINGS[config.model_type], int(struct.count)
    chosen = getattr(router, "top_k", None) or getattr(config, "top_k_experts", None)
    struct.chosen = int(chosen or config.num_experts_per_tok)
    _check_chosen(struct.chosen, count)
    struct.scoring = SCORINGS[rule.scoring]
    struct.divides = bool(getattr(config, "norm_topk_prob", False)) if rule.divides is None else rule.divides
    struct.least_sum, struct.more_sum = float(getattr(config, "moe_norm_min", 0.0)), rule.more_sum
    struct.times = float(next(filter(None, (getattr(config, name, None) for name in _FACTORS)), 1.0))
    struct.alpha = 1.0
    if rule.clamped:
        struct.alpha, struct.limit, struct.plus = float(config.swiglu_alpha), float(config.swiglu_limit), 1.0
    groups = int(getattr(config, "n_group", None) or 1)
    ignores_groups = rule.of_group == 1 and getattr(config, "topk_method", None) == "greedy"  # in DeepSeek-V2
    if rule.of_group and groups > 1 and not ignores_groups:
        struct.groups, struct.chosen_groups, struct.of_group = groups, int(config.topk_group), rule.of_group
        fits = count % groups == 0 and 0 < struct.chosen_groups <= groups
        if not fits or struct.chosen > count // groups * struct.chosen_groups:
            raise IncompatibleModels(
                "experts cannot be chosen by groups",
                got=f"{struct.chosen} of {count} experts in {struct.chosen_groups} of {groups} groups",
                expected="groups of one size, and enough experts in those that are chosen",
                fix='check "n_group", "topk_group" and "num_experts_per_tok" in config.json',
            )
