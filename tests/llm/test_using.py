"""`LLM.using`: the same model with something else."""

import pytest

from paceline import LLM, CostModel, Coupled, DraftModel, Fixed, PromptLookup, Ratio, SamplingParams, Suffix, Typical
from paceline.errors import ConfigError, LossyNotAllowed
from paceline.methods import Plain
from tests.exactness.drafters import small_draft
from tests.helpers import REPEATING, all_free, prompt
from tests.tiny import tiny_model

PARAMS = SamplingParams(temperature=0.8, max_tokens=20, seed=3, ignore_eos=True)


def answer(llm: LLM) -> list[int]:
    return llm.generate(REPEATING, PARAMS)[0].token_ids


def test_another_drafter_on_the_same_model():
    llm = LLM(tiny_model("llama"), drafter=PromptLookup(), policy=Fixed(3))
    want = answer(llm)
    for other in (llm.using(drafter="suffix"), llm.using(drafter=Suffix()), llm.plain(), llm.using()):
        assert other.runner is llm.runner
        assert other.loaded is llm.loaded
        assert other.get_metrics()[0].value == 0
        assert answer(other) == want
    assert llm.drafters == ("lookup",)
    assert answer(llm) == want
    assert all_free(llm.runner)


def test_what_is_left_out_stays():
    llm = LLM(tiny_model("llama"), drafter=PromptLookup(), policy=Fixed(3))
    same = llm.using(policy=Fixed(2))
    assert same.decoder.drafter is llm.decoder.drafter
    assert max(one.num_drafted for one in same.generate(REPEATING, PARAMS)[0].rounds) == 2
    other = llm.using(drafter="suffix")
    assert isinstance(other.decoder.policy, Fixed)
    assert other.decoder.policy is not llm.decoder.policy
    assert other.verifier is llm.verifier


def test_plain_and_back():
    llm = LLM(tiny_model("llama"), drafter="lookup", verifier=Ratio())
    plain = llm.using(drafter=None)
    assert isinstance(plain.decoder.drafter, Plain)
    assert isinstance(plain.verifier, Coupled)
    assert isinstance(llm.using(drafter="none").decoder.drafter, Plain)
    assert isinstance(plain.using(drafter="lookup").decoder.policy, CostModel)
    assert isinstance(plain.using(drafter='{"method": "ngram", "num_speculative_tokens": 4}').decoder.policy, Fixed)
    assert isinstance(llm.using(drafter=None, verifier=Ratio()).verifier, Ratio)


def test_a_drafter_serves_one_kind_of_verifier():
    draft = DraftModel(small_draft())
    llm = LLM(tiny_model("llama"), drafter=draft, policy=Fixed(3))
    with pytest.raises(ConfigError, match="another kind of verifier"):
        llm.using(verifier=Ratio())
    assert llm.using(verifier=Coupled()).decoder.drafter is draft
    named = LLM(tiny_model("llama"), drafter="lookup", policy=Fixed(3))
    ratio = named.using(verifier=Ratio())
    assert ratio.decoder.drafter is not named.decoder.drafter
    assert not ratio.generate(prompt(5), PARAMS)[0].outputs[0].exact
    assert answer(named) == answer(named.plain())


def test_lossy_verifiers_need_consent():
    llm = LLM(tiny_model("llama"), drafter="lookup")
    with pytest.raises(LossyNotAllowed, match="allow_lossy=True"):
        llm.using(verifier=Typical(allow_lossy=True))
    with pytest.raises(LossyNotAllowed, match="typical"):
        llm.using(drafter='{"method": "ngram", "rejection_sample_method": "typical"}')
    assert not llm.using(verifier=Typical(allow_lossy=True), allow_lossy=True).generate([5], PARAMS)[0].lossless
