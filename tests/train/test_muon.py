"""Muon's steps beside the definition, torch's optimizer of that name, and AdamW."""

import pytest
import torch
from torch import nn

from paceline.train.muon import Muon, orthogonal

SHAPES = [(24, 24), (16, 40), (40, 16)]


def parameters(*shapes):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def give_gradients(weights, seed):
    torch.manual_seed(seed)
    for weight in weights:
        weight.grad = torch.randn(weight.shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonal_keeps_directions_and_forgets_sizes(shape):
    torch.manual_seed(1)
    u, _, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    sizes = torch.logspace(-1, 2, len(v))
    made = u.T @ orthogonal(u @ torch.diag(sizes) @ v) @ v.T
    assert (made.diagonal() > 0.1).all()
    assert (made.diagonal()[sizes > 5] - 1).abs().max() < 0.35
    assert (made - torch.diag(made.diagonal())).abs().max() < 1e-4
    assert orthogonal(torch.zeros(shape)).count_nonzero() == 0


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_matrix_moves_as_by_torchs_muon(shape, halves):
    """That one computes in bfloat16, of which five iterations leave two digits."""
    mine, theirs, begin = (parameters(shape)[0] for _ in range(3))
    one = Muon([mine], lr=0.03, weight_decay=0.1)
    other = torch.optim.Muon([theirs], lr=0.03, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for seed in range(4):
        for weight, optimizer in ((mine, one), (theirs, other)):
            give_gradients([weight], seed)
            with torch.autocast("cpu", torch.bfloat16, halves):
                optimizer.step()
    moved = (theirs - begin).detach()
    assert (mine - theirs).norm() < 0.02 * moved.norm()


def test_other_parameters_move_as_by_adamw():
    shapes = (7,), (1, 9), (9, 1), (4, 1, 3)
    mine, theirs = parameters(*shapes), parameters(*shapes)
    one = Muon(mine, lr=0.03, betas=(0.9, 0.95), weight_decay=0.1)
    other = torch.optim.AdamW(theirs, lr=0.03, betas=(0.9, 0.95), weight_decay=0.1)
    for seed in range(3):
        for weights, optimizer in ((mine, one), (theirs, other)):
            give_gradients(weights, seed)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_matrix_without_gradient_stays():
    still, moved = parameters((4, 4), (4, 4))
    optimizer, before = Muon([still, moved], lr=0.1), still.detach().clone()
    give_gradients([moved], 0)
    optimizer.step()
    assert torch.equal(still, before)
    assert not torch.equal(moved, before)


@pytest.mark.parametrize("is_known", [True, False])
def test_inputs_of_different_sizes_count_the_same(is_known):
    """A matrix over inputs x moves as V = W * scale over x / scale does, if it knows the scale."""
    (weight,), scale = parameters((16, 40)), torch.logspace(-1, 2, 40)
    scaled = nn.Parameter((weight * scale).detach())
    one = Muon([weight], lr=0.03, weight_decay=0.1, input_scales={weight: scale} if is_known else None)
    other = Muon([scaled], lr=0.03, weight_decay=0.1)
    for seed in range(3):
        give_gradients([weight, scaled], seed)
        scaled.grad = weight.grad / scale
        one.step()
        other.step()
    assert torch.allclose(weight * scale, scaled, rtol=1e-4, atol=1e-5) == is_known


def test_matrices_of_a_stack_move_as_if_alone():
    (stack,) = parameters((3, 16, 40))
    alone = [nn.Parameter(matrix.detach().clone()) for matrix in stack]
    ours, theirs = Muon([stack], lr=0.03, weight_decay=0.1), Muon(alone, lr=0.03, weight_decay=0.1)
    for seed in range(3):
        give_gradients([stack], seed)
        for weight, grad in zip(alone, stack.grad.clone(), strict=True):
            weight.grad = grad
        ours.step()
        theirs.step()
    assert torch.allclose(stack, torch.stack(alone), rtol=0, atol=1e-5)
