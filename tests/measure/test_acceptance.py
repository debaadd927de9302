"""Acceptance as it is counted, recorded and compared."""

import json

import pytest

from paceline import LLM, SamplingParams
from paceline.core.interfaces import DraftBudget
from paceline.errors import ConfigError
from paceline.measure.trials import (
    AcceptanceCounts,
    AnswerCounts,
    check_trial,
    differences,
    measure_acceptance,
    run_trial,
    trials_of,
)
from paceline.methods.parallel.drafter import Medusa
from tests.helpers import tokenizer
from tests.methods.common import even_tempered_target, fresh_medusa

PARAMS, BUDGET = SamplingParams(max_tokens=16, seed=0, ignore_eos=True), DraftBudget(3, 6)
TEXTS = ["ab", "hello", "zq"]
COUNTS = AcceptanceCounts((AnswerCounts(10, 4, (4, 2)), AnswerCounts(9, 6, (2, 1, 0)), AnswerCounts(6, 2, (2, 2))))


@pytest.fixture(scope="module")
def llm():
    return LLM(even_tempered_target(), tokenizer=tokenizer(), drafter=Medusa(fresh_medusa()), numerics="fast")


def test_rates():
    assert COUNTS.mean_acceptance_length == 25 / 12
    assert COUNTS.per_position == (8 / 12, 5 / 12, 0.0)
    assert COUNTS.first(1).mean_acceptance_length == 2.5
    assert AcceptanceCounts.from_dict(json.loads(json.dumps(COUNTS.as_dict()))) == COUNTS


def test_a_record_that_contradicts_itself():
    flattered = {**COUNTS.as_dict(), "mean_acceptance_length": 3.0}
    with pytest.raises(ConfigError, match="contradicts its own counts"):
        AcceptanceCounts.from_dict(flattered)
    with pytest.raises(ConfigError, match="answers has a wrong value"):
        AcceptanceCounts.from_dict({"mean_acceptance_length": 1.0})


def test_differences():
    assert all(one.holds and one.measured == one.recorded for one in differences(COUNTS, COUNTS))
    assert differences(COUNTS, COUNTS)[0].allowed == pytest.approx(0.05 * 25 / 12)  # no sampling error where all agree
    worse = AcceptanceCounts(tuple(AnswerCounts(a.tokens, a.rounds + 3, a.accepted) for a in COUNTS.answers))
    assert not differences(worse, COUNTS)[0].holds
    shifted = AcceptanceCounts(tuple(AnswerCounts(a.tokens, a.rounds, (0, *a.accepted[1:])) for a in COUNTS.answers))
    assert [one.holds for one in differences(shifted, COUNTS, 0.05)][:2] == [True, False]
    with pytest.raises(ConfigError, match="another number of prompts"):
        differences(COUNTS.first(2), COUNTS)


def test_measured_in_the_real_loop(llm):
    policy = llm.decoder.policy
    found = measure_acceptance(llm, TEXTS, PARAMS, BUDGET)
    assert llm.decoder.policy is policy, "the engine keeps its own policy"
    assert found.num_tokens == 15 * len(TEXTS)  # after the one that comes with the prompt
    assert 1.3 < found.mean_acceptance_length < 4
    assert list(found.per_position) == sorted(found.per_position, reverse=True)
    # each round emits what stood and one token of the target; only an answer's end can cut that
    spare = sum(found.accepted_at(0)) + sum(found.accepted_at(1)) + sum(found.accepted_at(2)) + found.num_rounds
    assert found.num_tokens <= spare <= found.num_tokens + 3 * len(TEXTS)
    shallow = measure_acceptance(llm, TEXTS, PARAMS, DraftBudget(1, 1))
    assert len(shallow.per_position) == 1
    assert measure_acceptance(llm, TEXTS, PARAMS, DraftBudget(0, 0)).mean_acceptance_length == 1


@pytest.mark.parametrize("wrong", [{"seed": None}, {"n": 2, "seed": 1, "temperature": 1}])
def test_what_is_not_reproducible_is_refused(llm, wrong):
    with pytest.raises(ConfigError, match="reproducible"):
        measure_acceptance(llm, TEXTS, SamplingParams(**wrong), BUDGET)
    with pytest.raises(ConfigError, match="nothing to measure"):
        measure_acceptance(llm, [], PARAMS, BUDGET)


def test_a_trial_comes_out_the_same_again(llm):
    made = run_trial(llm, PARAMS, BUDGET, {}, name="three", source="texts", texts=TEXTS)
    (trial,) = trials_of({"acceptance": json.loads(json.dumps([made.as_dict()]))})
    assert trial == made
    again = check_trial(llm, trial)
    assert again.passed
    assert again.is_identical
    assert again.changed == []
    assert check_trial(llm, trial, num_prompts=2).recorded == made.result.first(2)


def test_other_prompts_are_noticed(llm):
    made = run_trial(llm, PARAMS, BUDGET, {}, source="texts", texts=TEXTS)
    row = json.loads(json.dumps(made.as_dict()))
    row["prompts"]["texts"][1] = "hallo"
    with pytest.raises(ConfigError, match="not the prompts of"):
        trials_of({"acceptance": [row]})[0].texts()
    row = {**made.as_dict(), "prompts": {"source": "file", "count": 3, "sha256": made.prompts.sha256}}
    (trial,) = trials_of({"acceptance": [row]})
    assert not trial.can_run
    assert trial.texts(TEXTS) == TEXTS
    with pytest.raises(ConfigError, match="--prompts"):
        trial.texts()
    row["prompts"]["count"] = 4
    with pytest.raises(ConfigError, match="incomplete"):
        trials_of({"acceptance": [row]})
