"""Corrections of low rank, b (a x), in the rows that take them. All other rows keep their bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import products
from .structures import Matrix, Pass


@dataclass(frozen=True)
class Corrected:
    """takes: which correction each row of a pass takes, from 1 on; 0: none. int32 [R]. factors: those of each."""

    takes: Tensor
    factors: Sequence[Any]

    def added(self, x: Tensor, matrix: Matrix) -> Tensor | None:
        """What is added to a product, float32 [R, outs]; None where no correction has factors for its matrix."""
        more = None
        for number, factors in enumerate(self.factors, 1):
            a, b = factors[2 * matrix.place : 2 * matrix.place + 2] if matrix.place else (Matrix(), Matrix())
            if a.data is not None:
                out = torch.empty(len(x), matrix.outs, device=x.device)
                own = products.finish(products.finish(x, a), b, out=out)
                more = torch.where(self.takes[:, None] == number, own, 0.0 if more is None else more)
        return more


def of(step: Pass) -> Corrected | None:
    """Those of a pass; None where no row takes one."""
    return None if step.corrected is None else Corrected(step.corrected.flatten(), step.corrections)


def multiply(x: Tensor, matrices: Sequence[Matrix], corrected: Corrected | None) -> Tensor:
    """As `products.multiply`, with corrections."""
    sums = products.multiply(x, matrices)
    more = [] if corrected is None else [corrected.added(x, matrix) for matrix in matrices]
    if corrected is not None and any(part is not None for part in more):
        whole = torch.cat([_or_zeros(part, x, matrix) for part, matrix in zip(more, matrices, strict=True)], 1)
        sums[0] = torch.where(corrected.takes[:, None] > 0, sums[0] + whole, sums[0])
    return sums


def finish(
    x: Tensor,
    up: Matrix,
    gate: Matrix | None,
    activation: int,
    corrected: Corrected | None,
    gate_times: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """As `products.finish`, with corrections."""
    both, more = (up, up if gate is None else gate), None
    if corrected is not None:
        parts = [corrected.added(x, matrix) for matrix in both]
        if any(part is not None for part in parts):
            more = (corrected.takes, *(_or_zeros(part, x, matrix) for part, matrix in zip(parts, both, strict=True)))
    return products.finish(x, up, gate, activation, out, gate_times, more=more)


def _or_zeros(part: Tensor | None, x: Tensor, matrix: Matrix) -> Tensor:
    return torch.zeros(len(x), matrix.outs, device=x.device) if part is None else part
