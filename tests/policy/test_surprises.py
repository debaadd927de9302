"""Trees that take longer than was measured are paid for at once; one hiccup of the clock is forgiven."""

import pytest

from paceline.policy import cost_model
from paceline.policy.seconds import PassCurve, RoundSeconds
from tests.policy.growing import Branching, Marginal
from tests.policy.simulator import Machine, Member, cpu, model, simulate


def never(request: int, position: int) -> float:
    return 0.0


def always(request: int, position: int) -> float:
    return 1.0


def heads(worth=always) -> Member:
    return Member("m", lambda r, p, i: 0.0, 1e-4, tree=Branching(worth=worth))


def space(worth=always) -> Member:
    return Member("m", lambda r, p, i: 0.0, 2e-5, tree=Marginal((0.6, 0.58, 0.57), 4, worth=worth), masks=5)


DRAFTERS = pytest.mark.parametrize("member", [heads, space])


def wrong(member, hidden: float, tokens: int) -> float:
    """The slowest of some seeds where passes over rows to verify take `hidden` times what was measured."""
    machine = Machine(cpu, hidden=hidden)
    return min(simulate(model, [member(never)], tokens=tokens, machine=machine, seed=seed).speed for seed in range(3))


# Each hidden pass costs `hidden` plain ones or more, and it takes two to tell it from a hiccup.
@pytest.mark.parametrize(("hidden", "tokens", "least"), [(6, 64, 0.84), (6, 256, 0.95), (3, 64, 0.89), (3, 256, 0.965)])
@DRAFTERS
def test_wrong_trees_that_take_longer_than_measured(member, hidden, tokens, least):
    assert wrong(member, hidden, tokens) >= least


@DRAFTERS
def test_forgiving_every_surprise_is_caught(member, monkeypatch):
    monkeypatch.setattr(RoundSeconds, "is_slow_again", lambda *_: False)
    monkeypatch.setattr(RoundSeconds, "needs_small_tree", False)
    assert wrong(member, 6, 64) < 0.8


def after_a_hiccup(member) -> float:
    """The slowest after one hiccup in one of the first trees, over none."""
    rounds = (5, 6, 7, 9)
    speeds = [simulate(model, [member()], machine=Machine(cpu, hiccups=0.0, late=at)).speed for at in (-1, *rounds)]
    return min(speeds[1:]) / speeds[0]


@DRAFTERS
def test_one_hiccup_does_not_switch_a_drafter_off(member):
    assert after_a_hiccup(member) > 0.85


def test_booking_every_surprise_is_caught(monkeypatch):
    monkeypatch.setattr(RoundSeconds, "is_slow_again", lambda self, nodes, seconds: self.is_new(nodes))
    monkeypatch.setattr(cost_model, "SLOW_AGAIN", 100.0)
    assert after_a_hiccup(space) < 0.8


def round_seconds() -> RoundSeconds:
    return RoundSeconds(PassCurve({1: 1.0, 64: 1.0}), 1)


def test_the_second_slow_round_in_a_row_counts():
    one = round_seconds()
    assert not one.is_slow_again(20, 6.0)
    assert one.is_slow_again(3, 5.0)  # of whatever new size
    assert not one.is_slow_again(3, 1.0)
    assert not one.is_slow_again(3, 9.0)


def test_a_known_size_is_never_doubted():
    one = round_seconds()
    for _ in range(3):
        one.observe(3, 1.0)
    assert not any(one.is_slow_again(3, 9.0) for _ in range(3))


@pytest.mark.parametrize(("seconds", "small"), [(1.0, False), (9.0, True)])
def test_the_first_tree_is_small_and_so_is_the_next_after_a_slow_one(seconds, small):
    one = round_seconds()
    assert one.needs_small_tree
    one.is_slow_again(1, seconds)
    one.observe(1, seconds)
    assert one.needs_small_tree == small
    one.observe(1, seconds)
    assert not one.needs_small_tree
