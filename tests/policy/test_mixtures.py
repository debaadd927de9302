"""Targets with experts: a node costs the experts that it adds, which are learnt for each drafter."""

import json
import random
from collections import Counter

import pytest

from paceline import CostModel, Fixed
from paceline.core.interfaces import TargetExperts
from paceline.policy import Profile, cost_model
from paceline.policy.costs import PassCurve, RoundSeconds
from paceline.policy.experts import Experts
from tests.policy.growing import Branching
from tests.policy.mixture import Mixture
from tests.policy.simulator import Machine, Member, Outcome, copying, model, simulate, speed_of, taught

MANY, FEW, ALIKE = Mixture(), Mixture(count=8, chosen=2, each=0.0032), Mixture(made_up=0.2)
MIXTURES = pytest.mark.parametrize("mixture", [MANY, FEW], ids=["8 of 128", "2 of 8"])


def other(n: int) -> float:
    """Seconds of a pass beside its experts: a third of a plain one."""
    return 0.003 + 0.0001 * n


def lookup(chance: float, novelty: float, name: str = "lookup") -> Member:
    return Member(name, lambda request, position, i: chance, 0.0002, novelty=novelty)


def copies(novelty: float) -> Member:
    member = copying()
    member.novelty = novelty
    return member


def trees(novelty: float, worth: float = 1.0) -> Member:
    tree = Branching(worth=lambda request, position: worth)
    return Member("heads", lambda request, position, i: 0.0, 0.0005, tree=tree, novelty=novelty)


def machine(mixture: Mixture) -> Machine:
    return Machine(other, pads_trees=False, mixture=mixture)


def run(members, mixture: Mixture = MANY, policy=model, seeds=range(2), **options) -> list[Outcome]:
    options = {"requests": 4, "machine": machine(mixture), **options}
    return [simulate(policy, members(), seed=seed, **options) for seed in seeds]


def mean(*given, **options) -> float:
    return speed_of(run(*given, **options))


def mean_nodes(outcomes: list[Outcome]) -> float:
    nodes = [record.num_nodes for outcome in outcomes for _, record in outcome.rounds if record.num_nodes]
    return sum(nodes) / len(nodes)


@pytest.fixture
def ignoring(monkeypatch):
    """The mutant: a policy that knows of no experts, only of T(n) over made-up rows."""
    monkeypatch.setattr(cost_model, "Experts", lambda *_: None)


