"""What an engine is told when it is made: rounded weights, a tuned file, the default policy."""

import warnings

import pytest

from paceline import LLM, CostModel, Fixed, PromptLookup, SamplingParams
from paceline.config import parse
from paceline.policy import Profile
from paceline.quant.packed import QuantizedLinear
from paceline.tuned import Tuned, save_tuned
from tests.tiny import tiny_model

PROMPT = [3, 4, 5, 6] * 4


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_rounded_weights_answer_the_same_with_and_without_a_drafter(weights):
    model = tiny_model("llama")
    llm = LLM(model, weights=weights, drafter=PromptLookup(), policy=Fixed(4))
    assert llm.quantized is not None
    assert any(isinstance(module, QuantizedLinear) for module in llm.loaded.model.modules())
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules()), "the user's model is left alone"
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=24, seed=3, ignore_eos=True)
        assert llm.generate([PROMPT], params)[0].token_ids == llm.plain().generate([PROMPT], params)[0].token_ids


def test_the_default_policy_is_the_cost_model():
    assert isinstance(LLM(tiny_model("llama"), drafter=PromptLookup()).decoder.policy, CostModel)
    assert isinstance(LLM(tiny_model("llama")).decoder.policy, Fixed)


def test_a_tuned_file_brings_its_drafter(tmp_path):
    plain = LLM(tiny_model("llama"))
    save_tuned(tmp_path / "t.json", Tuned(parse("lookup"), Profile(model=plain.loaded.name), {}, ["lookup pays"]))
    llm = LLM(tiny_model("llama"), profile=tmp_path / "t.json")
    assert isinstance(llm.decoder.drafter, PromptLookup)
    assert isinstance(llm.decoder.policy, CostModel)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    assert llm.generate([PROMPT], params)[0].token_ids == plain.generate([PROMPT], params)[0].token_ids
    kept = LLM(tiny_model("llama"), profile=tmp_path / "t.json", drafter=PromptLookup(2), policy=Fixed(3))
    assert isinstance(kept.decoder.policy, Fixed)


def test_other_threads_are_a_warning(tmp_path):
    save_tuned(tmp_path / "t.json", Tuned(parse("lookup"), Profile(threads=63), {}, []))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        LLM(tiny_model("llama"), profile=tmp_path / "t.json")
    assert any("63" in str(one.message) for one in seen)
