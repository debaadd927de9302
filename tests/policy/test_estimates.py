"""What the policies know and how they come to know it."""

import dataclasses
import json
import random

import pytest

from paceline import Choose, CostModel, Dynamic, Fixed, Plain, PromptLookup, SamplingParams
from paceline.core.interfaces import DraftOptions
from paceline.core.round import Round
from paceline.errors import ConfigError
from paceline.policy import Profile
from paceline.policy.constants import ALLOWANCE, INITIAL, LONGEST, MOST, TREE_SIZES
from paceline.policy.costs import Costs, DraftSeconds, PassCurve, RobustMean, RoundSeconds
from paceline.policy.ledger import Ledger
from paceline.policy.odds import Counts, Odds
from paceline.policy.plan import Option, best_plan, node_seconds
from paceline.policy.profile import VERSION
from paceline.policy.trials import Trials
from tests.helpers import REPEATING, assert_identical, loaded, runner, sequence
from tests.policy.simulator import Machine, Member, SimDrafter, cpu, simulate, taught

CHANCES = (0.9, 0.5, 0.8)


def chain(accepted: int, drafted: int, confidences: tuple[float, ...] = (), hint: int = 0) -> Round:
    return Round(
        "m",
        drafted,
        accepted,
        accepted + 1,
        parents=tuple(range(-1, drafted)),
        path=tuple(range(1, accepted + 1)),
        confidences=confidences,
        hint=hint,
    )


def see(odds: Odds, slot: int, record: Round, depth: int, is_over: bool = False) -> None:
    odds.nodes_per_level("m", False)
    odds.observe(slot, record, depth, record.num_drafted, [], is_over)


def learnt(rounds: int = 400) -> list[float]:
    rng, odds = random.Random(0), Odds(4, Profile())
    for _ in range(rounds):
        accepted = next((i for i, chance in enumerate(CHANCES) if rng.random() >= chance), 3)
        see(odds, 0, chain(accepted, 3), 3)
    return odds.expected(1, "m", 0)[:3]  # another request: what all have shown


def is_right(estimate: list[float]) -> bool:
    return all(abs(a - b) < 0.13 for a, b in zip(estimate, CHANCES, strict=True))


def reading_learnt(believed: float, drafts: list[tuple[int, int]]) -> float:
    """Seconds a read token, true 0.001, of a draft model whose tokens take 0.02 (held to be 0.024); (depth, read)."""
    known = Costs(Profile(pass_seconds={1: 0.1, 2: 0.1}, draft_seconds={"m": (0.024, believed)}), pads_trees=True)
    for depth, read in drafts:
        known.learn_drafting({"m": depth}, {"m": read}, 1, 0.02 * depth + 0.001 * read)
    return known.draft("m").uncached_token.value


def test_long_texts_have_estimates_of_their_own():
    """A pass over long texts takes three times as long, and nodes take more of it: neither is learnt of short ones."""
    costs = Costs(Profile(pass_seconds={1: 0.01, 9: 0.02}), pads_trees=False)
    for _ in range(60):
        for length, plain, drafted in ((10, 0.01, 0.02), (900, 0.01, 0.02), (8000, 0.03, 0.09), (5000, 0.03, 0.09)):
            costs.round_seconds(1, length).observe(0, plain)
            costs.round_seconds(1, length).observe(8, drafted)
    for length, plain, drafted in ((500, 0.01, 0.02), (6000, 0.03, 0.09)):
        learnt = costs.round_seconds(1, length)
        assert (learnt.of(0), learnt.of(8)) == pytest.approx((plain, drafted), rel=0.1)
    assert costs.round_seconds(1, 20000).of(0) == pytest.approx(0.03, rel=0.1)  # until it is known


SHALLOW, DEEP, LONG = (1, 80), (16, 80), (8, 2000)


def test_errors_about_tokens_are_not_errors_about_reading():
    """The mutant, to take every draft's rest for reading, forgets it: behind 16 tokens nothing seems to be left."""
    assert reading_learnt(0.001, [DEEP] * 40) == 0.001
    assert reading_learnt(0.001, [SHALLOW, DEEP] * 20) == pytest.approx(0.00095, rel=0.03)


def test_a_wrong_belief_about_reading_is_put_right():
    """From ten times too low where reading is most of what is seen, from ten times too high where it is held to be."""
    assert reading_learnt(0.0001, [LONG] * 60) == pytest.approx(0.00098, rel=0.03)
    assert reading_learnt(0.01, [SHALLOW] * 60) == pytest.approx(0.00095, rel=0.03)
    assert 0.0005 < reading_learnt(0.01, [DEEP] * 60) < 0.005


