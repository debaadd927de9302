"""A request has the tokens that it has alone, whoever comes and goes beside it."""

import pytest

from paceline import (
    LLM,
    CostModel,
    Coupled,
    DraftModel,
    PromptLookup,
    SamplingParams,
    SelfQuantized,
    Suffix,
    TokenRecycling,
)
from tests.adversaries import RandomTrees
from tests.async_llm.common import TEXTS, facts, run, schedule, serve, tiny_llm, wrong
from tests.exactness.drafters import small_draft
from tests.vision.families import make_image, seeing, user

DRAFTERS = {
    "plain": lambda: None,
    "lookup": PromptLookup,
    "suffix": Suffix,
    "recycling": TokenRecycling,
    "draft model": lambda: DraftModel(small_draft()),
    "self int4": lambda: SelfQuantized(lm_head="shared"),
    "random trees": RandomTrees,
}


def mistakes(llm: LLM, seed: int, prompts=TEXTS) -> list[int]:
    asks = schedule(seed, 14, prompts)
    return wrong(llm, asks, serve(llm, lambda engine: run(engine, asks)))


@pytest.mark.diagonal
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("chunk", [None, 16])
def test_random_schedules(name, chunk):
    llm = tiny_llm(DRAFTERS[name](), chunk=chunk)
    assert mistakes(llm, seed=len(name) + (chunk or 0)) == []


def test_many_schedules_on_one_engine():
    llm = tiny_llm(PromptLookup(), slots=2, policy=CostModel(), chunk=32)
    for seed in range(4):
        assert mistakes(llm, seed) == []


def test_images():
    llm = LLM(seeing(), drafter=PromptLookup(), max_num_seqs=3)
    llm.runner.chunk = 8
    small, wide = make_image(1), make_image(2, 60, 24)
    chats = [
        [user(small, "what is it?")],
        [user("see ", wide, " then say")],
        [user(wide, " or ", small, "?")],
        [user("no picture")],
    ]
    assert mistakes(llm, 5, prompts=chats) == []


def test_prompt_logprobs_are_those_of_generate():
    llm = tiny_llm(PromptLookup(), chunk=16)
    params = SamplingParams(max_tokens=4, prompt_logprobs=2, logprobs=1)

    async def main(engine):
        return [output async for output in engine.generate(TEXTS[3], params)]

    want, got = llm.generate(TEXTS[3], params)[0], serve(llm, main)
    assert got[-1].prompt_logprobs == want.prompt_logprobs
    assert len(want.prompt_logprobs) == len(want.prompt_token_ids)
    assert facts(got[0])[0][1] == want.token_ids[: len(got[0].token_ids)]


def test_a_neighbours_token_is_noticed(monkeypatch):
    """Mutant: from time to time two rows of a round get each other's tokens."""
    whole = Coupled.verify

    def swapped(self, *given):
        walks = whole(self, *given)
        return [walks[1]._replace(path=walks[0].path), *walks[1:]] if len(walks) > 1 else walks

    monkeypatch.setattr(Coupled, "verify", swapped)
    assert any(mistakes(tiny_llm(slots=4), seed) for seed in range(3))


def test_a_slot_that_is_not_released_is_noticed(monkeypatch):
    """Mutant: the slots of requests that are removed stay taken."""
    from paceline.engine.scheduler import Scheduler

    def remove(self, request):
        self._running = [one for one in self._running if one.request is not request]

    monkeypatch.setattr(Scheduler, "remove", remove)
    with pytest.raises(AssertionError, match="a slot was not given back"):
        _ = [mistakes(tiny_llm(slots=40), seed) for seed in range(5)]
