"""Muon: an optimizer that makes the step of every matrix orthogonal (Jordan 2024, https://kellerjordan.github.io/posts/muon)."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

_MOMENTUM = 0.95
_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan's iteration: they bring small singular values near 1 fast, and keep the others around it."""


@final
class Muon(torch.optim.AdamW):
    """Muon for matrices and stacks of them, AdamW for all other parameters.

    A matrix moves by lr * 0.2 * sqrt(its longer side), so that its entries move as much as AdamW's would (Liu et al.
    2025, arXiv 2502.16982). `torch.optim.Muon` computes in bfloat16, which takes minutes a step on a CPU without such
    products; this is float32, or what autocast says.

    input_scales: the root mean square of each input of some matrices. Such a matrix moves as one would that reads these
        inputs scaled to 1.
    """

    def __init__(
        self, params: Iterable[Any], *, input_scales: Mapping[nn.Parameter, Tensor] | None = None, **options: Any
    ):
        super().__init__(params, **options)
        self._input_scales = dict(input_scales or {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None or weight.ndim < 2 or min(weight.shape[-2:]) == 1:
                    continue
                state, scale = self.state[weight], self._input_scales.get(weight, torch.ones(()))
                if not state:  # AdamW requires a step count of every state that it loads
                    state.update(step=torch.tensor(0.0), momentum=torch.zeros_like(weight))
                momentum = state["momentum"]
                momentum.lerp_(weight.grad, 1 - _MOMENTUM)
                step = orthogonal(weight.grad.lerp(momentum, _MOMENTUM) / scale) / scale
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(step, alpha=-0.2 * group["lr"] * max(weight.shape[-2:]) ** 0.5)
                weight.grad = None  # nothing is left of it for AdamW
        return super().step(closure)


def orthogonal(x: Tensor) -> Tensor:
    """Roughly U V' of the singular value decomposition U S V' of each matrix, by five Newton-Schulz iterations."""
    wide, (a, b, c) = x if x.shape[-2] <= x.shape[-1] else x.mT, _QUINTIC
    stack = (wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)).reshape(-1, *wide.shape[-2:])
    for _ in range(5):
        gram = stack @ stack.mT
        stack = torch.baddbmm(stack, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), stack, beta=a)
    return (stack if wide is x else stack.mT).reshape(x.shape)
