"""Never losing is easy; the policies must also win: near the best fixed depth that hindsight would have chosen."""

import pytest

from paceline import CostModel, Dynamic, Fixed
from paceline.core.interfaces import DraftPolicy
from tests.policy.simulator import Clock, Machine, Member, Outcome, cpu, simulate

PLAIN = cpu(1)


def model(clock: Clock) -> DraftPolicy:
    return CostModel(clock=clock)


def const(chance: float):
    return lambda request, position, i: chance


def drafter(chance, token: float, reads: bool = True, confident: bool = False) -> list[Member]:
    return [Member("m", chance, token * PLAIN, token * PLAIN / 20 if reads else 0.0, reads, confident)]


def mean(policy, members, seeds=range(3), **options) -> float:
    outcomes = [simulate(policy, members(), seed=seed, **options) for seed in seeds]
    return sum(o.plain for o in outcomes) / sum(o.seconds for o in outcomes)


@pytest.mark.parametrize(
    ("chance", "token", "reads", "batch", "best"),  # the best of the depths 1 to 16, looked for once
    [
        (0.9, 0.33, True, 1, 5),
        (0.8, 0.1, True, 1, 5),
        (0.6, 0.1, True, 1, 3),
        (0.95, 0.005, False, 1, 16),
        (0.5, 0.0, False, 1, 3),
        (0.8, 0.1, True, 4, 3),
        (0.5, 0.0, False, 4, 1),
    ],
)
def test_near_the_best_fixed_depth(chance, token, reads, batch, best):
    def members() -> list[Member]:
        return drafter(const(chance), token, reads)

    options = {"requests": 8, "batch": batch, "prompt": 60, "seeds": range(2)}
    assert mean(model, members, **options) >= 0.9 * mean(lambda clock: Fixed(best), members, **options)


def test_confidence_beats_every_fixed_depth():
    """Easy and hard tokens by turns, and the drafter knows which: stopping early must be worth something.

    Of the depths 1 to 16 the best is 1.
    """

    def members() -> list[Member]:
        return drafter(lambda request, position, i: 0.99 if position // 5 % 2 else 0.3, 0.2, confident=True)

    assert mean(model, members, requests=6) > 1.03 * mean(lambda clock: Fixed(1), members, requests=6)


def share(outcome: Outcome, first: int, last: int) -> float:
    """Rounds per token emitted between two positions of the answer."""
    position, rounds = 0, 0
    for _, record in outcome.rounds:
        rounds += first <= position < last
        position += record.num_emitted
    return rounds / (last - first)


def test_a_change_within_an_answer_is_noticed():
    """Prose, then copied code, told by the hint; and prose, then something easy, told by nothing but acceptance."""
    for seed in range(3):
        by_hint = Member(
            "m", lambda r, p, i: 0.95 if p >= 128 else 0.1, 0.0, hint=lambda r, p: 8 if p >= 128 else 1
        )  # fmt: skip
        assert share(simulate(model, [by_hint], seed=seed), 128, 256) < 0.35
        unannounced = Member("m", lambda r, p, i: 0.95 if p >= 128 else 0.05, 0.1 * PLAIN)
        assert share(simulate(model, [unannounced], seed=seed, tokens=384), 256, 384) < 0.5


def test_good_on_one_request_and_bad_on_the_next():
    for seed in range(3):
        member = Member("m", lambda request, position, i: 0.9 if request % 2 else 0.0, 0.15 * PLAIN)
        outcome = simulate(model, [member], requests=8, seed=seed)
        rounds = [sum(request == wanted for request, _ in outcome.rounds) for wanted in range(8)]
        assert all(count < 128 for count in rounds[1::2]), rounds
        assert outcome.speed > 1.25


def test_hiccups_do_not_switch_off_a_good_drafter():
    calm, rough = (
        mean(model, lambda: drafter(const(0.85), 0.1), requests=4, machine=Machine(cpu, hiccups=h)) for h in (0.0, 0.06)
    )
    assert rough > 0.9 * calm


def test_together_they_beat_each_alone():
    """Lookup is right where it finds a long match, a third of the time; the model is fair everywhere."""

    def copies(request: int, position: int) -> bool:
        return position // 32 % 3 == 1

    def lookup() -> Member:
        return Member(
            "lookup",
            lambda r, p, i: 0.97 if copies(r, p) else 0.15,
            0.005 * PLAIN,
            hint=lambda r, p: 8 if copies(r, p) else p % 3 - 1,
        )

    def small() -> Member:
        return Member("model", const(0.75), 0.15 * PLAIN, 0.005 * PLAIN, reads=True)

    options = {"requests": 8}
    alone = [mean(model, lambda m=m: [m()], **options) for m in (lookup, small)]
    assert mean(model, lambda: [lookup(), small()], **options) > 1.05 * max(alone)


def test_dynamic_follows_acceptance():
    good = simulate(lambda clock: Dynamic(), drafter(const(0.95), 0.05))
    bad = simulate(lambda clock: Dynamic(), drafter(const(0.2), 0.05))
    depth = [sum(r.num_drafted for _, r in o.rounds) / len(o.rounds) for o in (good, bad)]
    assert depth[0] > 6 > 2.5 > depth[1]
