"""Trees that take longer than was measured are paid for at once; one hiccup of the clock is forgiven."""

import pytest
from paceline.policy.costs import PassCurve, TurnSeconds

from paceline import CostModel
from paceline.core.interfaces import DraftPolicy
from tests.policy.growing import Branching, Foreseen
from tests.policy.simulator import Clock, Machine, Member, cpu, simulate

pytestmark = pytest.mark.usefixtures("unchecked_types")  # thousands of rounds


def model(clock: Clock) -> DraftPolicy:
    return CostModel(clock=clock)


def never(request: int, position: int) -> float:
    return 0.0


def always(request: int, position: int) -> float:
    return 1.0


def heads(worth=always) -> Member:
    return Member("m", lambda r, p, i: 0.0, 1e-4, tree=Branching(worth=worth))


def space(worth=always) -> Member:
    return Member("m", lambda r, p, i: 0.0, 2e-5, tree=Foreseen((0.6, 0.58, 0.57), 4, worth=worth), masks=5)


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


def forgive(self, nodes: int, seconds: float, most: float) -> float:
    return min(seconds, most)


def book_all(self, nodes: int, seconds: float, most: float) -> float:
    return min(seconds, most) if self.knows_tree(nodes) else seconds


@DRAFTERS
def test_forgiving_every_surprise_is_caught(member, monkeypatch):
    monkeypatch.setattr(TurnSeconds, "believed", forgive)
    monkeypatch.setattr(TurnSeconds, "tries_trees", False)
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
    monkeypatch.setattr(TurnSeconds, "believed", book_all)
    assert after_a_hiccup(space) < 0.8


def turn() -> TurnSeconds:
    return TurnSeconds(PassCurve({1: 1.0, 64: 1.0}), 1)


def test_the_second_surprise_pays_for_the_first():
    one = turn()
    assert one.believed(20, 6.0, 2.0) == 2.0
    assert one.believed(3, 5.0, 2.0) == 5.0 + 3.0  # the very next tree, of whatever size
    same = turn()
    assert same.believed(20, 20.0, 2.0) == 2.0
    assert same.believed(3, 1.0, 2.0) == 1.0
    assert same.believed(3, 9.0, 2.0) == 2.0  # another size, another hiccup
    assert same.believed(3, 1.0, 2.0) == 1.0
    assert same.believed(20, 6.0, 2.0) == 6.0 + 4.0


def test_a_known_size_costs_no_more_than_a_hiccup_may():
    one = turn()
    for _ in range(3):
        one.observe(3, 1.0, tree=True)
    assert [one.believed(3, 9.0, 1.6) for _ in range(3)] == [1.6] * 3
    assert one.believed(3, 1.0, 1.6) == 1.0


@pytest.mark.parametrize(("seconds", "small"), [(1.0, False), (9.0, True)])
def test_the_first_tree_is_small_and_so_is_the_next_after_a_surprise(seconds, small):
    one = turn()
    assert one.tries_trees
    one.believed(1, seconds, 2.0)
    one.observe(1, seconds, tree=True)
    assert one.tries_trees == small
    one.observe(1, seconds, tree=True)
    assert not one.tries_trees
