"""Passes over drafts that take longer than was measured: paid for soon, and one hiccup of the clock is forgiven."""

import pytest

from paceline.policy.costs import RoundSeconds
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


def wrong(member, hidden: float) -> float:
    """The slowest of some seeds where passes over rows to verify take `hidden` times what was measured."""
    machine = Machine(cpu, hidden=hidden)
    return min(simulate(model, [member(never)], machine=machine, seed=seed).speed for seed in range(3))


# Each hidden pass costs `hidden` plain ones or more, and it takes two to tell it from a hiccup.
@pytest.mark.parametrize(("hidden", "least"), [(6, 0.9), (3, 0.95)])
@DRAFTERS
def test_wrong_trees_that_take_longer_than_measured(member, hidden, least):
    assert wrong(member, hidden) >= least


def test_learning_nothing_of_them_is_caught(monkeypatch):
    """The mutant goes by what was measured."""
    monkeypatch.setattr(RoundSeconds, "observe", lambda self, nodes, seconds, read: setattr(self, "num_plain", 9))
    assert wrong(heads, 6) < 0.9


@DRAFTERS
def test_one_hiccup_does_not_switch_a_drafter_off(member):
    """The slowest after one hiccup in one of the first trees, over none."""
    rounds = (5, 6, 7, 9)
    speeds = [simulate(model, [member()], machine=Machine(cpu, hiccups=0.0, late=at)).speed for at in (-1, *rounds)]
    assert min(speeds[1:]) > 0.85 * speeds[0]