def test_acceptance_is_conditional_on_the_walk():
    assert is_right(learnt())


def test_learning_from_unvisited_nodes_is_caught(monkeypatch):
    """Mutant: whatever was drafted behind a rejected token counts as rejected too."""
    real = Counts.add

    def add(self, accepted, rejected):
        real(self, accepted, rejected)
        while len(self.tries) < 3:
            self.hits.append(0.0)
            self.tries.append(0.0)
        for i in range(accepted + 1, 3):
            self.tries[i] += 1

    monkeypatch.setattr(Counts, "add", add)
    assert not is_right(learnt())


def test_a_request_is_judged_by_its_own_rounds_soon():
    odds = Odds(4, Profile())
    for _ in range(100):
        see(odds, 0, chain(0, 4), 4)
    assert odds.expected(1, "m", 0)[0] < 0.1
    for _ in range(16):
        see(odds, 1, chain(4, 4), 4)
    assert min(odds.expected(1, "m", 0)) > 0.5
    before = odds.expected(2, "m", 0)
    odds.release(1)
    assert odds.expected(1, "m", 0) == before, "nothing of a released slot is left"
    assert odds.expected(2, "other", 0) == [0.7] * 4


def test_good_rounds_to_come_make_hopeful():
    odds = Odds(2, Profile())
    for _ in range(30):
        see(odds, 0, chain(0, 2), 2)
    known, hopeful, certain = (odds.expected(1, "m", 0, good)[0] for good in (0.0, 3.0, 1e9))
    assert known < 0.1 < 0.4 < hopeful < 0.7 < certain


def test_hints_are_told_apart_and_new_ones_start_from_the_rest():
    odds = Odds(2, Profile())
    for _ in range(40):
        see(odds, 0, chain(0, 2, hint=1), 2)
        see(odds, 0, chain(2, 2, hint=8), 2)
    low, high, new = (odds.expected(1, "m", hint)[0] for hint in (1, 8, 4))
    assert low < 0.15 < 0.4 < new < 0.6 < 0.85 < high


def test_a_draft_that_ended_early_counts_as_a_miss_of_its_budget():
    """A budget of 4 of which the drafter took 2, both accepted: a third token was wanted and not there."""
    odds = Odds(4, Profile())
    see(odds, 0, chain(2, 2), 4)
    counts = odds.counts["m"][""]
    assert (counts.hits, counts.tries) == ([1, 1, 0], [1, 1, 1])


def test_tokens_behind_the_end_of_the_answer_are_misses():
    odds = Odds(4, Profile())
    see(odds, 0, dataclasses.replace(chain(3, 4), num_emitted=1), 4, is_over=True)
    counts = odds.counts["m"][""]
    assert (counts.hits, counts.tries) == ([0], [1])


def test_nodes_of_a_level():
    odds = Odds(4, Profile())
    assert (odds.nodes_per_level("m", True), odds.nodes_per_level("chain", False)) == (3.0, 1.0)
    tree = Round("m", 2, 1, 2, parents=(-1, 0, 0, 1, 1, 2), path=(2,))
    for _ in range(400):
        odds.observe(0, tree, 4, 3, [], False)  # three levels were drafted, of which two were kept
    assert odds.nodes_per_level("m", True) == pytest.approx(5 / 3, abs=0.05)


def test_pass_curve():
    curve = PassCurve({1: 1.0, 4: 4.0, 8: 3.0, 16: 8.0})  # the clock was late at 4
    seconds = [1, 5 / 3, 3, 3, 3, 5.5, 8, 8 + 14 / 15]
    assert [curve.seconds(n) for n in (1, 2, 4, 6, 8, 12, 16, 18)] == pytest.approx(seconds)
    assert PassCurve({1: 2.0}).seconds(9) == 2.0


def chain_option(source: str, step: float, gains: list[float]) -> Option:
    cost = DraftSeconds(RobustMean(step), RobustMean(0.0))
    return Option(DraftOptions(source), 0, cost, False, 0.0, 100.0, gains, 1.0, len(gains) - 1, False)


