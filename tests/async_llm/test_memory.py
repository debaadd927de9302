"""Where memory ends, a request is refused before it begins; none that runs is pushed out or broken off."""

import asyncio
from dataclasses import replace

import pytest

from paceline import DraftModel, PromptLookup, SamplingParams
from paceline.attention import kv_cache
from paceline.engine.loop import SpeculativeDecoder
from paceline.errors import CacheFull
from tests.async_llm.common import LONG, TEXTS, answer, facts, serve, tiny_llm
from tests.exactness.drafters import small_draft

SHORT = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture
def full(monkeypatch):
    """No memory is free any more; what the caches have they keep."""
    return lambda: monkeypatch.setattr(kv_cache, "available_memory", lambda: 0)


def answers(llm, full, *asks) -> list[object]:
    async def main(engine):
        full()
        return await asyncio.gather(*(answer(engine, *one) for one in asks), return_exceptions=True)

    return serve(llm, main)


def test_a_request_that_does_not_fit_is_refused_before_it_begins(full):
    llm = tiny_llm(PromptLookup())
    want = facts(llm.generate(TEXTS[0], SHORT)[0])
    assert llm.runner.cache.capacity == 256
    asks = [(TEXTS[0], SHORT), (TEXTS[1], LONG), (TEXTS[0], SHORT)]
    one, refused, two = answers(llm, full, *asks)
    assert isinstance(refused, CacheFull)
    assert "a request does not fit into memory" in str(refused)
    assert "lower max_tokens" in str(refused)
    assert facts(one) == facts(two) == want


def test_as_many_tokens_as_fit_are_as_many_as_the_memory_has(full):
    llm = tiny_llm(PromptLookup())
    want = llm.generate(TEXTS[0], LONG)[0].token_ids
    llm = tiny_llm(PromptLookup())
    (got,) = answers(llm, full, (TEXTS[0], replace(LONG, max_tokens=None)))
    assert got.finish_reason == "length"
    assert got.token_ids == want[: 256 - len(got.prompt_token_ids)]


def test_a_draft_model_without_memory_drafts_nothing(full):
    llm = tiny_llm(DraftModel(small_draft()))
    params = replace(SHORT, max_tokens=300)
    want = facts(llm.generate(TEXTS[0], params)[0])
    llm = tiny_llm(DraftModel(small_draft()))
    llm.generate(TEXTS[1], SHORT)
    llm.runner.cache.ensure(400)
    (got,) = answers(llm, full, (TEXTS[0], params))
    assert facts(got) == want
    assert max(record.num_drafted for record in got.rounds[:20]) > 0
    assert got.rounds[-3].num_drafted == 0


def test_a_draft_model_without_its_first_columns(full):
    llm = tiny_llm(DraftModel(small_draft()))
    got = answers(llm, full, (TEXTS[0], SHORT), (TEXTS[1], SHORT))
    assert [facts(one) for one in got] == [facts(llm.plain().generate(text, SHORT)[0]) for text in TEXTS[:2]]


def test_a_request_that_is_not_measured_is_noticed(full, monkeypatch):
    """Mutant: it breaks off in the middle."""
    monkeypatch.setattr(SpeculativeDecoder, "_check_room", lambda self, seq: None)
    (error,) = answers(tiny_llm(), full, (TEXTS[1], LONG))
    assert isinstance(error, CacheFull)
    assert "a request does not fit" not in str(error)
