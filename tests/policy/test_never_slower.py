"""The default policy over 256 tokens with drafters that are never right: at most 3% slower than plain decoding."""

import math

import pytest

from paceline.policy import cost_model
from paceline.policy.ledger import Ledger
from tests.policy.growing import Marginal
from tests.policy.simulator import PLAIN, Machine, Member, cpu, model, simulate

SEEDS = range(2)
LEAST = 0.97


def never(request: int, position: int, i: int) -> float:
    return 0.0


WRONG = {
    "free": lambda: Member("m", never),
    "cheap": lambda: Member("m", never, PLAIN / 100),
    "a third of the target": lambda: Member("m", never, PLAIN / 3),
    "as slow as the target": lambda: Member("m", never, PLAIN),
    "reads fast": lambda: Member("m", never, PLAIN / 3, PLAIN / 100, reads=True),
    "reads slowly": lambda: Member("m", never, PLAIN / 3, PLAIN / 20, reads=True),
    "sure of itself": lambda: Member("m", never, PLAIN / 3, PLAIN / 50, reads=True, confident=True),
    "with a window": lambda: Member("m", never, probes=27),
    "many hints": lambda: Member("m", never, PLAIN / 100, hint=lambda request, position: position % 7),
}


def speeds(member, **options) -> list[float]:
    return [simulate(model, [member()], seed=seed, **options).speed for seed in SEEDS]


@pytest.mark.diagonal
@pytest.mark.parametrize(("prompt", "batch"), [(1, 1), (30, 4), (1000, 1)])
@pytest.mark.parametrize("member", WRONG)
def test_wrong_drafters(member, prompt, batch):
    assert min(speeds(WRONG[member], prompt=prompt, batch=batch, requests=batch)) >= LEAST


@pytest.mark.parametrize("member", WRONG)
def test_wrong_drafters_over_many_requests(member):
    assert min(speeds(WRONG[member], prompt=40, requests=6, tokens=64)) >= LEAST


def steep(n: int) -> float:
    return 0.010 * (0.5 + 0.5 * n)


def flat(n: int) -> float:
    return 0.010


@pytest.mark.diagonal
@pytest.mark.parametrize("curve", [steep, flat])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_other_machines(curve, noise):
    machine = Machine(curve, noise=noise, hiccups=0.05)
    assert min(speeds(WRONG["a third of the target"], machine=machine)) >= LEAST
    assert min(speeds(WRONG["reads fast"], machine=machine, batch=2, requests=2)) >= LEAST


def test_two_wrong_drafters_share_one_credit():
    for seed in SEEDS:
        members = [Member("a", never, PLAIN / 100), Member("b", never, PLAIN / 3, PLAIN / 50, reads=True)]
        assert simulate(model, members, seed=seed, requests=2).speed >= LEAST


def test_a_drafter_that_turns_bad_loses_little():
    """Right in the first answer and wrong in the second: credit from the first must not be lost in the second."""
    for seed in SEEDS:
        member = Member("m", lambda request, position, i: 0.9 * (request == 0), PLAIN / 3)
        outcome = simulate(model, [member], requests=2, seed=seed)
        second = [record for request, record in outcome.rounds if request == 1]
        true = sum(PLAIN / 3 * r.num_drafted + cpu(1 + r.num_drafted) + 0.0005 for r in second)
        assert 256 * (PLAIN + 0.0005) / true >= 0.95
        assert outcome.speed > 1.12


def test_without_the_ledger_it_is_slower(monkeypatch):
    monkeypatch.setattr(Ledger, "available", lambda self, slot: math.inf)
    assert min(speeds(WRONG["reads slowly"], prompt=1000)) < LEAST
    assert min(speeds(WRONG["as slow as the target"], tokens=64, requests=4)) < LEAST


def test_with_a_ledger_that_forgives_it_is_slower(monkeypatch):
    monkeypatch.setattr(cost_model, "CLIP", 0.0)
    assert min(speeds(WRONG["as slow as the target"], tokens=64, requests=4)) < LEAST


def test_short_answers_by_many_requests_cost_no_more():
    for seed in SEEDS:
        member = Member("m", never, PLAIN / 3, PLAIN / 50, reads=True)
        outcome = simulate(model, [member], requests=32, tokens=8, prompt=30, seed=seed)
        assert outcome.speed >= LEAST


@pytest.mark.parametrize(
    ("member", "planned_share"),
    [
        (WRONG["a third of the target"], 0.45),
        (lambda: Member("m", never, 2e-5, tree=Marginal((0.4, 0.3), 4, worth=lambda *_: 0.0), masks=5), 0.8),
    ],
    ids=["chain", "masks"],
)
def test_a_plan_to_draft_nothing_is_not_made_anew_every_round(monkeypatch, member, planned_share):
    """Where a drafter is always wrong, two rounds in three are not planned at all; one in five with masks."""
    planned = list[int]()
    real = cost_model.best_plan
    monkeypatch.setattr(cost_model, "best_plan", lambda *given: planned.append(1) or real(*given))
    outcome = simulate(model, [member()], tokens=600)
    assert len(planned) < planned_share * len(outcome.rounds)
    assert outcome.speed >= LEAST
