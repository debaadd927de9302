"""The bits of a row of scores depend neither on the threads that compute it nor on the rows beside it."""

import pytest
import torch

from paceline import SamplingParams
from paceline.core.rng import Purpose, gumbel
from paceline.sampling.warpers import warp

PARAMS = [SamplingParams(temperature=0.7, top_p=0.9, top_k=40, min_p=0.01), SamplingParams(temperature=1.3, top_p=0.95)]


def noise(logits):
    seeds = torch.arange(len(logits)) + 7
    return gumbel(seeds, seeds[:, None] + 3, Purpose.TARGET, logits.shape[1]).squeeze(1)


def warped(logits):
    return warp(logits, [PARAMS[int(row[0] > 0)] for row in logits])


def split_sum(logits):
    """A mutant: torch splits the sum of a single row among its threads."""
    return torch.stack([row / row.exp().sum() for row in logits])


@pytest.mark.parametrize(("function", "is_same"), [(noise, True), (warped, True), (split_sum, False)])
def test_bits_with_one_thread_and_with_several(function, is_same):
    logits, before, found = (
        torch.randn(3, 70_001, generator=torch.Generator().manual_seed(1)),
        torch.get_num_threads(),
        [],
    )
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found += [function(logits)]
            if function is not noise:
                found += [torch.cat([function(row[None]) for row in logits])]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found) == is_same
