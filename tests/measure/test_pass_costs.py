"""Arithmetic of passes and drafts, held against sums done by hand and against a simulation."""

import random

import pytest

from paceline.measure.machine import PassCosts, tokens_per_round

COSTS = PassCosts(weight_bytes=4_000_000, bandwidth=1e9, seconds={1: 0.010, 2: 0.010, 4: 0.011, 8: 0.015, 16: 0.031})


def test_floor():
    assert COSTS.floor == pytest.approx(0.004)
    assert COSTS.floor_fraction == pytest.approx(0.4)


def test_rows_that_are_free():
    assert COSTS.flat_rows == 4
    assert PassCosts(1, 1, {1: 1.0, 2: 1.1, 4: 1.0}).flat_rows == 4
    assert PassCosts(1, 1, {1: 1.0, 2: 1.2, 4: 1.0}).flat_rows == 1  # what follows a growth does not count


@pytest.mark.parametrize(
    ("rows", "seconds"), [(1, 0.010), (3, 0.0105), (6, 0.013), (12, 0.023), (16, 0.031), (24, 0.047)]
)
def test_between_and_beyond_the_measured(rows, seconds):
    assert COSTS.at(rows) == pytest.approx(seconds)


def test_one_measured_count_is_all_there_is():
    assert PassCosts(1, 1, {1: 2.0}).at(9) == 2.0


@pytest.mark.parametrize(("num_tokens", "acceptance"), [(5, 0.8), (3, 0.6), (8, 0.3), (4, 0.0), (4, 1.0)])
def test_tokens_per_round_as_simulated(num_tokens, acceptance):
    draw, rounds, tokens = random.Random(0), 20_000, 0
    for _ in range(rounds):
        accepted = 0
        while accepted < num_tokens and draw.random() < acceptance:
            accepted += 1
        tokens += accepted + 1
    assert tokens_per_round(num_tokens, acceptance) == pytest.approx(tokens / rounds, rel=0.02)


def test_dearest_draft_breaks_even():
    """At that cost a token speculation is exactly as fast as plain decoding; a hundredth more and it loses."""
    dearest = COSTS.dearest_draft(5, 0.8)
    assert COSTS.speedup(5, 0.8, dearest) == pytest.approx(1)
    assert COSTS.speedup(5, 0.8, 1.01 * dearest) < 1 < COSTS.speedup(5, 0.8, 0.99 * dearest)
    by_hand = ((1 - 0.8**6) / 0.2 * 0.010 - 0.013) / 5
    assert dearest == pytest.approx(by_hand)


def test_mutant_without_the_bonus_token_breaks_even_elsewhere():
    without = ((tokens_per_round(5, 0.8) - 1) * 0.010 - 0.013) / 5
    assert COSTS.speedup(5, 0.8, without) > 1.2


def test_least_acceptance_of_free_drafts():
    least = COSTS.least_acceptance(7)
    assert COSTS.speedup(7, least) == pytest.approx(1, abs=0.01)
    assert PassCosts(1, 1, {1: 1.0, 2: 1.0, 8: 1.0}).least_acceptance(7) == pytest.approx(0, abs=2e-3)
    assert PassCosts(1, 1, {1: 1.0, 8: 9.0}).least_acceptance(7) is None
