"""Never losing is easy; the policies must also win: near the best fixed depth that hindsight would have chosen."""

import random
from typing import Any

import pytest

from paceline import CostModel, Dynamic, Fixed
from paceline.policy import cost_model
from paceline.policy.costs import PassCurve, RoundSeconds
from paceline.policy.ledger import Ledger
from paceline.policy.profile import Profile
from tests.policy.growing import Branching, text
from tests.policy.simulator import PLAIN, Machine, Member, Outcome, copying, cpu, model, simulate, speed_of


def const(chance: float):
    return lambda request, position, i: chance


def drafter(chance, token: float, reads: bool = True, confident: bool = False) -> list[Member]:
    return [Member("m", chance, token * PLAIN, token * PLAIN / 20 if reads else 0.0, reads, confident)]


def mean(policy, members, seeds=range(3), **options) -> float:
    return speed_of(simulate(policy, members(), seed=seed, **options) for seed in seeds)


@pytest.mark.parametrize(
    ("chance", "token", "reads", "batch", "best"),  # the best of the depths 1 to 16, looked for once
    [
        (0.9, 0.33, True, 1, 5),
        pytest.param(0.8, 0.1, True, 1, 5, marks=pytest.mark.more),
        pytest.param(0.6, 0.1, True, 1, 3, marks=pytest.mark.more),
        (0.95, 0.005, False, 1, 16),
        pytest.param(0.5, 0.0, False, 1, 3, marks=pytest.mark.more),
        (0.8, 0.1, True, 4, 3),
        pytest.param(0.5, 0.0, False, 4, 1, marks=pytest.mark.more),
    ],
)
def test_near_the_best_fixed_depth(chance, token, reads, batch, best):
    def members() -> list[Member]:
        return drafter(const(chance), token, reads)

    options = {"requests": 8, "batch": batch, "prompt": 60, "seeds": range(2)}
    assert mean(model, members, **options) >= 0.89 * mean(lambda clock: Fixed(best), members, **options)


def test_a_draft_made_at_once_costs_one_step():
    """Parallel heads take as long for one token as for all: a policy that does not know it drafts too little."""

    def members(tells: bool = True) -> list[Member]:
        chance = const(0.75)
        return [Member("m", chance, 0.4 * PLAIN, confident=True, at_once=True, tells=tells)]

    options = {"requests": 8, "prompt": 60, "seeds": range(2)}
    found = mean(model, members, **options)
    assert found >= 0.9 * mean(lambda clock: Fixed(5), members, **options)
    assert found > 1.05 * mean(model, lambda: members(tells=False), **options)


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
    """The model is fair everywhere."""

    def small() -> Member:
        return Member("model", const(0.75), 0.15 * PLAIN, 0.005 * PLAIN, reads=True)

    options = {"requests": 6, "seeds": range(2)}
    alone = [mean(model, lambda m=m: [m()], **options) for m in (copying, small)]
    assert mean(model, lambda: [copying(), small()], **options) > 1.05 * max(alone)


