"""What is learnt of trees: replay of smaller budgets, and what the confidence along a path is worth."""

import json
import random
import time
from statistics import median

import pytest
from paceline.policy.tree_gains import DEPTHS, NODES, TreeGains, path_products
from paceline.policy.tree_odds import HIGHEST, PathOdds

from paceline import CostModel, Fixed
from paceline.core.interfaces import DraftBudget
from paceline.core.outputs import Round
from paceline.errors import ConfigError
from paceline.policy import Profile
from paceline.policy import tree_gains as module
from paceline.policy.estimates import TREE_ROWS
from tests.policy.growing import Branching, DraftTree, flat, over_confident, stairs
from tests.policy.simulator import Clock, Machine, Member, simulate

pytestmark = pytest.mark.usefixtures("unchecked_types")


def record_of(grown: DraftTree) -> Round:
    path, told = tuple(grown.path), tuple(grown.confidences)
    return Round("m", grown.depth, len(path), len(path) + 1, parents=tuple(grown.parents), path=path, confidences=told)


def observe(gains: TreeGains, record: Round, depth: int, nodes: int) -> None:
    gains.observe(record, path_products(record), depth, nodes, record.num_drafted)


EXAMPLE = Round("m", 2, 2, 3, parents=(-1, 0, 0, 1, 1, 2), path=(2, 5), confidences=(0.6, 0.25, 0.5, 0.2, 0.3))
"""The tree in `tree_gains`: a .6, b .25, aa .5, ab .2 and ba .3; b and ba were accepted."""


def test_one_round_replayed_by_hand():
    gains = TreeGains()
    observe(gains, EXAMPLE, 2, 5)
    tries, gain, kept, levels = (dict(zip(CELLS, column, strict=True)) for column in gains.sums())
    assert [gain[2, n] for n in (2, 3, 5)] == [0, 1, 2]
    assert [gain[1, n] for n in (1, 2, 3)] == [0, 1, 1]
    assert [kept[1, n] for n in (1, 2, 3, 5)] == [1, 2, 2, 2]
    assert [levels[2, 5], levels[1, 5]] == [2, 1]
    assert [tries[2, 5], tries[2, 7], tries[3, 5]] == [1, 0, 0]  # nothing is known of larger budgets


CELLS = [(depth, nodes) for depth in DEPTHS for nodes in NODES]


def replay_agrees(rounds: int = 60) -> bool:
    """Whether the replay of a large tree gives what the drafter gives with a small budget and the same luck."""
    for seed in range(rounds):
        large = Branching(width=3).grow(DraftBudget(4, 23), 4, 0, 0, random.Random(seed))
        gains = TreeGains()
        observe(gains, record_of(large), 4, 23)
        gain = dict(zip(CELLS, gains.sums()[1], strict=True))
        record, products = record_of(large), path_products(record_of(large))
        depths = module.depths_of(record)
        for depth, nodes in ((1, 2), (2, 5), (3, 7), (4, 15)):
            fit = [node for node in range(1, len(products)) if depths[node] <= depth]
            best = sorted(fit, key=lambda node: (-products[node], depths[node], node))[:nodes]
            assert all(record.parents[node] in (0, *best) for node in best)  # closed under parents
            stood = 0
            while stood < len(record.path) and record.path[stood] in best:
                stood += 1
            if gain[depth, nodes] != stood:
                return False
    return True


def test_replay():
    assert replay_agrees()


def test_replay_by_the_order_of_drafting_is_caught(monkeypatch):
    """Mutant: nodes ranked as they came and not by their path."""
    real = TreeGains.observe
    monkeypatch.setattr(
        TreeGains, "observe", lambda self, record, products, *rest: real(self, record, [1.0] * len(products), *rest)
    )
    assert not replay_agrees()


def test_untried_sizes_follow_those_that_were_tried():
    good, bad, fresh = TreeGains(), TreeGains(), TreeGains()
    chain = Round("m", 3, 3, 4, parents=(-1, 0, 1, 2), path=(1, 2, 3), confidences=(0.9, 0.9, 0.9))
    for _ in range(20):
        observe(good, chain, 3, 3)
        observe(bad, Round("m", 3, 0, 1, parents=(-1, 0, 1, 2), confidences=(0.9, 0.9, 0.9)), 3, 3)
    usual = [0.0] + [0.7 * (1 - 0.7**d) / 0.3 for d in range(1, 17)]
    at = DEPTHS.index(4), NODES.index(15)
    values = [gains.row(at[0], usual)[at[1]][0] for gains in (good, fresh, bad)]
    assert 3.8 > values[0] > values[1] > 1.5 > 0.5 > values[2]
    for gains in (good, fresh, bad):
        for place in range(len(DEPTHS)):
            expected = [cell[0] for cell in gains.row(place, usual)]
            assert expected == sorted(expected)  # more nodes never bring less


