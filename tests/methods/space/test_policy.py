"""SPACE's masks take rows of a pass, and where none hang a round is only an investment: policies know both."""

import dataclasses

import pytest

from paceline import CostModel, Dynamic, Fixed
from paceline.core.draft import Draft
from paceline.core.round import Round
from paceline.core.tree import TokenTree
from paceline.core.walk import Walk
from paceline.engine.loop import make_records
from paceline.policy import cost_model
from tests.policy.growing import Marginal
from tests.policy.simulator import (
    Clock,
    Machine,
    Member,
    Outcome,
    SimDrafter,
    copying,
    cpu,
    model,
    simulate,
    speed_of,
    taught,
)

STANDS = (0.6, 0.58, 0.57, 0.5, 0.5)  # after those before: a token stands with 0.6, 0.35, 0.2, 0.1 and 0.05
MASKS = 5


def nearly_free(n: int) -> float:
    """T(64)/T(1) = 1.16: a GPU."""
    return 0.010 * (1 + 0.0025 * (n - 1)) if n <= 64 else 0.010 * (1.16 + 0.004 * (n - 64))


def dear(n: int) -> float:
    """T(16)/T(1) = 2.5."""
    return 0.010 * (1 + 0.1 * (n - 1))


def space(branches: int = 1, worth=lambda request, position: 1.0) -> Member:
    return Member("space", lambda r, p, i: 0.0, 2e-5, tree=Marginal(STANDS, branches, worth=worth), masks=MASKS)


def speed(policy, members, curve, batch: int = 1, seeds=range(2), requests: int = 3) -> float:
    options = {"requests": requests * batch, "batch": batch, "machine": Machine(curve)}
    return speed_of(simulate(policy, members(), seed=seed, **options) for seed in seeds)


def test_a_record_tells_the_rows_that_were_run():
    """Two rows: one candidate with a mask below it and below the root; a plain row, padded."""
    probes = [[False, False, True, True], [False]]
    tree = TokenTree.from_lists([[7, 8, 100, 100], [7]], [[-1, 0, 0, 1], [-1]], probes=probes)
    walks = [Walk([1], 5, True), Walk([], 5, True)]
    space_row, plain_row = make_records(Draft(tree), walks, [2, 1])
    assert (space_row.num_nodes, space_row.num_rows) == (1, 4)
    assert (plain_row.num_nodes, plain_row.num_rows) == (0, 4)


# The best of all depths 1 to 5 and a few numbers of nodes, looked for once.
BEST = {
    ("gpu", 1, 1): (nearly_free, 5, 15),
    ("gpu", 1, 4): (nearly_free, 5, 35),
    ("gpu", 4, 4): (nearly_free, 5, 23),
    ("cpu", 1, 1): (cpu, 2, 3),
    ("dear", 1, 1): (dear, 2, 3),
}


@pytest.mark.parametrize(("machine", "branches", "batch"), BEST)
def test_near_the_best_fixed_draft(machine, branches, batch):
    curve, depth, nodes = BEST[machine, branches, batch]
    best = speed(lambda clock: Fixed(depth, nodes), lambda: [space(branches)], curve, batch, range(4))
    assert best > 1.2
    assert speed(model, lambda: [space(branches)], curve, batch, range(4)) >= 0.9 * best


def rows_taken(outcome: Outcome) -> list[int]:
    """Of the rounds of the second half that drafted."""
    half = outcome.rounds[len(outcome.rounds) // 2 :]
    return [record.num_rows for _, record in half if record.num_drafted]


def usual_rows(curve) -> float:
    machine, rows = Machine(curve, noise=0.0, hiccups=0.0), list[int]()
    for seed in (1, 2):
        rows += rows_taken(simulate(model, [space()], requests=3, machine=machine, seed=seed))
    return sum(rows) / len(rows)


def test_many_masks_where_rows_are_free_and_few_where_they_are_dear():
    assert usual_rows(dear) < 8  # 4: one mask; 9: two
    assert usual_rows(nearly_free) > 10


def knows_the_seconds() -> bool:
    """Whether the pass over each number of rows is learnt to take what it takes."""
    round_seconds = taught([space()], requests=3, machine=Machine(dear, noise=0.0, hiccups=0.0)).costs.round_seconds(1)
    right = {rows: dear(rows) + 0.0005 for rows in (1, 2, 4, 9)}
    return all(round_seconds.of(rows - 1) == pytest.approx(right[rows], rel=0.1) for rows in right)


def test_the_turn_learns_the_seconds_of_the_rows_that_were_run():
    assert knows_the_seconds()


def test_learning_them_for_the_candidates_is_caught(monkeypatch):
    """Mutant: the rows of a record are not looked at."""
    real = CostModel.observe

    def observe(self, seq, record: Round) -> None:
        real(self, seq, dataclasses.replace(record, num_rows=0))

    monkeypatch.setattr(CostModel, "observe", observe)
    assert not knows_the_seconds()


@pytest.mark.diagonal
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("branches", [1, 4])
@pytest.mark.parametrize("curve", [nearly_free, dear], ids=["gpu", "dear"])
def test_masks_that_predict_nothing_cost_little(curve, branches, batch):
    for seed, others in enumerate(([], [copying(0.0)])):
        members = [*others, space(branches, worth=lambda request, position: 0.0)]
        options = {"requests": batch, "batch": batch, "machine": Machine(curve)}
        assert simulate(model, members, seed=seed, **options).speed >= 0.97


def test_without_the_ledger_useless_masks_cost_more(monkeypatch):
    monkeypatch.setattr(cost_model.Ledger, "available", lambda self, slot: 1e9)
    member = space(4, worth=lambda request, position: 0.0)
    speeds = [simulate(model, [member], machine=Machine(dear), tokens=48, seed=seed).speed for seed in range(3)]
    assert min(speeds) < 0.97


def test_masks_that_become_good_are_found():
    slowest = list[int]()
    for seed in range(3):
        member = space(4, worth=lambda request, position: float(request % 2))
        outcome = simulate(model, [member], requests=6, machine=Machine(nearly_free), seed=seed)
        rounds = [sum(request == wanted for request, _ in outcome.rounds) for wanted in range(6)]
        slowest.append(max(rounds[1::2]))
        assert outcome.speed > 1.2
    assert sum(slowest) / len(slowest) < 160, slowest


@pytest.mark.parametrize("curve", [nearly_free, dear], ids=["gpu", "dear"])
def test_with_lookup_it_is_faster_than_either(curve):
    alone = [speed(model, lambda m=m: [m()], curve, seeds=range(1), requests=6) for m in (space, copying)]
    assert speed(model, lambda: [copying(), space()], curve, seeds=range(1), requests=6) > 1.03 * max(alone)


def test_rows_with_masks_are_measured_before_the_first_answer():
    measured, policy = list[int](), CostModel(clock=Clock())
    policy.bind(SimDrafter([copying(), space()]), lambda rows: measured.append(rows) or nearly_free(rows))
    policy.measure(1000)
    assert {16, 32, 64} <= set(measured)


def test_dynamic_takes_masks():
    outcome = simulate(lambda clock: Dynamic(3), [space()], requests=3, machine=Machine(nearly_free))
    assert outcome.speed > 1.4
