"""What is learnt of trees: what the confidence along a path is worth, and what a profile keeps of it."""

import json
import random
import time
from statistics import median

import pytest

from paceline import CostModel
from paceline.core.interfaces import DraftBudget
from paceline.core.round import Round
from paceline.policy import Profile
from paceline.policy.constants import TREE_ROWS
from paceline.policy.odds import PathOdds, path_products
from tests.policy.growing import Branching, DraftTree, flat, over_confident, stairs
from tests.policy.simulator import Clock, Machine, Member, simulate, taught


def record_of(grown: DraftTree) -> Round:
    path, confidences = tuple(grown.path), tuple(grown.confidences)
    return Round(
        "m", grown.depth, len(path), len(path) + 1, parents=tuple(grown.parents), path=path, confidences=confidences
    )


def test_products_of_confidences():
    """A .6, b .25, aa .5, ab .2 and ba .3."""
    tree = Round("m", 2, 2, 3, parents=(-1, 0, 0, 1, 1, 2), path=(2, 5), confidences=(0.6, 0.25, 0.5, 0.2, 0.3))
    assert path_products(tree) == pytest.approx([1, 0.6, 0.25, 0.3, 0.12, 0.075])
    assert path_products(Round("m", 1, 0, 1, parents=(-1, 0))) == [1, 1]


def learnt(told, worth: float, rounds: int = 300) -> PathOdds:
    tree, rng, odds = Branching(confidences=told, worth=lambda r, p: worth), random.Random(0), PathOdds()
    for _ in range(rounds):
        grown = tree.grow(DraftBudget(4, 31), 4, 0, 0, rng)
        products = path_products(record_of(grown))
        odds.observe(products[1:], [node in grown.path for node in range(1, len(products))])
    return odds


def test_odds_of_paths():
    calibrated, over, wrong = learnt(list, 1.0), learnt(over_confident, 1.0), learnt(list, 0.0)
    assert all(0.7 * p < calibrated.chance(p) < 1.4 * p for p in (0.05, 0.1, 0.2, 0.5, 0.8))
    assert over.chance(0.2) < 0.1
    assert wrong.chance(0.9) < 0.1
    assert 0.035 < calibrated.min_prob(0.05) < 0.08 < over.min_prob(0.05)
    assert wrong.min_prob(0.05) > 0.3
    assert PathOdds().min_prob(0.04) == pytest.approx(0.04)
    assert PathOdds().min_prob(0.0) == 0.0


def test_profile_carries_trees():
    member = Member("m", lambda r, p, i: 0.0, 0.001, tree=Branching())
    profile = taught([member], requests=2, machine=Machine(stairs(flat, 1))).profile("x", "bfloat16", 2)
    told = profile.to_dict()
    read = Profile.from_dict(json.loads(json.dumps(told)))
    assert read == profile
    assert set(read.nodes) == set(read.confidence) == {"m"}
    assert max(read.pass_seconds) == TREE_ROWS[2]
    warm = simulate(lambda clock: CostModel(profile=read, clock=clock), [member], machine=Machine(stairs(flat, 1)))
    first = next(record for _, record in warm.rounds if record.num_drafted)
    assert first.num_nodes > first.num_drafted


def test_planning_trees_is_cheap():
    """Batch 1, all of a round; on a quiet machine below 300 microseconds."""
    seconds = list[float]()

    class Timed(CostModel.__mro__[1]):  # CostModel is final, so it is wrapped
        def __init__(self, clock: Clock):
            self.inner = CostModel(clock=clock)

        def bind(self, drafter, pass_seconds, pads_trees=True, experts=None):
            self.inner.bind(drafter, pass_seconds, pads_trees, experts)

        def budgets(self, seqs):
            begin = time.thread_time()
            made = self.inner.budgets(seqs)
            seconds.append(time.thread_time() - begin)
            return made

        def observe(self, seq, record):
            begin = time.thread_time()
            self.inner.observe(seq, record)
            seconds[-1] += time.thread_time() - begin

    simulate(Timed, [Member("m", lambda r, p, i: 0.0, 0.0005, tree=Branching())], machine=Machine(stairs(flat, 8)))
    print(f"{1e6 * median(seconds):.0f} microseconds")
    assert median(seconds) < 1500e-6
