"""The noise under everything: uniform, independent across keys, and a draw from p under argmax."""

import pytest
import torch
from statistics_of import FALSE_ALARM, chi_square_p, tail

from paceline.core.rng import Purpose, gumbel, uniforms
from paceline.core.walk import TargetDistribution
from paceline.verify.coupled import choose_tokens

CELLS = 16


def grid(count: int, purpose: Purpose, per_key: int = 1) -> torch.Tensor:
    """Numbers of 50 seeds, `count` positions each."""
    return uniforms(torch.arange(50) * 7919, torch.arange(count).expand(50, -1), purpose, per_key)


@pytest.mark.parametrize("purpose", list(Purpose))
def test_uniform(purpose: Purpose) -> None:
    numbers = grid(200, purpose, 2)
    assert float(numbers.min()) > 0
    assert float(numbers.max()) < 1
    cells = (numbers.flatten() * CELLS).long().tolist()
    assert chi_square_p(cells, dict.fromkeys(range(CELLS), 1 / CELLS)) > FALSE_ALARM


def independent(one: torch.Tensor, other: torch.Tensor) -> float:
    """p-value of the pairs against the uniform distribution of the square."""
    cells = (one.flatten() * CELLS).long() * CELLS + (other.flatten() * CELLS).long()
    return chi_square_p(cells.tolist(), dict.fromkeys(range(CELLS**2), CELLS**-2))


def test_streams_are_independent() -> None:
    streams = {purpose: grid(400, purpose, 2) for purpose in Purpose}
    for purpose, numbers in streams.items():
        for other in Purpose:
            if other > purpose:
                assert independent(numbers[..., 0], streams[other][..., 0]) > FALSE_ALARM
        assert independent(numbers[:, 1:, 0], numbers[:, :-1, 0]) > FALSE_ALARM  # neighbouring positions
        assert independent(numbers[..., 0], numbers[..., 1]) > FALSE_ALARM  # neighbouring indices
        assert independent(numbers[1:, :, 0], numbers[:-1, :, 0]) > FALSE_ALARM  # neighbouring seeds
    assert independent(streams[Purpose.ACCEPT], streams[Purpose.ACCEPT]) < FALSE_ALARM  # and the test can fail


def test_numbers_depend_on_the_key_alone() -> None:
    """Not on the batch, on the order of positions, or on how many numbers are asked for."""
    all_at_once = uniforms(torch.tensor([5, -9]), torch.tensor([[3, 4], [8, 3]]), Purpose.TARGET, 6)
    alone = uniforms(torch.tensor([-9]), torch.tensor([[3]]), Purpose.TARGET, 2)
    assert torch.equal(all_at_once[1, 1, :2], alone[0, 0])


def test_gumbel_moments() -> None:
    noise = gumbel(torch.arange(20), torch.arange(100).expand(20, -1), Purpose.TARGET, 50).double()
    assert bool(noise.isfinite().all())
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)  # Euler's constant; the error is 0.004
    assert float(noise.var()) == pytest.approx(1.6449, abs=0.05)  # pi^2 / 6; the error is 0.01


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
def test_choose_draws_from_p(temperature: float) -> None:
    scores = torch.tensor([1.5, 0.0, -torch.inf, 1.5, -2.0, 0.7, -1.0]) / temperature
    count = 20_000
    target = TargetDistribution(scores.expand(count, 1, -1), [False] * count)
    drawn = [*choose_tokens(target, range(count), [(row, 0, 17) for row in range(count)]).values()]
    expected = {token: mass for token, mass in enumerate(scores.softmax(0).tolist()) if mass > 0}
    assert chi_square_p(drawn, expected) > FALSE_ALARM
    uniform = dict.fromkeys(expected, 1 / len(expected))
    assert chi_square_p(drawn, uniform) < FALSE_ALARM


def test_chi_square_tail() -> None:
    assert tail(3.841459, 1) == pytest.approx(0.05, abs=1e-6)
    assert tail(18.307038, 10) == pytest.approx(0.05, abs=1e-6)
