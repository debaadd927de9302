"""A cache that is smaller than what its sequences need: they wait and give way, and none is lost."""

import asyncio
from dataclasses import replace

import pytest
import torch

from paceline import LLM, Fixed, PromptLookup, SamplingParams
from paceline.attention.columns import Reserved
from paceline.attention.kv_cache import SlotCache
from paceline.engine import queue
from paceline.engine.scheduler import Scheduler
from paceline.errors import CacheFull
from paceline.server.memory import storages
from paceline.system import pages
from tests.async_llm.common import TEXTS, answer, facts, serve, tiny_llm
from tests.helpers import on_torch, talking, tokenizer
from tests.tiny import tiny_model

COLUMN = 2 * 2 * 2 * 8 * 4  # bytes of the tiny model: keys and values of 2 layers, 2 heads of 8 floats


def limited(columns: int, model=None, **options) -> LLM:
    made = LLM(model or talking(max_position_embeddings=512), kv_cache_memory_bytes=columns * COLUMN, **options)
    assert made.runner.cache.is_lazy
    return made


MIXED = [(text, SamplingParams(t, seed=5, max_tokens=most, ignore_eos=True)) for text, t, most in zip(
    TEXTS * 2, (0.0, 1.0) * 5, (150, 8, 24, 100, 12, 200, 150, 8, 150, 30), strict=True)]  # fmt: skip


@pytest.mark.parametrize("drafter", [None, PromptLookup])
def test_a_cache_of_a_third_of_the_need(drafter):
    """Answers wait and give way; none is lost, and all columns lie within the limit, but for the drafts of a round."""
    llm, most = limited(384, drafter=drafter and drafter(), policy=Fixed(3), max_num_seqs=6), list[int]()
    cache = llm.runner.cache

    async def main(engine):
        got = asyncio.gather(*(answer(engine, *one) for one in MIXED))
        while not got.done():
            most.append(sum(-(-written // 64) for written in cache._written) * 64)
            await asyncio.sleep(0.001)
        return await got, engine.stats().preemptions

    got, count = serve(llm, main)
    whole = [*zip(*MIXED, strict=True)]
    assert [facts(one) for one in got] == [facts(one) for one in tiny_llm().generate(list(whole[0]), list(whole[1]))]
    assert [facts(one) for one in llm.generate(list(whole[0]), list(whole[1]))] == [facts(one) for one in got]
    assert count > 0
    assert max(most) <= 384 + 64 * bool(drafter)
    assert not any(cache._written)
    assert not cache.reserved._columns


LIMITS = {
    "a limit that is not kept": (Reserved, "fits", lambda self, columns, without=(): True),
    "columns that are lost when the tensors grow": (
        SlotCache, "_grown", lambda self, old, to: self._zeros(old, old.shape[1], old.shape[3], to)),
}  # fmt: skip


@pytest.mark.parametrize("mutant", LIMITS)
def test_faults_of_the_limit_are_noticed(mutant, monkeypatch):
    monkeypatch.setattr(*LIMITS[mutant])
    with pytest.raises(AssertionError):
        test_a_cache_of_a_third_of_the_need(None)


def test_what_never_fits_is_refused_at_once():
    llm = limited(256, max_num_seqs=4)
    with pytest.raises(CacheFull, match=r"does not fit into memory.*at most 256\. Fix: .*raise kv_cache_memory_bytes"):
        llm.generate(TEXTS[0], SamplingParams(max_tokens=250))
    (whole,) = llm.generate(TEXTS[0], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(whole.prompt_token_ids + whole.token_ids) == 256

    async def main(engine):
        return await asyncio.gather(
            answer(engine, TEXTS[0], SamplingParams(max_tokens=250)),
            answer(engine, TEXTS[0], SamplingParams(max_tokens=None, ignore_eos=True)),
            return_exceptions=True,
        )

    refused, again = serve(llm, main)
    assert isinstance(refused, CacheFull)
    assert again.token_ids == whole.token_ids
    with pytest.raises(CacheFull, match="less than its first columns"):
        limited(63)


def test_where_a_text_cannot_be_read_again_requests_wait():
    """In torch, bits depend on the pass: what an answer may need is reserved with its slot."""
    model = replace(on_torch(tiny_model("llama", max_position_embeddings=512)), tokenizer=tokenizer())
    llm = limited(512, model, max_num_seqs=6)

    async def main(engine):
        got = await asyncio.gather(*(answer(engine, *one) for one in MIXED[:6]))
        return got, engine.stats().preemptions

    got, count = serve(llm, main)
    assert count == 0
    assert [len(one.token_ids) for one in got] == [params.max_tokens for _, params in MIXED[:6]]


def test_bytes_are_those_of_the_columns_that_are_written():
    """And a model's memory budget counts these alone, whatever the limit is."""
    llm = limited(1 << 12, max_num_seqs=8)
    cache, loaded = llm.runner.cache, [llm.loaded, llm.runner, llm.decoder]
    own = sum(storages(*loaded).values())
    assert own - sum(storages(llm.loaded.model).values()) < cache.keys[0].nbytes
    stream = llm.stream(TEXTS[3], SamplingParams(max_tokens=300, ignore_eos=True))
    for size in (192, 256, 320, 384):
        while cache._written[0] < size - 63:
            next(stream)
        assert cache.num_bytes == size * COLUMN
        assert sum(storages(*loaded).values()) == own + size * COLUMN
    stream.close()
    assert cache.num_bytes == 0


def test_tensors_grow_to_the_limit_at_once():
    llm = limited(448, max_num_seqs=2)
    (output,) = llm.generate(TEXTS[3], SamplingParams(max_tokens=160, ignore_eos=True))
    assert len(output.token_ids) == 160
    assert llm.runner.cache.capacity == 448


def test_columns_are_cleared_where_pages_cannot_be_freed(monkeypatch):
    monkeypatch.setattr(pages, "_LIBC", None)
    llm = limited(256, max_num_seqs=1)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    want = facts(llm.generate(TEXTS[0], params)[0])
    for layer in (*llm.runner.cache.keys, *llm.runner.cache.values):
        layer[:, :, : llm.runner.cache._written[0]] = torch.nan
    assert facts(llm.generate(TEXTS[0], params)[0]) == want


@pytest.mark.parametrize("passed_s", [0.0, 1e9])
def test_short_answers_pass_a_long_one_for_some_time(passed_s, monkeypatch):
    """For ever, they would leave it no memory."""
    monkeypatch.setattr(queue, "PASSED_S", passed_s)
    llm = limited(384, max_num_seqs=6)

    def add(text, most):
        request = llm.open_request(text, SamplingParams(max_tokens=most, ignore_eos=True))
        shared.add(request)
        return request

    shared = Scheduler(llm.decoder, lambda: True, is_shared=True)
    long = add(TEXTS[3] * 2, 16)
    shared.step()
    shared.preempt(long.answers[0])
    for most in (10, 17, 24, 31, 38):
        add(TEXTS[0], most)
    for _ in range(100):
        for request in shared.step().updated:
            if request.is_finished and request is not long:
                add(TEXTS[0], 30)
    assert long.is_finished == (passed_s == 0)


def test_an_open_stream_holds_its_columns():
    llm = limited(256, max_num_seqs=2)
    stream = llm.stream(TEXTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    with pytest.raises(CacheFull, match="the cache is full"):
        llm.generate(TEXTS[1], SamplingParams(max_tokens=100, ignore_eos=True))
    stream.close()
    assert llm.generate(TEXTS[1], SamplingParams(max_tokens=100, ignore_eos=True))[0].token_ids
