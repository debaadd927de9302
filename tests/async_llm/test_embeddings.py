"""An embedding beside answers is that of its text alone, and the answers are theirs."""

import asyncio

import pytest

from paceline import AsyncLLM, PoolingParams, PromptLookup, SamplingParams
from paceline.errors import CacheFull, EngineStopped, QueueFull
from paceline.target.readings import MeanState
from tests.async_llm.common import LONG, TEXTS, answer, facts, idle, serve, tiny_llm

WAYS = [PoolingParams(), PoolingParams(pooling="mean"), PoolingParams(dimensions=8)]
PARAMS = SamplingParams(max_tokens=12, temperature=0.7, seed=4)


def is_exact(drafter=None, **options) -> bool:
    """Whether embeddings of texts beside as many answers, in chunks, and the answers are those that each has alone."""
    llm = tiny_llm(drafter, chunk=8, **options)
    want = [llm.embed(text, way)[0].outputs for way in WAYS for text in TEXTS], llm.generate(TEXTS, PARAMS)

    async def main(engine: AsyncLLM):
        made = [asyncio.create_task(engine.embed(text, way)) for way in WAYS for text in TEXTS]
        answers = [asyncio.create_task(answer(engine, text, PARAMS)) for text in TEXTS]
        again = [asyncio.create_task(engine.embed(text, way)) for way in WAYS for text in TEXTS]
        return [one.outputs for one in await asyncio.gather(*made, *again)], await asyncio.gather(*answers)

    vectors, answers = serve(llm, main)
    assert [facts(one)[0][1] for one in answers] == [one.token_ids for one in want[1]]
    return vectors == want[0] * 2


@pytest.mark.parametrize("drafter", [lambda: None, PromptLookup])
def test_beside_answers(drafter):
    assert is_exact(drafter())


def test_a_neighbours_rows_are_noticed(monkeypatch):
    """Mutant: texts that are read by turns have one sum."""
    held = [0.0]
    one_sum = property(lambda self: held[0], lambda self, value: held.__setitem__(0, value))
    monkeypatch.setattr(MeanState, "_sum", one_sum, raising=False)
    assert not is_exact()


def test_who_leaves_frees_the_slot():
    llm = tiny_llm(slots=1, chunk=1)

    async def main(engine: AsyncLLM):
        task = asyncio.create_task(engine.embed(TEXTS[3], PoolingParams(pooling="mean")))
        while not engine.num_running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(engine)
        assert engine.stats().aborted == 1
        task = asyncio.create_task(engine.embed(TEXTS[3], PoolingParams(pooling="mean"), "one"))
        while not engine.num_running:
            await asyncio.sleep(0.001)
        await engine.abort("one")
        with pytest.raises(EngineStopped, match="aborted"):
            await task
        return await engine.embed("x")

    assert serve(llm, main).outputs == llm.embed("x")[0].outputs


def test_refusals():
    llm = tiny_llm(slots=1)

    async def main(engine: AsyncLLM):
        with pytest.raises(CacheFull):
            await engine.embed([5] * 600)
        busy = asyncio.create_task(answer(engine, "abc", LONG, "busy"))
        while not engine.num_running:
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(engine.embed("x"))
        await asyncio.sleep(0.01)
        with pytest.raises(QueueFull):
            await engine.embed("y")
        await engine.abort("busy")
        await busy
        return await waiting

    assert serve(llm, main, max_waiting=1).outputs == llm.embed("x")[0].outputs
