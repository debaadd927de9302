"""The drift alarm: false alarms by adding up all histories, its speed by simulation; a mutant that looks too often."""

import itertools
import math

import pytest
import torch

from paceline.cascade.audit import DriftAlarm
from paceline.cascade.bound import binomial_cdf
from paceline.errors import ConfigError

LIMIT, FALSE = 0.3, 0.2


def chance_of_alarm(raises, p: float, horizon: int) -> float:
    """P(ever raised within the horizon) where each request differs with probability p, over all histories."""
    total = 0.0
    for history in itertools.product((False, True), repeat=horizon):
        if raises(history):
            ones = sum(history)
            total += p**ones * (1 - p) ** (horizon - ones)
    return total


def ours(history) -> bool:
    alarm = DriftAlarm(LIMIT, FALSE)
    return any([alarm.see(differs) for differs in history])


def peeking(history) -> bool:
    """A test for one look, made after every request."""
    seen = list(itertools.accumulate(history))
    return any(1 - binomial_cdf(k - 1, n, LIMIT) <= FALSE for n, k in enumerate(seen, start=1))


@pytest.mark.parametrize("p", [LIMIT, LIMIT / 2])
def test_false_alarms_by_enumeration(p):
    assert chance_of_alarm(ours, p, 13) <= FALSE


def test_looking_often_with_a_test_for_one_look_is_noticed():
    assert chance_of_alarm(peeking, LIMIT, 13) > FALSE


def test_wealth_is_what_the_bets_are_worth():
    """Against the definition: every start and every rate as a bet of its own."""
    alarm, history = DriftAlarm(0.1, 0.05), [False, True, False, False, True, True]
    rates = [0.15, 0.2, 0.3, 0.5]
    assert len(alarm._factors) == len(rates)
    for t in range(1, len(history) + 1):
        alarm.see(history[t - 1])
        bets = [
            1 / (s * (s + 1)) * math.prod((q / 0.1 if y else (1 - q) / 0.9) for y in history[s - 1 : t])
            for q in rates
            for s in range(1, t + 1)
        ]
        assert alarm.wealth == pytest.approx(sum(bets) / len(rates) + 1 / (t + 1))


def test_the_bets_cannot_be_expected_to_grow():
    """One step, any state: the expected wealth is not larger than before, at p = limit and below."""
    for p in (0.1, 0.05, 0.0):
        before, low, high = DriftAlarm(0.1), DriftAlarm(0.1), DriftAlarm(0.1)
        for y in (True, False, False, True):
            for alarm in (before, low, high):
                alarm.see(y)
        low.see(False)
        high.see(True)
        assert (1 - p) * low.wealth + p * high.wealth <= before.wealth + 1e-12


def runs(p: float, before: int, count: int = 100, length: int = 800) -> list[int | None]:
    """When the alarm came after a change to p, counted in audits; -1 before it."""
    rng, found = torch.Generator().manual_seed(3), list[int | None]()
    for _ in range(count):
        alarm, at = DriftAlarm(0.05, 0.01), None
        draws = torch.rand(before + length, generator=rng).tolist()
        for t, u in enumerate(draws):
            if alarm.see(u < (0.05 if t < before else p)):
                at = t - before if t >= before else -1
                break
        found.append(at)
    return found


def test_it_is_quiet_while_the_promise_holds_and_quick_once_it_does_not():
    quiet = runs(0.05, 0)
    assert sum(at is not None for at in quiet) <= 5  # of 100 runs; 1 expected at the most
    for before in (0, 400):
        late = sorted(length for at in runs(0.25, before, 40, 300) if (length := 999 if at is None else at) >= 0)
        assert late[len(late) // 2] < 80


def test_it_stays_raised_until_reset():
    alarm = DriftAlarm(0.01, 0.05)
    while not alarm.see(True):
        pass
    assert all(alarm.see(False) for _ in range(1000))
    assert alarm.wealth < 20
    alarm.reset()
    assert not alarm.raised
    assert alarm.seen == alarm.differed == 0
    assert alarm.wealth == 1.0


@pytest.mark.parametrize("bad", [(0.0, 0.1), (1.0, 0.1), (0.1, 0.0), (0.1, 1.0)])
def test_refusals(bad):
    with pytest.raises(ConfigError):
        DriftAlarm(*bad)


def test_a_generous_promise_can_still_be_refuted():
    alarm = DriftAlarm(0.9, 0.1)
    assert any([alarm.see(True) for _ in range(200)])
