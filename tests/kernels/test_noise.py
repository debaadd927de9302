"""Native draws against their definition, argmax(scores + noise) with the noise of every token; the noise itself."""

import pytest
import torch
from torch import Tensor

from paceline.core.rng import Purpose, gumbel
from paceline.kernels import load
from paceline.kernels.library import draw, library
from paceline.kernels.library import gumbel as native_gumbel
from paceline.sampling.scores import gumbel_argmax

pytestmark = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")

INFINITY = torch.inf


def defined(scores: Tensor, seeds: list[int], positions: list[int]) -> Tensor:
    noise = gumbel(torch.tensor(seeds), torch.tensor(positions).unsqueeze(1), Purpose.TARGET, scores.shape[1])
    return (scores + noise.squeeze(1)).argmax(-1)


def cases() -> list[tuple[Tensor, list[int], list[int]]]:
    """Flat and peaked scores, small and huge ones, with forbidden tokens, and with many equal ones or sums."""
    rng, found = torch.Generator().manual_seed(0), list[tuple[Tensor, list[int], list[int]]]()
    for size, rows in ((1, 4), (7, 300), (1000, 60), (20_000, 8)):
        for scale, mean in ((0.0, 0.0), (1.0, 0.0), (6.0, 0.0), (1e4, 0.0), (1e8, 0.0), (0.0, 1e6)):
            scores = torch.randn(rows, size, generator=rng) * scale + mean
            scores[::3, torch.randperm(size, generator=rng)[: size // 2]] = -INFINITY
            scores[1::3] = (scores[1::3] / 2).round() * 2
            seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=rng).tolist()
            found.append((scores, seeds, torch.randint(0, 10**6, (rows,), generator=rng).tolist()))
    return found


def draws_as_defined() -> bool:
    """Whether every row that `draw` decides is decided as by definition, and nearly all rows are decided."""
    decided = total = 0
    for scores, seeds, positions in cases():
        tokens, wanted = draw(scores, seeds, positions, Purpose.TARGET), defined(scores, seeds, positions).tolist()
        if any(token not in (-1, want) for token, want in zip(tokens, wanted, strict=True)):
            return False
        if scores.abs().nan_to_num(0, 0, 0).max() < 100:
            decided += sum(token >= 0 for token in tokens)
            total += len(tokens)
    return decided > 0.99 * total


def test_draws_are_as_defined():
    assert draws_as_defined()
    for scores, seeds, positions in cases():
        assert torch.equal(gumbel_argmax(scores, seeds, positions), defined(scores, seeds, positions))


@pytest.mark.parametrize("value", [torch.nan, INFINITY])
def test_scores_that_are_not_finite_are_left_to_torch(value):
    scores = torch.randn(3, 50)
    scores[0, 30], scores[2] = value, -INFINITY
    assert [token >= 0 for token in draw(scores, [1, 2, 3], [4, 5, 6], Purpose.TARGET)] == [False, True, False]
    assert int(gumbel_argmax(scores, [1, 2, 3], [4, 5, 6])[0]) == 30


def noise_as_defined() -> bool:
    """Whether the noise of some tokens is that of `core.rng`, from the largest to the smallest that there is."""
    rng = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (40,), generator=rng)
    positions, ids = torch.arange(40) * 1009, torch.randperm(100_000, generator=rng)[:7001]
    wanted = gumbel(seeds, positions[:, None], Purpose.TARGET, ids).squeeze(1)
    found = native_gumbel(seeds.tolist(), positions.tolist(), Purpose.TARGET, ids)
    return torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("isa", load().isas)
def test_noise_is_as_defined(isa):
    library().paceline_select(isa.encode())
    try:
        assert noise_as_defined()
    finally:
        library().paceline_select(load().isa.encode())
