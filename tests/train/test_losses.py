"""The loss of the shared noise against its expectation, which enumerates the noise of a vocabulary of three tokens."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from paceline.train.losses import LOSSES, Loss

TARGET, HEAD = [0.9, -0.4, 0.2], [-0.1, 0.6, 0.3]
STEPS, DRAWS = 48, 1 << 17


@pytest.fixture(scope="module")
def expected() -> tuple[float, Tensor]:
    """The loss and its gradient by the head's logits, over all noise: each token's at the same quantiles."""
    quantiles = (torch.arange(STEPS, dtype=torch.float64) + 0.5) / STEPS
    noise = torch.tensor([*product((-(-quantiles.log()).log()).tolist(), repeat=3)], dtype=torch.float64)
    head = torch.tensor(HEAD, dtype=torch.float64)
    chosen = (torch.tensor(TARGET, dtype=torch.float64) + noise).argmax(-1)
    confidence = (head + noise).exp()
    confidence /= confidence.sum(-1, keepdim=True)
    loss = -confidence[torch.arange(len(noise)), chosen].log().mean()
    return float(loss), confidence.mean(0) - torch.bincount(chosen) / len(noise)


def drawn(loss: Loss) -> tuple[float, Tensor]:
    torch.manual_seed(0)
    head = torch.tensor(HEAD, dtype=torch.float64, requires_grad=True)
    value = loss(torch.tensor(TARGET, dtype=torch.float64).expand(DRAWS, -1), head.expand(DRAWS, -1))
    value.backward()
    assert head.grad is not None
    return float(value.detach()), head.grad


def matches(loss: Loss, expected: tuple[float, Tensor]) -> bool:
    value, gradient = drawn(loss)
    return abs(value - expected[0]) < 0.015 and bool(((gradient - expected[1]).abs() < 0.01).all())


def test_the_coupled_loss_is_the_likelihood_of_the_sampled_token_given_its_noise(expected):
    assert matches(LOSSES["coupled"], expected)
    p = torch.tensor(TARGET, dtype=torch.float64).softmax(-1)
    sampled = torch.bincount((torch.tensor(TARGET) + noise(torch.zeros(DRAWS, 3))).argmax(-1)) / DRAWS
    torch.testing.assert_close(sampled.double(), p, atol=0.01, rtol=0)


def noise(like: Tensor) -> Tensor:
    return -torch.empty_like(like).exponential_().log()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_of_16_bits_have_whole_noise(dtype):
    exact = [torch.tensor(row, dtype=torch.float64).expand(DRAWS, -1) + 24 for row in ([0.875, -0.375], [-0.125, 0.25])]
    torch.manual_seed(0)
    narrow, whole = LOSSES["coupled"](*(logits.to(dtype) for logits in exact)), LOSSES["coupled"](*exact)
    assert abs(float(narrow) - float(whole)) < 0.01


MUTANTS: dict[str, Loss] = {
    "noise of its own": lambda p, q: nn.functional.cross_entropy(q + noise(q), (p + noise(p)).argmax(-1)),
    "no noise on q": lambda p, q: nn.functional.cross_entropy(q, (p + noise(p)).argmax(-1)),
    "no noise on p": lambda p, q: nn.functional.cross_entropy(q + noise(q), p.argmax(-1)),
    "one noise for all": lambda p, q: nn.functional.cross_entropy(q + (g := noise(q[:1])), (p + g).argmax(-1)),
    "another noise": lambda p, q: nn.functional.cross_entropy(q + (g := -noise(q)), (p + g).argmax(-1)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_noticed(mutant, expected):
    assert not matches(MUTANTS[mutant], expected)