def learnt(told, worth: float, rounds: int = 300) -> PathOdds:
    tree, rng, odds = Branching(told=told, worth=lambda r, p: worth), random.Random(0), PathOdds()
    for _ in range(rounds):
        grown = tree.grow(DraftBudget(4, 31), 4, 0, 0, rng)
        products = path_products(record_of(grown))
        odds.fade()
        for node in range(1, len(products)):
            odds.add(products[node], node in grown.path)
    return odds


def test_odds_of_paths():
    calibrated, over, wrong = learnt(list, 1.0), learnt(over_confident, 1.0), learnt(list, 0.0)
    assert all(0.7 * p < calibrated.chance(p) < 1.4 * p for p in (0.05, 0.1, 0.2, 0.5, 0.8))
    assert over.chance(0.2) < 0.1
    assert wrong.chance(0.9) < 0.1
    assert 0.035 < calibrated.min_prob(0.05) < 0.08 < over.min_prob(0.05)
    assert wrong.min_prob(0.05) == HIGHEST  # never nothing at all
    assert PathOdds().min_prob(0.04) == pytest.approx(0.04)
    assert PathOdds().min_prob(0.0) == 0.0


def test_profile_carries_trees_and_old_files_load():
    made = list[CostModel]()

    def keep(clock: Clock) -> CostModel:
        made.append(CostModel(clock=clock))
        return made[-1]

    member = Member("m", lambda r, p, i: 0.0, 0.001, tree=Branching())
    simulate(keep, [member], requests=2, machine=Machine(stairs(flat, 1)))
    profile = made[0].profile("x", "bfloat16", 2)
    told = profile.to_dict()
    read = Profile.from_dict(json.loads(json.dumps(told)))
    assert read == profile
    assert set(read.trees) == {"m"}
    assert max(read.pass_seconds) == TREE_ROWS[2]
    warm = simulate(lambda clock: CostModel(profile=read, clock=clock), [member], machine=Machine(stairs(flat, 1)))
    first, second = [record for _, record in warm.rounds if record.num_drafted][:2]
    assert first.num_nodes == 1  # until a tree was seen to take what was measured
    assert second.num_nodes > second.num_drafted
    del told["trees"]
    assert Profile.from_dict(json.loads(json.dumps(told))).trees == {}


@pytest.mark.parametrize(
    "trees",
    [3, {"m": {}}, {"m": {"gains": [[1.0]] * 4, "paths": [[0.0] * 11] * 2, "ahead": [[0.0] * 11] * 2}},
     {"m": {"gains": [[-1.0] * 110] * 4, "paths": [[0.0] * 11] * 2, "ahead": [[0.0] * 11] * 2}}],
    ids=["number", "empty", "short", "negative"],
)  # fmt: skip
def test_broken_trees_are_refused(trees):
    with pytest.raises(ConfigError):
        Profile.from_dict({"version": 1, "trees": trees})


def test_sizes_out_of_range():
    for make in (lambda: CostModel(max_nodes=0), lambda: CostModel(max_nodes=64), lambda: Fixed(3, -1)):
        with pytest.raises(ConfigError):
            make()


def test_planning_trees_is_cheap():
    """Batch 1, all of a round; on a quiet machine below 300 microseconds."""
    seconds = list[float]()

    class Timed(CostModel.__mro__[1]):  # CostModel is final, so it is wrapped
        def __init__(self, clock: Clock):
            self.inner = CostModel(clock=clock)

        def bind(self, drafter, pass_seconds):
            self.inner.bind(drafter, pass_seconds)

        def budgets(self, seqs):
            begin = time.perf_counter()
            made = self.inner.budgets(seqs)
            seconds.append(time.perf_counter() - begin)
            return made

        def observe(self, seq, record):
            begin = time.perf_counter()
            self.inner.observe(seq, record)
            seconds[-1] += time.perf_counter() - begin

    simulate(Timed, [Member("m", lambda r, p, i: 0.0, 0.0005, tree=Branching())], machine=Machine(stairs(flat, 8)))
    print(f"{1e6 * median(seconds):.0f} microseconds")
    assert median(seconds) < 1500e-6