def test_time_is_worth_what_it_brings_elsewhere():
    """Every other round is plain. Between them a short draft has the better ratio, a longer one brings more."""
    rows = [[chain_option("short", 0.05, [0.0, 0.9]), chain_option("long", 0.45, [0.0, 1.0, 2.0, 3.0, 4.0])]]
    tokens, seconds = {"short": 1.9, "long": 5.0}, {"short": 1.05, "long": 2.8}
    over_all = {name: (1 + tokens[name]) / (1 + seconds[name]) for name in tokens}
    assert tokens["short"] / seconds["short"] > tokens["long"] / seconds["long"]
    assert over_all["long"] > 1.1 * over_all["short"]
    speed, flat = 1.0, RoundSeconds(PassCurve({1: 1.0, 8: 1.0}), 1)
    for _ in range(5):
        plan = best_plan(rows, flat, speed, MOST, 1)
        assert plan.options[0] is not None
        speed = over_all[plan.options[0].offer.source]
    assert (plan.options[0].offer.source, plan.depth) == ("long", 4)
    assert plan.rate == pytest.approx(5 / 2.8)
    everywhere = best_plan(rows, flat, 1.8, MOST, 1)
    assert everywhere.options[0] is not None
    assert everywhere.options[0].offer.source == "short", "where all time brings that much, the better ratio is right"


def test_speed_is_that_of_the_request_as_soon_as_it_is_known():
    def book(slot: int, tokens: int, seconds: float = 0.5) -> None:
        ledger.book(slot, tokens, seconds, 0.5, 1, True)

    ledger = Ledger()
    assert ledger.speed(0, 0.5) == 2.0, "plain decoding"
    for _ in range(50):
        book(0, 3)
    assert ledger.speed(0, 0.5) == pytest.approx(6.0)
    assert ledger.speed(1, 0.5) == pytest.approx(6.0), "a new request begins where others are"
    for _ in range(30):
        book(1, 2)
    assert ledger.speed(1, 0.5) == pytest.approx(4.2, abs=0.2)
    book(1, 1, 30.0)
    assert ledger.speed(1, 0.5) == 2.0, "never below plain decoding"
    ledger.release(1)
    assert 2.0 < ledger.speed(1, 0.5) < 6.0


def test_one_slow_measurement_decides_nothing():
    level = RobustMean(1.0)
    for seen in (1.0, 20.0, 1.1, 0.9, 1.0, 20.0, 1.0, 1.0):
        level.add(seen)
    assert 0.9 < level.value < 1.15
    for _ in range(40):
        level.add(3.0)
    assert level.value > 2.8  # a lasting change is followed


def test_a_slower_machine_is_drift_and_longer_rounds_are_overhead():
    seconds = RoundSeconds(PassCurve({1: 1.0, 17: 2.0}), 1)
    for _ in range(20):
        seconds.observe(0, 1.0)
        seconds.observe(4, 1.25 * 1.3)
    assert seconds.of(0) == pytest.approx(1.0, rel=0.05)
    assert seconds.of(4) == pytest.approx(1.625, rel=0.05)
    for _ in range(20):
        seconds.observe(0, 2.0)
    assert seconds.of(0) == pytest.approx(2.0, rel=0.1)
    assert seconds.of(4) == pytest.approx(3.25, rel=0.1), "what all rounds take, drafts take too"


def test_ledger():
    ledger = Ledger()
    assert ledger.available(0) == INITIAL
    ledger.book(0, 1, 3.0, 1.0, 1, True)
    assert ledger.available(0) == pytest.approx(INITIAL - 2 + ALLOWANCE)
    for _ in range(50):
        ledger.book(0, 5, 2.0, 1.0, 1, True)
    assert ledger.available(0) == MOST
    assert ledger.available(1) == INITIAL, "a request may not lose all that others won"
    ledger.book(1, 1, 3.0, 1.0, 2, False)
    assert ledger.available(1) > INITIAL, "a row without a draft does not pay for what the others took"
    ledger.release(0)
    assert ledger.available(0) == INITIAL


