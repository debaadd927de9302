"""One bad row fails no batch: `generate(..., return_exceptions=True)`."""

from dataclasses import replace

import pytest

from paceline import LLM, DraftModel, Fixed, PromptLookup, SamplingParams
from paceline.errors import CacheFull, ConfigError, DraftError
from tests.exactness.drafters import small_draft
from tests.helpers import REPEATING, all_free, prompt, tokenizer
from tests.tiny import tiny_model

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def engine(drafter=None, slots: int = 2) -> LLM:
    policy = None if drafter is None else Fixed(3)
    return LLM(tiny_model("llama"), drafter=drafter, policy=policy, tokenizer=tokenizer(), max_num_seqs=slots)


def broken(ids, scores):
    if ids.shape[1] > len(REPEATING) + 4:
        raise ArithmeticError("planted")
    return scores


BAD = replace(PARAMS, logits_processors=(broken,))


@pytest.mark.parametrize("drafter", [None, PromptLookup, lambda: DraftModel(small_draft())])
def test_the_others_are_answered(drafter):
    llm = engine(drafter and drafter())
    prompts = [prompt(9), REPEATING, prompt(600), [], REPEATING, "abc"]
    params = [PARAMS, BAD, PARAMS, PARAMS, PARAMS, PARAMS]
    got = llm.generate(prompts, params, return_exceptions=True)
    kinds = [ArithmeticError, CacheFull, ConfigError]
    assert [type(one) for one in got[1:4]] == kinds
    for place in (0, 4, 5):
        assert got[place].token_ids == llm.generate(prompts[place], PARAMS)[0].token_ids
    assert all_free(llm.runner)
    assert isinstance(llm.chat([{"role": "user", "content": "x" * 600}], PARAMS, return_exceptions=True)[0], CacheFull)


def test_the_first_error_is_raised_with_a_hint():
    llm = engine(PromptLookup())
    with pytest.raises(ArithmeticError, match="planted") as told:
        llm.generate([prompt(9), REPEATING, prompt(5)], [PARAMS, BAD, PARAMS])
    assert "return_exceptions=True" in told.value.__notes__[0]
    assert all_free(llm.runner)
    with pytest.raises(ArithmeticError) as told:
        llm.generate(REPEATING, BAD)
    assert not hasattr(told.value, "__notes__")


def test_a_drafter_that_fails_for_one_row(monkeypatch):
    llm = engine(PromptLookup(), slots=4)
    want = [one.token_ids for one in llm.generate([prompt(9), prompt(5, 1)], PARAMS)]
    drafter, propose = llm.decoder.drafter, llm.decoder.drafter.propose

    def failing(seqs, budgets):
        if any(seq.prompt_ids == REPEATING for seq in seqs):
            raise ArithmeticError("planted")
        return propose(seqs, budgets)

    monkeypatch.setattr(drafter, "propose", failing)
    got = llm.generate([prompt(9), REPEATING, prompt(5, 1)], PARAMS, return_exceptions=True)
    assert isinstance(got[1], DraftError)
    assert [got[0].token_ids, got[2].token_ids] == want


def test_answers_of_one_request_fail_together():
    llm = engine(slots=4)
    sampled = replace(PARAMS, n=3, temperature=1.0, seed=1)
    params = [replace(sampled, logits_processors=(broken,)), sampled]
    got = llm.generate([REPEATING] * 2, params, return_exceptions=True)
    assert isinstance(got[0], ArithmeticError)
    assert [len(one.token_ids) for one in got[1].outputs] == [12] * 3
    assert all_free(llm.runner)