def copies_and_a_head(worth: float, share: float = 0.25) -> list[Member]:
    """Text that repeats in places, long and short prompts, and a head of trees that costs a fifth of a pass a level."""

    def chance(request: int, position: int, salt: int = 0) -> float:
        return random.Random(request * 1000003 + position * 101 + salt).random()

    def repeats(request: int, position: int) -> bool:
        return chance(request, position // 10) < share

    suffix = Member(
        "suffix",
        lambda r, p, i: 0.93 if repeats(r, p) else 0.2,
        0.02 * PLAIN,
        hint=lambda r, p: 2 + p % 7 if repeats(r, p) else -1 if chance(r, p, 1) < 0.4 else 1,
    )
    tree = Branching(text(0.35, 0.45), worth=lambda request, position: worth)
    return [suffix, Member("head", const(0), 0.2 * PLAIN, 0.01 * PLAIN, reads=True, tree=tree)]


def speed_of_copies(worth: float, *which: int) -> float:
    long_and_short = {"prompt": 40, "asks": lambda request: [1] * (700 * (request % 2))}
    return mean(
        model, lambda: [copies_and_a_head(worth)[one] for one in which], range(6), requests=12, tokens=96,
        **long_and_short,
    )  # fmt: skip


def test_a_poor_head_beside_a_good_drafter_costs_little():
    assert speed_of_copies(0.4, 0, 1) > 0.93 * speed_of_copies(0.4, 0)


def test_tried_on_credit_whenever_it_is_due_a_poor_head_costs_more(monkeypatch):
    monkeypatch.setattr(cost_model, "trial_depth", lambda *_: 2)
    monkeypatch.setattr(Ledger, "available", lambda *_: 1e9)
    assert speed_of_copies(0.4, 0, 1) < 0.93 * speed_of_copies(0.4, 0)


def gain_of_both() -> float:
    """Text that repeats in places, and a draft that is good everywhere but takes half of a pass a token: the speed of
    both drafters over that of the better one.
    """

    def speeds(share: float, *which: int) -> float:
        def members() -> list[Member]:
            made = [copies_and_a_head(0.4, share)[0], Member("self", const(0.85), 0.45 * PLAIN)]
            return [made[one] for one in which]

        return mean(model, members, range(8), requests=12, tokens=96)

    return min(speeds(share, 0, 1) / max(speeds(share, 0), speeds(share, 1)) for share in (0.5, 0.7))


def test_a_dear_drafter_does_not_take_the_place_of_a_better_one():
    assert gain_of_both() > 0.95


def test_judged_against_plain_decoding_alone_it_does(monkeypatch):
    real = cost_model.trial_depth

    def judge(option: Any, accept: Any, seconds: Any, _: float, credit: float) -> int:
        return real(option, accept, seconds, 1.0, credit)

    monkeypatch.setattr(cost_model, "trial_depth", judge)
    assert gain_of_both() < 0.95


def speed_of_a_late_bloomer() -> float:
    """Beside a drafter that pays, one that is always wrong in four answers and then nearly always right."""

    def members() -> list[Member]:
        late = Member("late", lambda request, position, i: 0.95 * (request >= 4), 0.1 * PLAIN)
        return [Member("steady", const(0.5), 0.01 * PLAIN), late]

    return mean(model, members, requests=12, tokens=96)


def test_what_was_bad_is_tried_again():
    assert speed_of_a_late_bloomer() > 1.7


def test_without_good_rounds_it_is_not(monkeypatch):
    monkeypatch.setattr(cost_model, "GOOD_ROUNDS", 0.0)
    assert speed_of_a_late_bloomer() < 1.7


def test_what_a_profile_calls_bad_is_tried_again():
    profile = Profile(acceptance={"m": {"": ((0.0,), (64.0,)), "0": ((0.0,), (64.0,))}})
    outcome = simulate(
        lambda clock: CostModel(profile=profile, clock=clock), drafter(const(0.95), 0.1), requests=6, tokens=256
    )
    assert outcome.speed > 1.5


def test_dynamic_follows_acceptance():
    good = simulate(lambda clock: Dynamic(), drafter(const(0.95), 0.05))
    bad = simulate(lambda clock: Dynamic(), drafter(const(0.2), 0.05))
    depth = [sum(r.num_drafted for _, r in o.rounds) / len(o.rounds) for o in (good, bad)]
    assert depth[0] > 6 > 2.5 > depth[1]


def test_each_row_of_a_batch_pays_for_its_own_tree():
    """Two good rows beside six hopeless ones: drafts cost little where passes do not pad the others' trees."""

    def members() -> list[Member]:
        return [Member("m", lambda request, position, i: 0.95 if request % 4 == 0 else 0.05)]

    def speed(policy_of, pads_trees: bool) -> float:
        machine = Machine(cpu, pads_trees=pads_trees)
        return mean(policy_of, members, requests=24, tokens=128, batch=8, machine=machine, seeds=range(2))

    assert speed(model, pads_trees=False) > max(1.03, 1.04 * speed(model, pads_trees=True))
    assert speed(lambda clock: Fixed(2), pads_trees=False) < 0.9, "a budget for all rows does not pay"


def test_rows_are_not_drafted_for_less_than_their_price():
    round_seconds = RoundSeconds(PassCurve({1: 0.01, 16: 0.01, 64: 0.058}), batch=16, pads_trees=False)
    assert round_seconds.price() == pytest.approx(1.6), "16 tokens in 10 ms, 1 ms a row"
    assert round_seconds.of(1) == pytest.approx(0.026), "16 rows more"
    assert RoundSeconds(PassCurve({1: 0.01, 64: 0.1}), batch=16).price() == 0.0