def test_trials_back_off_and_come_back():
    trials, waits, last = Trials(), [], 0
    for now in range(400):
        if trials.is_due(0, ("m", 0), now):
            waits.append(now - last)
            last = now
            trials.used(0, ("m", 0), now, was_trial=True, accepted=False)
    assert waits == [0, 4, 8, 16, 32, 64, 64, 64, 64, 64][: len(waits)]
    assert max(waits) == LONGEST
    trials.used(0, ("m", 0), 400, was_trial=True, accepted=True)
    assert trials.is_due(0, ("m", 0), 400 + LONGEST // 2)
    trials.release(0)
    assert trials.is_due(0, ("m", 0), 401), "nothing of a released slot is left"


def test_profile_survives_json_and_starts_the_next_run():
    member = Member("m", lambda r, p, i: 0.9, 0.001, 0.00005, reads=True, confident=True)
    profile = taught([member], requests=2).profile(model="x", dtype="bfloat16", threads=2)
    read = Profile.from_dict(json.loads(json.dumps(profile.to_dict())))
    assert read == profile
    assert (read.model, read.dtype, read.threads) == ("x", "bfloat16", 2)
    assert profile.draft_seconds["m"][0] == pytest.approx(0.001, rel=0.2)

    outcome = simulate(lambda clock: CostModel(profile=read, clock=clock), [member], machine=Machine(cpu, hiccups=0))
    first = next(record for _, record in outcome.rounds if record.num_drafted)
    assert first.num_drafted >= 4  # no cautious beginning


@pytest.mark.parametrize(
    "broken",
    [{"speed": 1}, {"version": 0}, {"pass_seconds": {"1": -1}}, {"pass_seconds": 3}, {"draft_seconds": {"m": [1]}},
     {"acceptance": {"m": {"": [[2.0], [1.0]]}}}, {"acceptance": {"m": {"x": [[1], [1]]}}},
     {"nodes": {"m": [1.0]}}, {"nodes": {"m": [1.0, 0.0]}}, {"confidence": {"m": {}}},
     {"confidence": {"m": {"accepted": [[1.0], [1.0]], "deeper": [[1.0], [1.0]]}}},
     {"pass_experts": {"1": 0}}, {"pass_experts": {"1": 1.5}}, {"expert_seconds": -1.0}, {"novelty": {"m": [1.0]}},
     {"novelty": {"m": [-1.0, 1.0]}}],
    ids=str,
)  # fmt: skip
def test_broken_profiles_are_refused(broken):
    with pytest.raises(ConfigError):
        Profile.from_dict({"version": VERSION, **broken})


@pytest.mark.parametrize("policy", [CostModel, Dynamic], ids=["cost model", "dynamic"])
@pytest.mark.parametrize(
    "drafter", [Plain, PromptLookup, lambda: Choose([PromptLookup(), Plain()])], ids=["plain", "lookup", "choose"]
)
def test_answers_do_not_depend_on_the_policy(policy, drafter):
    params = SamplingParams(temperature=1.0, max_tokens=40)
    assert_identical(runner(loaded(), 2), drafter(), [(REPEATING, params)], 64, policy=policy())


def test_nothing_is_measured_for_nothing():
    def refuse(rows: int) -> float:
        raise AssertionError("measured")

    policy, seq = CostModel(), sequence(loaded(), REPEATING, SamplingParams())
    policy.bind(Plain(), refuse)
    assert policy.budgets([seq])[0].depth == 0
    policy.bind(PromptLookup(), lambda rows: 0.01)
    seq.slot = 0
    assert policy.budgets([seq])[0].depth == 0  # no match: nothing to propose
    assert policy.profile().pass_seconds == {}


def test_fixed_takes_the_first_member_that_has_something():
    seq = sequence(loaded(), [1, 2, 3, 4], SamplingParams(), slot=0)
    policy, none = Fixed(3), Member("a", lambda r, p, i: 0.0, hint=lambda r, p: -1)
    drafter = SimDrafter([none, Member("b", lambda r, p, i: 0.0)])
    drafter.requests[0] = 0
    policy.bind(drafter, lambda rows: 0.01)
    assert policy.budgets([seq])[0].drafter_index == 1


def test_nodes_take_the_seconds_of_the_convex_hull():
    """Against its definition: the least of all lines between a size that is no larger and one that is no smaller."""
    rng = random.Random(0)
    for _ in range(50):
        seconds = dict(zip((0, *TREE_SIZES), sorted(rng.random() for _ in range(1 + len(TREE_SIZES))), strict=True))
        added = node_seconds(seconds)
        assert len(added) == TREE_SIZES[-1]
        assert added == sorted(added)
        for n in range(TREE_SIZES[-1] + 1):
            lines = [
                seconds[a] + (seconds[b] - seconds[a]) * (n - a) / max(1, b - a)
                for a in seconds
                for b in seconds
                if a <= n <= b
            ]
            assert seconds[0] + sum(added[:n]) == pytest.approx(min(lines))
