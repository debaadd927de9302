"""Trees: never slower than plain decoding, and near the best depth and size that hindsight would have chosen."""

import statistics

import pytest

from paceline import Dynamic, Fixed
from paceline.policy import cost_model
from paceline.policy.odds import PathOdds
from tests.policy.growing import Branching, flat, over_confident, stairs, steep, text
from tests.policy.simulator import PLAIN, Machine, Member, model, simulate, speed_of

CURVES = {
    "flat": stairs(flat, 1),
    "steps of 4": stairs(flat, 4),
    "steps of 8": stairs(flat, 8),
    "steep": stairs(steep, 1),
}


def drafter(tree: Branching, level: float) -> list[Member]:
    """level: of a plain pass."""
    return [Member("m", lambda r, p, i: 0.0, level * PLAIN, level * PLAIN / 100, reads=True, tree=tree)]


def mean(policy, tree: Branching, level: float, curve, seeds=range(2), requests: int = 3, batch: int = 1) -> float:
    options = {"requests": requests * batch, "batch": batch, "machine": Machine(curve), "prompt": 60}
    return speed_of(simulate(policy, drafter(tree, level), seed=seed, **options) for seed in seeds)


# The best of all depths 1 to 8 and nodes 1 to 63, looked for once: (depth, nodes).
BEST = {("calibrated", "flat", 0.1): (3, 11), ("calibrated", "steep", 0.1): (2, 3)}
TREES = {"calibrated": Branching(), "sure of itself": Branching(text(0.2, 0.5), over_confident)}


@pytest.mark.parametrize(("tree", "curve", "level"), BEST)
def test_near_the_best_fixed_tree(tree, curve, level):
    best = mean(lambda clock: Fixed(*BEST[tree, curve, level]), TREES[tree], level, CURVES[curve])
    assert best > 1.3
    assert mean(model, TREES[tree], level, CURVES[curve]) >= 0.92 * best


WRONG = {
    "honest": Branching(worth=lambda request, position: 0.0),
    "sure of itself": Branching(confidences=over_confident, worth=lambda request, position: 0.0),
    "nearly always sure": Branching(text(1.0, 0.0), worth=lambda request, position: 0.0),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("level", [0.01, 1.0])
@pytest.mark.parametrize("tree", WRONG)
def test_wrong_trees_cost_little(tree, level, curve):
    for seed, batch in enumerate((1, 3)):
        options = {"machine": Machine(CURVES[curve]), "requests": batch, "batch": batch, "seed": seed}
        assert simulate(model, drafter(WRONG[tree], level), **options).speed >= 0.97


def test_without_the_ledger_wrong_trees_cost_more(monkeypatch):
    monkeypatch.setattr(cost_model.Ledger, "available", lambda self, slot: 1e9)
    tree = Branching(text(1.0, 0.0), worth=lambda request, position: 0.0)
    outcome = simulate(model, drafter(tree, 0.5), machine=Machine(CURVES["steps of 8"]), tokens=64)
    assert outcome.speed < 0.97


def test_good_in_one_answer_and_wrong_in_the_next():
    tree = Branching(worth=lambda request, position: 1.0 if request % 2 else 0.0)
    outcomes = [
        simulate(model, drafter(tree, 0.1), requests=6, machine=Machine(CURVES["flat"]), seed=seed) for seed in range(3)
    ]
    rounds = [sum(request == wanted for request, _ in o.rounds) for o in outcomes for wanted in (1, 3, 5)]
    assert statistics.median(rounds) < 150, rounds  # of 256; in one of ten runs the first good answer is missed
    assert statistics.mean(o.speed for o in outcomes) > 1.18


def test_confidence_prunes(monkeypatch):
    """Mutant: without `min_prob` trees are padded with nodes that do not pay."""
    pruned = mean(model, TREES["calibrated"], 0.02, CURVES["steep"])
    monkeypatch.setattr(PathOdds, "min_prob", lambda self, chance: 0.0)
    assert pruned > 1.02 * mean(model, TREES["calibrated"], 0.02, CURVES["steep"])


def test_trees_beat_chains_of_the_same_drafter():
    tree, chain = (Branching(text(0.2, 0.6), width=width) for width in (8, 1))
    assert mean(model, tree, 0.1, CURVES["flat"]) > 1.05 * mean(model, chain, 0.1, CURVES["flat"])


def test_a_batch_shares_its_passes():
    seen = TREES["calibrated"], 0.05, CURVES["flat"], range(4), 2, 3
    assert mean(model, *seen) >= 0.88 * mean(lambda clock: Fixed(3, 7), *seen)


def test_dynamic_takes_trees():
    member = drafter(Branching(), 0.02)
    outcome = simulate(lambda clock: Dynamic(num_nodes=11), member, requests=3, machine=Machine(CURVES["flat"]))
    assert outcome.speed > 1.3
    assert max(record.num_nodes for _, record in outcome.rounds) == 11
