"""The cascade: whatever the small model does not decide is the large model's own answer, and every result says so."""

from collections import Counter
from dataclasses import replace

import pytest

from paceline import LLM, Fixed, Origin, PredictedOutput, PromptLookup, Ratio, SamplingParams
from paceline.cascade import Cascade, Reason, Signal
from paceline.cascade.calibration import confidences
from paceline.cascade.cascade import Cascade as _Cascade
from paceline.errors import ConfigError, IncompatibleModels, LossyNotAllowed
from tests.cascade.common import LIMIT, PARAMS, PROMPTS, large, made_up, small
from tests.helpers import tokenizer
from tests.tiny import tiny_model


def cascade(threshold: float = 0.009, **options) -> Cascade:
    options = {"allow_lossy": True, "audit_share": 0.0, "policy": Fixed(3), **options}
    return Cascade(small(), large(), made_up(threshold), **options)


def mixed(params: SamplingParams = PARAMS, count: int = 60):
    return cascade().generate(PROMPTS[:count], params), large().plain().generate(PROMPTS[:count], params)


def test_all_kinds_and_only_small_answers_differ():
    results, own = mixed()
    seen = Counter((one.reason, one.token_ids == two.token_ids) for one, two in zip(results, own, strict=True))
    assert seen[Reason.CONFIDENT, True] > 0
    assert seen[Reason.UNSURE, True] > 0
    assert seen[Reason.LONG, True] > 0
    assert {reason for reason, same in seen if not same} <= {Reason.CONFIDENT}
    corrected = [one for one in results if one.reason is Reason.UNSURE and one.small.token_ids != one.token_ids]
    assert corrected, "a test without a correction shows nothing"


@pytest.mark.diagonal
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafter", [None, PromptLookup()])
def test_answers_of_the_large_model_are_its_own(temperature, drafter):
    params = replace(PARAMS, temperature=temperature, min_tokens=2)
    results = cascade(0.999, drafter=drafter).generate(PROMPTS[:24], params)
    own = large().plain().generate(PROMPTS[:24], params)
    assert [one.token_ids for one in results] == [one.token_ids for one in own]
    assert all(one.lossless and one.output.outputs[0].exact for one in results)


def test_a_mutant_that_keeps_the_draft_is_noticed(monkeypatch):
    """If predictions were taken unverified, answers would differ."""
    monkeypatch.setattr("paceline.cascade.cascade.decide", lambda answer, *_: (Reason.CONFIDENT, 1.0))
    results = cascade(0.999).generate(PROMPTS[:24], PARAMS)
    own = large().plain().generate(PROMPTS[:24], PARAMS)
    assert [one.token_ids for one in results] != [one.token_ids for one in own]


def test_every_result_says_who_decided():
    for one in mixed()[0]:
        assert one.signal is Signal.MIN_PROB
        assert (one.threshold, one.max_disagreement, one.promised_with) == (0.009, 0.01, 0.95)
        assert (one.confidence is None) == (one.reason is Reason.LONG)
        (answer,) = one.output.outputs
        assert answer.logprobs is None
        if one.decided_by == "small":
            assert one.confidence >= 0.009
            assert (one.lossless, answer.lossless, answer.exact) == (False, False, False)
            assert answer.finish_reason == "stop"
            assert len(one.token_ids) <= LIMIT
        else:
            assert (one.lossless, answer.lossless, answer.exact) == (True, True, True)
        if one.confidence is not None:
            assert one.confidence == confidences(one.small.logprobs)[Signal.MIN_PROB]


def test_an_agreed_answer_costs_one_pass_of_the_large_model():
    agreed = [one for one in mixed()[0] if one.reason is Reason.UNSURE and one.token_ids == one.small.token_ids]
    assert agreed
    for one in agreed:
        assert len(one.output.rounds) == 1
        assert one.output.rounds[0].source == PredictedOutput.name
        assert set(one.output.origins) == {Origin.DRAFTED}


def test_a_long_answer_goes_on_with_the_small_model():
    long = [one for one in mixed()[0] if one.reason is Reason.LONG and len(one.output.rounds) > 1]
    assert long
    sources = {record.source for one in long for record in one.output.rounds[1:]}
    assert "draft_model" in sources
    assert all(one.output.rounds[0].num_drafted == LIMIT for one in long)


def test_batches_are_the_single_answers():
    together, _ = mixed(count=16)
    apart = [cascade().generate(one, PARAMS)[0] for one in PROMPTS[:16]]
    assert [(one.token_ids, one.reason) for one in together] == [(one.token_ids, one.reason) for one in apart]


