"""`check` tells ties from bugs: real engines pass; the planted faults are in `test_check_mutants`."""

import json
import math
from collections import Counter

import pytest
import torch

from paceline import LLM, Coupled, Fixed, PromptLookup, Ratio, SamplingParams, Typical
from paceline.errors import ConfigError
from paceline.measure.check import Verdict, check, classify, first_difference, judge
from paceline.measure.chi_square import against
from paceline.measure.distribution_test import distribution_test
from paceline.measure.prompts import read_prompts
from paceline.measure.reference import Decoded, Deviation, Measured
from paceline.target import ModelRunner, SlotCache
from tests.adversaries import AcceptsAll
from tests.tiny import UNDESCRIBED, tiny_model

PROMPTS = [[5, 9, 31, 7, 5, 9, 31], [3, 3, 3, 3, 3], [64, 22, 64, 22, 64]]


def engine(verifier=None, dtype=torch.float32, name="llama"):
    return LLM(tiny_model(name, dtype), drafter=PromptLookup(), policy=Fixed(4), verifier=verifier, numerics="fast")


def run(llm, **options):
    return check(llm, PROMPTS, max_tokens=16, with_distribution_test=False, **options)


SOUND = Deviation(1.0, 1.5, 0.5)


@pytest.mark.parametrize(
    ("gap", "noise", "expected"),
    [
        (0.2, 0.05, Verdict.NEAR_TIE),  # just closed
        (0.0, 0.125, Verdict.NEAR_TIE),
        (-0.2, 0.05, Verdict.NEAR_TIE),  # plain decoding was the one that rounding turned
        (0.21, 0.05, Verdict.BUG),
        (-0.3, 0.05, Verdict.BUG),
        (float("inf"), 0.1, Verdict.BUG),
        (0.1, float("nan"), Verdict.BUG),
    ],
)
def test_classify(gap, noise, expected):
    measured = Measured(noise, gap, SOUND, SOUND)
    assert classify(True, measured, invariant=False)[0] is expected
    assert classify(True, measured, invariant=True)[0] is Verdict.BUG  # no ties where bits count


@pytest.mark.parametrize(
    "far", [Deviation(2.1, 1.0, 0.0), Deviation(1.0, 4.1, 0.0), Deviation(None, None, 4.1), Deviation(math.nan, 1, 0)]
)
@pytest.mark.parametrize("invariant", [False, True])
def test_scores_that_rounding_does_not_explain_are_a_bug_whatever_the_tokens(far, invariant):
    for differs, gap in ((False, None), (True, 0.0)):
        for sides in ((far, SOUND), (SOUND, far)):
            assert classify(differs, Measured(0.1, gap, *sides), invariant)[0] is Verdict.BUG
    assert classify(False, Measured(0.1, None, SOUND, SOUND), invariant)[0] is Verdict.IDENTICAL


def test_the_same_tokens_from_other_bits_are_a_bug_where_bits_count():
    assert classify(False, None, invariant=True, same_scores=False)[0] is Verdict.BUG
    assert classify(False, None, invariant=False, same_scores=False)[0] is Verdict.IDENTICAL


def test_classify_without_two_tokens():
    assert classify(False, None, invariant=False)[0] is Verdict.IDENTICAL
    assert classify(True, None, invariant=False)[0] is Verdict.BUG


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2], [1]) == 1


@pytest.mark.parametrize(
    ("name", "dtype", "numerics"),
    [
        ("llama", torch.float32, "invariant"),  # native passes know no other, whatever was asked for
        ("llama", torch.float64, "fast"),  # rounding is finer than the log-probabilities that are compared
        (UNDESCRIBED, torch.float32, "fast"),
    ],
)
def test_a_right_engine_passes(name, dtype, numerics):
    llm = engine(name=name, dtype=dtype)
    assert llm.loaded.is_native == (numerics == "invariant")
    report = run(llm)
    assert report.verdicts == {"identical": 6, "near_tie": 0, "bug": 0}
    assert report.passed
    assert report.mean_acceptance_length > 1
    assert llm.numerics == numerics


@pytest.mark.parametrize("name", ["llama", UNDESCRIBED])
def test_a_verifier_that_accepts_everything_is_a_bug(name):
    report = run(engine(AcceptsAll(), name=name))
    assert report.verdicts["bug"] >= 4
    assert not report.passed
    bug = next(c for c in report.comparisons if c.verdict is Verdict.BUG)
    assert bug.position is not None
    assert bug.plain_token != bug.speculative_token


def twins(name, numerics):
    """An engine whose tokens 48 to 95 have the weights of tokens 0 to 47: each is as likely as its twin."""
    model = tiny_model(name)
    with torch.no_grad():
        model.lm_head.weight[48:96] = model.lm_head.weight[:48]
    return LLM(model, drafter=PromptLookup(), policy=Fixed(4), numerics=numerics)


