"""Experts as modules of their own, each a plain MLP, so that whatever is done to linear layers is done to them.

Transformers keeps the weights of all experts of a layer in one tensor: `split_experts` takes views of it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..quant.packed import linear_of

Gated = Callable[[Tensor | None, Tensor], Tensor]
"""Makes the inner row of an expert from what its gate (None: it has none) and its up projection give."""


_WHOLE, _MOST = 64, 1 << 14


def no_gate(gate: Tensor | None, up: Tensor) -> Tensor:
    """Of experts that only kernels run."""
    raise NotImplementedError


class Expert(nn.Module):
    """An MLP: down(gated(gate(x), up(x)))."""

    gate_proj: nn.Module | None

    def __init__(self, gate: nn.Module | None, up: nn.Module, down: nn.Module):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down


class Experts(nn.ModuleList):
    """The experts of a layer.

    In torch, the bits of a row do not depend on the others where those of the linear layers do not: its outputs are
    added in the order of its choice.
    """

    def __init__(self, experts: Iterable[Expert], gated: Gated):
        super().__init__(experts)
        self.gated = gated

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[R, E], the experts that each row chose and their weights [R, K] -> [R, E]. Ids beyond all count nothing."""
        count, chosen = top_k_index.shape
        outputs = hidden_states.new_zeros(count, chosen, hidden_states.shape[-1])
        for index in top_k_index.unique().tolist():
            if index < len(self):
                rows, ranks = torch.where(top_k_index == index)
                outputs[rows, ranks] = self._output(self[index], hidden_states[rows]).to(outputs.dtype)
        weighted = outputs * top_k_weights[..., None].to(outputs.dtype)
        total = weighted[:, 0]
        for rank in range(1, chosen):
            total = total + weighted[:, rank]
        return total

    def _output(self, expert: Any, x: Tensor) -> Tensor:
        gate = None if expert.gate_proj is None else expert.gate_proj(x)
        return expert.down_proj(gated_by_row(self.gated, gate, expert.up_proj(x)))


def gated_by_row(gated: Gated, gate: Tensor | None, up: Tensor) -> Tensor:
    """What `gated` makes of rows [R, inner], with bits of a row that do not depend on the others.

    Torch computes the end of a tensor, and that of a thread's part, in other ways than whole vectors, and some
    activations of one row alone: so rows are filled up to `_WHOLE` numbers, one is added, and a call gets at most
    `_MOST` numbers, which one thread computes.
    """
    size = up.shape[-1]
    step = max(1, _MOST // (size + -size % _WHOLE) - 1)

    def part(rows: Tensor) -> Tensor:
        return pad(rows, (0, -size % _WHOLE, 0, 1))

    made = list[Tensor]()
    for first in range(0, len(up), step):
        some = slice(first, first + step)
        made.append(gated(None if gate is None else part(gate[some]), part(up[some]))[:-1, :size])
    return torch.cat(made)


@dataclass(frozen=True)
class _Rule:
    """How a class of transformers makes inner rows. module: without its weights."""

    module: Any

    def __call__(self, gate: Tensor | None, up: Tensor) -> Tensor:
        if gate is None:
            return self.module.act_fn(up)
        if self.module.is_concatenated:
            return self.module._apply_gate(torch.cat([gate, up], -1))
        return self.module._apply_gate(torch.stack([gate, up], -1).flatten(-2))


_COUNT = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
"""What configs call the number of experts that a token takes."""


def num_experts_of(config: Any) -> int:
    """The experts of a layer, which families name differently; 0 where there are none."""
    return next((count for name in _COUNT if (count := getattr(config, name, None))), 0)


def num_chosen_of(config: Any) -> int:
    """How many of them a token takes; 0 where a config does not say it."""
    return next((count for name in CHOSEN if (count := getattr(config, name, None))), 0)


def state_by_expert(model: nn.Module) -> dict[str, Tensor]:
    """The `state_dict` that a model would have after `split_experts`."""
    state: dict[str, Tensor] = model.state_dict()
    for path, module in model.named_modules():
        if _is_stacked(module):
            for name, _ in module.named_parameters():
                del state[f"{path}.{name}"]
            nn.ModuleList(_experts_in(module)).state_dict(destination=state, prefix=f"{path}.")
    return state


def split_experts(model: nn.Module) -> int:
    """Replace stacked experts of transformers by `Experts` over the same memory; returns how many layers had some."""
    stacked = [(path, module) for path, module in model.named_modules() if _is_stacked(module)]
    for path, module in stacked:
        model.set_submodule(path, in_place_of(module, _experts_in(module)))
    return len(stacked)


def has_stacked_experts(model: nn.Module) -> bool:
    """Whether there are experts whose weights are in one tensor, which transformers computes."""
    return any(_is_stacked(module) for module in model.modules())


def mixes_rows(model: nn.Module) -> bool:
    """Whether torch multiplies the rows of an expert, whose number depends on all rows of a pass."""
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    is_plain = any(type(part) is nn.Linear for module in experts for part in module.modules())
    others = (module for module in model.modules() if not isinstance(module, nn.Conv1d))
    return not experts or is_plain or any(one.dim() == 3 for part in others for one in part.parameters(recurse=False))


def _is_stacked(module: Any) -> bool:
    down = getattr(module, "down_proj", None)
    known = hasattr(module, "is_concatenated") and not getattr(module, "has_post_expert_norm", False)
    return known and isinstance(down, nn.Parameter) and down.dim() == 3


def _experts_in(module: Any) -> list[Expert]:
    """Over the same memory."""
    names = ("gate_up_proj", "up_proj", "down_proj")
    weights: dict[str, Any] = {name: getattr(module, name) for name in names if hasattr(module, name)}
    biases: dict[str, Any] = {name: getattr(module, f"{name}_bias", None) for name in weights}

    def linear(name: str, index: int, cut: slice = slice(None)) -> nn.Linear:
        weight, bias = weights[name].detach()[index], biases[name]
        weight = weight.T if module.is_transposed else weight
        return linear_of(weight[cut], None if bias is None else bias.detach()[index][cut])

    def expert(index: int) -> Expert:
        if "gate_up_proj" not in weights:
            return Expert(None, linear("up_proj", index), linear("down_proj", index))
        half = weights["gate_up_proj"].shape[2 if module.is_transposed else 1] // 2
        cuts = (slice(half), slice(half, None)) if module.is_concatenated else (slice(0, None, 2), slice(1, None, 2))
        gate, up = (linear("gate_up_proj", index, cut) for cut in cuts)
        return Expert(gate, up, linear("down_proj", index))

    return [expert(index) for index in range(len(weights["down_proj"]))]


def in_place_of(stacked: Any, experts: Iterable[Any]) -> Experts:
    """Experts that make inner rows as a module of transformers does, whose own weights are dropped."""
    for name, _ in list(stacked.named_parameters()):
        delattr(stacked, name)
    return Experts(experts, _Rule(stacked))
