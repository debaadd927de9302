"""Corrections of low rank, b (a x), in the rows of mask tokens (SPACE). All other rows keep their bits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import products
from .structures import Matrix


def _correction(x: Tensor, matrix: Matrix) -> Tensor:
    """The rows b (a x), float32 [R, outs]; zeros where the matrix has none."""
    if matrix.a is None or matrix.b is None:
        return torch.zeros(len(x), matrix.outs, device=x.device)
    return products.finish(
        products.finish(x, matrix.a), matrix.b, out=torch.empty(len(x), matrix.outs, device=x.device)
    )


def multiply(x: Tensor, matrices: Sequence[Matrix], is_mask: Tensor | None) -> Tensor:
    """As `products.multiply`, with corrections in mask rows. is_mask: bool [R], None: there are none."""
    sums = products.multiply(x, matrices)
    if is_mask is not None and any(matrix.a is not None for matrix in matrices):
        more = torch.cat([_correction(x, matrix) for matrix in matrices], 1)
        sums[0] = torch.where(is_mask[:, None], sums[0] + more, sums[0])
    return sums


def finish(
    x: Tensor,
    up: Matrix,
    gate: Matrix | None,
    activation: int,
    is_mask: Tensor | None,
    gate_times: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """As `products.finish`, with corrections in mask rows."""
    both, more = (up, up if gate is None else gate), None
    if is_mask is not None and any(matrix.a is not None for matrix in both):
        more = (is_mask, *(_correction(x, matrix) for matrix in both))
    return products.finish(x, up, gate, activation, out, gate_times, more=more)