WRONG = {
    "of other experts": lambda: lookup(0.0, 1.0),
    "of the same experts": lambda: lookup(0.0, 0.1),
    "trees": lambda: trees(1.0, worth=0.0),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("mixture", [MANY, FEW, ALIKE], ids=["8 of 128", "2 of 8", "measured rows alike"])
@pytest.mark.parametrize(("requests", "batch", "tokens"), [(1, 1, 256), (8, 1, 64), (4, 4, 256)])
@pytest.mark.parametrize("member", WRONG)
def test_wrong_drafts_cost_little(member, requests, batch, tokens, mixture):
    outcomes = run(lambda: [WRONG[member]()], mixture, requests=requests, batch=batch, tokens=tokens)
    assert min(outcome.speed for outcome in outcomes) >= 0.97


def test_drafts_that_do_not_pay_for_their_experts():
    assert mean(lambda: [lookup(0.6, 1.0)], policy=lambda clock: Fixed(2)) < 0.93
    assert min(outcome.speed for outcome in run(lambda: [lookup(0.6, 1.0)])) > 0.97
    assert mean(lambda: [lookup(0.6, 0.2)]) > 1.4, "the same with fewer experts"


@MIXTURES
def test_copying_pays(mixture):
    """Where a third of the text is copied; on a target without experts the speed is 1.5."""
    assert mean(lambda: [copies(0.15)], mixture) > 1.33


def speed_of_a_batch(mixture: Mixture) -> float:
    """Of copies beside the best fixed depth, 16. They share experts, which made-up rows do not."""
    options = {"batch": 4, "requests": 16}
    best = mean(lambda: [lookup(0.97, 0.2)], mixture, lambda clock: Fixed(16), **options)
    return mean(lambda: [lookup(0.97, 0.2)], mixture, **options) / best


@MIXTURES
def test_copies_in_a_batch(mixture):
    assert speed_of_a_batch(mixture) > 0.85


@MIXTURES
def test_ignoring_experts_they_are_drafted_too_short(mixture, ignoring):
    assert speed_of_a_batch(mixture) < 0.85


def share_of_near(mixture: Mixture) -> float:
    """Of the drafted tokens, those of the drafter whose tokens share experts; both are as often right."""
    drafted = Counter[str]()
    for near_first in (True, False):
        both = [(0.15, "near"), (1.0, "far")][:: 1 if near_first else -1]
        for outcome in run(lambda both=both: [lookup(0.8, *one) for one in both], mixture):
            drafted.update({name: sum(r.num_nodes for _, r in outcome.rounds if r.source == name) for _, name in both})
    return drafted["near"] / drafted.total()


@MIXTURES
def test_drafts_whose_experts_coincide_come_first(mixture):
    assert share_of_near(mixture) > 0.9


@MIXTURES
def test_with_one_novelty_for_all_drafters_they_do_not(mixture, monkeypatch):
    monkeypatch.setattr(Experts, "novelty", lambda self, source, real=Experts.novelty: real(self, source and "all"))
    monkeypatch.setattr(
        Experts,
        "learn_read",
        lambda self, read, batch, nodes, real=Experts.learn_read: real(
            self, read, batch, {"all": sum(nodes.values())} if nodes else {}
        ),
    )
    assert share_of_near(mixture) < 0.85


def trees_over_fixed() -> float:
    return mean(lambda: [trees(0.3)], requests=6) / mean(lambda: [trees(0.3)], policy=lambda clock: Fixed(2, 3))


def test_trees_are_cut_by_their_experts():
    plain = Machine(lambda n: other(n) + MANY.each * MANY.chosen, pads_trees=False)
    grown = mean_nodes(run(lambda: [trees(0.3)], machine=plain, seeds=range(1), requests=2))
    assert mean_nodes(run(lambda: [trees(0.3)])) < 0.25 * grown
    assert trees_over_fixed() > 1.0


def test_ignoring_experts_trees_are_slower(ignoring):
    assert trees_over_fixed() < 1.0


# Estimates


def known(each: float = MANY.each) -> tuple[Experts, RoundSeconds]:
    """A mixture as `MANY`, measured at 1 and 16 rows. each: the seconds that its experts are held to take."""
    read = {1: MANY.chosen, 16: round(MANY.plain(16))}
    seconds = {n: other(n) + MANY.each * read[n] for n in read}
    profile = Profile(pass_seconds=seconds, pass_experts=read, expert_seconds=each)
    experts = Experts(TargetExperts(MANY.count, lambda: 0, lambda rows: 0.0), profile)
    return experts, RoundSeconds(PassCurve(seconds, read), 1, pads_trees=False, experts=experts)


def test_what_an_expert_takes_is_measured():
    """From passes over alike rows; where those are like others, rows are held to take nothing else."""
    for alike, most in ((MANY.alike, 1.15), (1.0, 1.25)):
        tried = Mixture(alike=alike)
        policy = taught(
            [lookup(0.9, 0.5)], machine=Machine(other, noise=0.0, hiccups=0.0, mixture=tried, pads_trees=False)
        )
        assert policy.costs.experts is not None
        assert 0.9 < policy.costs.experts._begun / MANY.each < most


def test_a_pass_takes_its_experts():
    experts, seconds = known()
    assert seconds.of_pass(15, experts.read[16]) == pytest.approx(seconds.curve.seconds(16))
    assert seconds.of_pass(7, 20) == pytest.approx(other(8) + MANY.each * 20)
    assert seconds.of(7, 0.5) < seconds.of(7) == pytest.approx(other(8) + MANY.each * MANY.plain(8))
    assert seconds.of(0) == pytest.approx(other(1) + MANY.each * MANY.chosen)


@pytest.mark.parametrize("factor", [3.0, 0.3])
def test_a_wrong_belief_about_experts_is_put_right(factor):
    """Such as that they lie in memory; rounds of as many rows that read more or fewer tell."""
    experts, seconds = known(factor * MANY.each)
    rng = random.Random(0)
    for _ in range(300):
        read = rng.randint(10, 40)
        seconds.observe(5, (other(6) + MANY.each * read) * rng.uniform(0.95, 1.05), read)
    assert abs(experts.seconds / MANY.each - 1) < 0.4 * abs(factor - 1)


def test_novelty_is_learnt_for_each_drafter():
    experts, _ = known()
    assert experts.novelty("near") == 1.0
    assert experts.expected(1, 4, 1.0) == pytest.approx(MANY.plain(5))
    rng = random.Random(0)
    for _ in range(100):
        for name, novelty in (("near", 0.1), ("far", 1.0)):
            experts.learn_read(MANY.read([(range(-1, 4), novelty)], rng), 1, {name: 4})
    assert experts.novelty("near") < 0.2 < 0.9 < experts.novelty("far") < 1.1
    before = experts.novelty("near")
    for _ in range(100):  # each drafts for one of two rows
        trees = [(range(-1, 4), 0.1), (range(-1, 4), 1.0)]
        experts.learn_read(MANY.read(trees, rng), 2, {"near": 4, "far": 4})
    assert experts.novelty("near") == pytest.approx(before, abs=0.06)


def test_roots_of_a_batch_may_share_experts():
    experts, _ = known()
    for _ in range(50):
        experts.learn_read(12, 4, {})
    assert experts.expected(4) == pytest.approx(12, abs=1)
    experts.learn_read(8, 1, {})  # of one row nothing is learnt
    assert experts.expected(4) == pytest.approx(12, abs=1)


def test_profile_carries_experts():
    members = [lookup(0.95, 0.1)]
    profile = taught(members, requests=2, machine=machine(MANY)).profile()
    read = Profile.from_dict(json.loads(json.dumps(profile.to_dict())))
    assert read == profile
    assert profile.pass_experts.keys() == profile.pass_seconds.keys()
    warm = simulate(lambda clock: CostModel(profile=read, clock=clock), members, machine=machine(MANY))
    first = next(record for _, record in warm.rounds if record.num_drafted)
    assert first.num_drafted >= 4  # no cautious beginning


@pytest.mark.parametrize("read", [{}, {1: 8}, {1: 8, 2: 999}], ids=["none", "not all", "too many"])
def test_a_profile_of_another_target_is_measured_anew(read):
    profile = Profile(pass_seconds={1: 1.0, 2: 9.0}, pass_experts=read)
    policy = list[CostModel]()
    simulate(
        lambda clock: policy.append(CostModel(profile=profile, clock=clock)) or policy[0],
        [lookup(0.9, 0.1)],
        machine=machine(MANY),
    )
    assert policy[0].profile().pass_seconds[1] < 0.1
