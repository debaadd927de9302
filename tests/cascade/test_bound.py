"""The promise in exact fractions: how often a chosen threshold breaks it, by adding up all outcomes of a sample."""

import itertools
import math
from fractions import Fraction

import pytest

from paceline.cascade.bound import Point, binomial_cdf, holds, last_that_holds, prompts_needed, upper_bound
from paceline.cascade.measure import check_sample
from paceline.errors import ConfigError

N, LIMIT, CONFIDENCE = 14, 0.25, 0.8


def exact_cdf(k: int, n: int, p: Fraction) -> Fraction:
    return sum((math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1)), Fraction(0))


@pytest.mark.parametrize("n", [1, 2, 5, 13, 40])
@pytest.mark.parametrize("p", [0.001, 0.01, 0.3, 0.5, 0.93])
def test_the_sum_is_the_sum(n, p):
    for k in range(-1, n + 2):
        exact = exact_cdf(min(k, n), n, Fraction(p)) if k >= 0 else 0
        assert binomial_cdf(k, n, p) == pytest.approx(float(exact), rel=1e-11, abs=1e-300)


def test_large_samples_stay_sound():
    assert binomial_cdf(400, 1000, 0.01) == pytest.approx(1.0)
    assert binomial_cdf(1000, 100_000, 0.01) == pytest.approx(0.5 + 2 / 3 * 0.0126786, abs=1e-4)  # Edgeworth
    assert 0 < binomial_cdf(0, 1_000_000, 1e-5) < 1e-4


@pytest.mark.parametrize(("k", "n"), [(0, 10), (1, 10), (3, 30), (9, 10), (10, 10), (0, 299)])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_upper_bound_is_where_the_tail_is_the_level(k, n, confidence):
    bound = upper_bound(k, n, confidence)
    if k == n:
        assert bound == 1.0
        return
    assert float(exact_cdf(k, n, Fraction(bound))) == pytest.approx(1 - confidence, rel=1e-6)
    assert holds(k, n, bound * 1.0001, confidence)
    assert not holds(k, n, bound * 0.9999, confidence)


def test_upper_bound_covers():
    """The promise of an interval: over all samples, for every p, it misses with at most 1 - confidence."""
    n, bounds = 12, [upper_bound(k, 12, CONFIDENCE) for k in range(13)]
    for step in range(1, 100):
        p = Fraction(step, 100)
        missed = sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1) if bounds[k] < p)
        assert missed <= 1 - CONFIDENCE + 1e-9


def test_how_many_prompts():
    assert prompts_needed(0, 0.01, 0.95) == 299 == math.ceil(math.log(0.05) / math.log(0.99))
    for k, limit, confidence in [(0, 0.05, 0.9), (2, 0.1, 0.95), (7, 0.02, 0.99)]:
        need = prompts_needed(k, limit, confidence)
        assert holds(k, need, limit, confidence)
        assert not holds(k, need - 1, limit, confidence)


@pytest.mark.parametrize("bad", [(0.0, 0.95), (1.0, 0.95), (0.01, 0.0), (0.01, 1.0), (-1, 0.5)])
def test_no_promise_of_nothing(bad):
    with pytest.raises(ConfigError, match=r"greater than 0|less than 1"):
        check_sample(300, *bad)


# The choice of a threshold: three levels of confidence; `risks[i]` is P(confidence in level i or above, and different).


def failures(risks: list[Fraction], choose) -> Fraction:
    """P(the chosen threshold has a risk above LIMIT), over all samples of N prompts."""
    steps = [risks[0], *(b - a for a, b in itertools.pairwise(risks))]
    failed = Fraction(0)
    for counts in itertools.product(range(N + 1), repeat=len(steps)):
        rest = N - sum(counts)
        if rest < 0:
            continue
        seen = list(itertools.accumulate(counts))
        level = choose([Point(1.0 - i / 10, N, k) for i, k in enumerate(seen)])
        if level is None or risks[level] <= Fraction(LIMIT):
            continue
        chance = Fraction(math.factorial(N), math.prod(map(math.factorial, (*counts, rest))))
        for count, step in zip((*counts, rest), (*steps, 1 - sum(steps)), strict=True):
            chance *= step**count
        failed += chance
    return failed


def ours(points: list[Point]) -> int | None:
    best = last_that_holds(points, N, LIMIT, CONFIDENCE)
    return None if best is None else points.index(best)


def by_what_was_seen(points: list[Point]) -> int | None:
    """The naive choice: the lowest threshold at which no more than the limit was seen."""
    return max((i for i, point in enumerate(points) if point.differ <= LIMIT * N), default=None)


def off_by_one(points: list[Point]) -> int | None:
    """P(fewer than k) in the place of P(k or fewer)."""
    return max((i for i, p in enumerate(points) if holds(p.differ - 1, N, LIMIT, CONFIDENCE)), default=None)


def swapped(points: list[Point]) -> int | None:
    """The confidence taken for the level."""
    return max((i for i, p in enumerate(points) if holds(p.differ, N, LIMIT, 1 - CONFIDENCE)), default=None)


RISKS = [
    [Fraction(1, 20), Fraction(1, 5), Fraction(26, 100)],  # the last one just too risky
    [Fraction(26, 100), Fraction(3, 10), Fraction(2, 5)],  # all of them
    [Fraction(1, 100), Fraction(26, 100), Fraction(9, 10)],
    [Fraction(0), Fraction(0), Fraction(51, 200)],
]


@pytest.mark.parametrize("risks", RISKS)
def test_a_chosen_threshold_keeps_the_promise(risks):
    assert failures(risks, ours) <= Fraction(1) - Fraction(CONFIDENCE)


@pytest.mark.parametrize("mutant", [by_what_was_seen, off_by_one, swapped])
def test_naive_choices_break_it(mutant):
    assert max(failures(risks, mutant) for risks in RISKS) > Fraction(1) - Fraction(CONFIDENCE) + Fraction(1, 100)


def test_the_best_of_several_signals_needs_a_stricter_test():
    """Three signals, each just too risky, on independent events: the best fails too often at the full level."""
    risk, level = Fraction(26, 100), Fraction(1) - Fraction(CONFIDENCE)

    def fails(confidence: float) -> Fraction:
        one = sum(
            (math.comb(N, k) * risk**k * (1 - risk) ** (N - k) for k in range(N + 1) if holds(k, N, LIMIT, confidence)),
            Fraction(0),
        )
        return 1 - (1 - one) ** 3

    assert fails(CONFIDENCE) > level
    assert fails(1 - (1 - CONFIDENCE) / 3) <= level


def test_the_first_that_fails_ends_it():
    points = [Point(0.9, 5, 0), Point(0.8, 9, 9), Point(0.7, 20, 9)]
    assert last_that_holds(points, 100, 0.05, 0.95) == points[0]
    assert last_that_holds(points, 10, 0.05, 0.95) is None