def test_prompts_of_every_kind():
    ours, text, chat = cascade(), "abcabc", [{"role": "user", "content": "abc"}]
    assert len(ours.generate(text, PARAMS)) == len(ours.generate(chat, PARAMS)) == 1
    assert len(ours.generate([text, chat, PROMPTS[0]], [PARAMS] * 3)) == 3
    assert ours.generate([], PARAMS) == []
    with pytest.raises(ConfigError, match="differ in number"):
        ours.generate([text], [PARAMS] * 2)
    with pytest.raises(ConfigError, match="one answer"):
        ours.generate(text, replace(PARAMS, temperature=1, n=2))
    with pytest.raises(ConfigError, match=r"the models themselves.*adapter.*merge"):
        ours.generate(text, replace(PARAMS, extra_args={"adapter": "one"}))


def test_other_sampling_options_are_not_promised():
    one = cascade(0.0).generate(PROMPTS[0], replace(PARAMS, temperature=0.5))[0]
    assert (one.reason, one.decided_by) == (Reason.OTHER_SAMPLING, "large")
    two = cascade(0.0).generate(PROMPTS[:40], replace(PARAMS, max_tokens=LIMIT, seed=9, logprobs=1))
    alone = [one for one in two if one.reason is Reason.CONFIDENT]
    assert alone, "seed, logprobs and max_tokens change no promise"
    assert all(len(entry.top) == 1 for one in alone for entry in one.output.logprobs)


def test_what_may_not_end_within_the_window_never_decides():
    params = replace(PARAMS, min_tokens=LIMIT + 3, stop_token_ids=tuple(range(3, 97)))
    made = made_up(0.0, sampling={"logit_bias": {"2": 4.0}, "min_tokens": LIMIT + 3, "stop_token_ids": [*range(3, 97)]})
    ours = _Cascade(small(), large(), made, allow_lossy=True, audit_share=0.0, policy=Fixed(2))
    assert {one.reason for one in ours.generate(PROMPTS[:8], params)} == {Reason.LONG}


def test_a_prompt_too_long_for_the_small_model_goes_to_the_large_one():
    cramped = LLM(small().loaded, numerics="fast", max_model_len=8, max_num_seqs=4)
    ours = Cascade(cramped, large(), made_up(0.009), allow_lossy=True, audit_share=0.0, policy=Fixed(2))
    whole, fits = [*PROMPTS[0], *PROMPTS[1]], PROMPTS[2][:3]
    got = ours.generate([whole, fits], PARAMS)
    assert (got[0].reason, got[0].small) == (Reason.NO_ROOM, None)
    assert got[1].reason is not Reason.NO_ROOM
    assert got[0].token_ids == large().plain().generate(whole, PARAMS)[0].token_ids


def test_refusals():
    with pytest.raises(LossyNotAllowed, match="allow_lossy=True"):
        Cascade(small(), large(), made_up(0.5))
    with pytest.raises(IncompatibleModels, match="another small model"):
        Cascade(LLM(tiny_model("llama", seed=8), tokenizer=tokenizer()), large(), made_up(0.5), allow_lossy=True)
    with pytest.raises(IncompatibleModels, match="another large model"):
        Cascade(small(), small(), made_up(0.5), allow_lossy=True)
    other = LLM(tiny_model("llama", seed=8), tokenizer=tokenizer(shift=3))
    with pytest.raises(IncompatibleModels, match="different tokenizers"):
        Cascade(other, large(), made_up(0.5, other), allow_lossy=True)
    ratio = LLM(large().loaded, verifier=Ratio())
    with pytest.raises(ConfigError, match="exact verifier"):
        Cascade(small(), ratio, made_up(0.5), allow_lossy=True)
    loose = LLM(small().loaded, verifier=Ratio(), numerics="fast", allow_lossy=True)
    with pytest.raises(ConfigError, match="the small model needs an exact verifier"):
        Cascade(loose, large(), made_up(0.5), allow_lossy=True)
    room = small().runner.max_length
    with pytest.raises(ConfigError, match=f"max_model_len={room - 1}"):
        Cascade(small(), large(), made_up(0.5, small_context=room - 1), allow_lossy=True)
    with pytest.raises(ConfigError, match="more prompts"):
        cascade(0.5, max_disagreement=0.001)
    with pytest.raises(ConfigError, match="on_alarm"):
        cascade(0.5, on_alarm="ignore")
    with pytest.raises(ConfigError, match="audit_share"):
        cascade(0.5, audit_share=1.5)


def test_what_is_promised_can_be_asked_for_anew():
    """From the same counts: a looser bound takes a lower threshold."""
    assert cascade(0.2).choice.threshold == 0.2
    looser = cascade(0.2, max_disagreement=0.05, confidence=0.99).choice
    assert (looser.max_disagreement, looser.confidence) == (0.05, 0.99)