@pytest.mark.parametrize(
    ("name", "numerics"), [(UNDESCRIBED, "fast"), (UNDESCRIBED, "invariant"), ("llama", "invariant")]
)
def test_a_tie_is_a_near_tie_with_fast_numerics_and_a_bug_with_invariant_ones(name, numerics):
    llm = twins(name, numerics)
    params = SamplingParams(max_tokens=12, seed=0)
    ids = llm.plain().generate([PROMPTS[0]], params)[0].token_ids
    place = next(i for i, token in enumerate(ids) if token < 48 and i > 2)
    other = [*ids[:place], ids[place] + 48, *ids[place + 1 :]]
    found = judge(llm, PROMPTS[0], params, 0, Decoded(ids, "length"), Decoded(other, "length"))
    assert found.verdict is (Verdict.NEAR_TIE if numerics == "fast" else Verdict.BUG)
    assert found.measured is not None
    assert found.measured.gap == 0
    wrong = [*ids[:place], (ids[place] + 1) % 48, *ids[place + 1 :]]
    assert judge(llm, PROMPTS[0], params, 0, Decoded(ids, None), Decoded(wrong, None)).verdict is Verdict.BUG


@pytest.mark.parametrize("name", ["llama", UNDESCRIBED])
def test_the_reference_shares_no_pass_with_the_engine(name, monkeypatch):
    llm = engine(name=name)
    params = SamplingParams(temperature=0.8, max_tokens=12, seed=0, logprobs=20)
    answer = llm.generate([PROMPTS[0]], params)[0].outputs[0]
    side = Decoded(answer.token_ids, answer.finish_reason, answer.logprobs)
    for owner, name in ((ModelRunner, "forward"), (ModelRunner, "prefill_chunk"), (SlotCache, "commit")):
        monkeypatch.setattr(owner, name, None)
    monkeypatch.setattr(llm.runner, "cache", None)
    found = judge(llm, PROMPTS[0], params, answer.seed, side, side, with_reference=True)
    assert found.verdict is Verdict.IDENTICAL
    assert found.measured is not None
    typical = found.measured.speculative.typical
    assert typical == 0 if llm.numerics == "invariant" else typical < 2


def test_only_a_few_answers_are_held_against_the_reference():
    report = run(engine(), num_references=1)
    assert [one.measured is None for one in report.comparisons] == [False] + [True] * 5


def test_other_tokens_are_no_bug_where_only_the_law_is_promised():
    report = run(engine(Ratio()))
    assert report.skipped == [0.8]
    assert report.verdicts == {"identical": 3, "near_tie": 0, "bug": 0}


def test_nothing_to_check():
    with pytest.raises(ConfigError):
        check(engine(), [])
    with pytest.raises(ConfigError):
        run(engine(), temperatures=[])


@pytest.mark.parametrize("verifier", [Coupled(), Ratio()])
def test_lossless_verifiers_pass_the_distribution_test(verifier):
    found = distribution_test(verifier, samples=200)
    assert found.passed
    assert found.num_different == (0 if verifier.exact else None)
    assert found.mean_acceptance_length > 1.2


@pytest.mark.parametrize("verifier", [AcceptsAll(), Typical(allow_lossy=True)])
def test_other_verifiers_fail_it(verifier):
    assert not distribution_test(verifier, samples=320).passed


def test_the_distribution_test_leaves_the_users_random_state_alone():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    distribution_test(Coupled(), samples=1)
    assert torch.equal(before, torch.random.get_rng_state())


def test_chi_square():
    probs = [0.5, 0.25, 0.2, 0.05]
    assert against(Counter({0: 500, 1: 250, 2: 200, 3: 50}), probs).p_value == pytest.approx(1.0)
    assert against(Counter({0: 350, 1: 400, 2: 200, 3: 50}), probs).p_value < 1e-6
    assert against(Counter({0: 520, 1: 240, 2: 190, 3: 50}), probs).p_value > 0.1


ROWS = [
    ({"question_id": 1, "turns": ["first", "second"]}, [{"role": "user", "content": "first"}]),
    ({"task_id": "x/0", "prompt": "def f():"}, "def f():"),
    ({"question": "1 + 1?", "answer": "2"}, [{"role": "user", "content": "1 + 1?"}]),
    ({"messages": [{"role": "user", "content": "hi"}]}, [{"role": "user", "content": "hi"}]),
    ("just text", "just text"),
]


def test_prompt_files(tmp_path):
    """What is in them and what is refused is tested in `bench/test_suites.py`."""
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(row) for row, _ in ROWS) + "\n\n")
    assert read_prompts(tmp_path / "p.jsonl") == [prompt for _, prompt in ROWS]
    assert len(read_prompts(tmp_path / "p.jsonl", 2)) == 2
