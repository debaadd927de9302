"""Quantisation-aware training of a linear layer in INT4: fake quantisation with learnt grids.

    weight  = levels * 8 s0                       s0, z0: the initial scale and zero point of each group
    s, z    = s0 exp(a), z0 + s0 b                rounded to bfloat16, as in the kernel
    forward = (clamp(round((weight - z) / s)) s + z) x        the gradient ignores the rounding (straight-through)

The parameters (levels, a, b) are in units of the grid, so that one learning rate suits every layer.
`int4_linear` makes a layer with the forward's weights, bit for bit, from what `packable` returns.
"""

from typing import final

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .int4 import BITS, SMALLEST_SCALE, codes_on, fitted_grid, grid_of, int4_params

_WEIGHT_UNIT = 8.0  # levels


@final
class FakeInt4Linear(nn.Module):
    """Replaces a linear layer in training; the bias of that layer is shared.

    bits: 4, 3 or 2.
    start: the first grid, "nearest" (`int4.grid_of`) or "fitted" (`int4.fitted_grid`).
    trains_weight: False leaves the weights and learns the grids alone.
    """

    def __init__(
        self, linear: nn.Linear, group_size: int = 32, bits: int = 4, start: str = "fitted", trains_weight: bool = True
    ):
        super().__init__()
        if bits not in BITS:
            raise ConfigError("unknown bits", got=bits, expected="one of " + ", ".join(map(str, BITS)))
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.group_size, self.bits = group_size, bits
        self._bias = (linear.bias,)  # in a tuple, so that it is not a parameter of this module
        weight = linear.weight.detach().float()
        scale, zero = (fitted_grid if start == "fitted" else grid_of)(weight, group_size, bits)
        self.scale0, self.zero0 = nn.Buffer(scale), nn.Buffer(zero)
        levels = weight.view(*scale.shape, -1) / (_WEIGHT_UNIT * scale)[..., None]
        self.levels = nn.Parameter(levels.view(weight.shape), requires_grad=trains_weight)
        self.log_scale = nn.Parameter(torch.zeros_like(scale))
        self.shift = nn.Parameter(torch.zeros_like(zero))

    @property
    def weight(self) -> Tensor:
        """The float32 weight [out, in] before it is rounded."""
        groups = self.levels.view(*self.scale0.shape, -1) * (_WEIGHT_UNIT * self.scale0)[..., None]
        return groups.view(self.out_features, self.in_features)

    @property
    def grid(self) -> tuple[Tensor, Tensor]:
        """Scales and zero points [out, in / group_size], as float32 that bfloat16 holds exactly."""
        scale = self.scale0 * self.log_scale.exp()
        zero = self.zero0 + self.scale0 * self.shift
        return _as_bfloat16(scale.clamp_min(SMALLEST_SCALE)), _as_bfloat16(zero)

    def rounded(self) -> Tensor:
        """What the packed layer's weights will be, with a gradient. [out, in]."""
        (scale, zero), half = self.grid, 1 << self.bits - 1
        steps = (self.weight.view(*scale.shape, -1) - zero[..., None]) / scale[..., None]
        codes = _straight_through(steps, steps.round()).clamp(-half, half - 1)
        return (codes * scale[..., None] + zero[..., None]).view(self.weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return nn.functional.linear(x, self.rounded().to(x.dtype), self._bias[0])

    @torch.no_grad()
    def packable(self) -> tuple[Tensor, Tensor]:
        """Codes int32 [out, in] in 0..15 and params bfloat16 [in / group_size, out, 2], for `int4_linear`."""
        scale, zero = self.grid
        return codes_on(self.weight, scale, zero, self.bits), int4_params(scale, zero)


def _as_bfloat16(x: Tensor) -> Tensor:
    return _straight_through(x, x.bfloat16().float())


def _straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """`rounded` with the gradient of x."""
    return x + (rounded - x).detach()
