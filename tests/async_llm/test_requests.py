"""How requests come, wait, are read and leave."""

import asyncio
import threading
import time
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise

import pytest

from paceline import LLM, AsyncLLM, PromptLookup, SamplingParams, async_llm
from paceline.errors import CacheFull, ConfigError, EngineStopped, QueueFull
from paceline.target import ModelRunner
from tests.async_llm.common import (
    CUMULATIVE,
    DELTA,
    FINAL_ONLY,
    LONG,
    TEXTS,
    answer,
    facts,
    held,
    idle,
    serve,
    submitted,
    tiny_llm,
)  # fmt: skip
from tests.helpers import all_free
from tests.vision.families import make_image, seeing, user

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
TWO = SamplingParams(temperature=1.0, max_tokens=20, seed=5, n=2, ignore_eos=True, stop=("a",))


async def begun(engine: AsyncLLM, *args, **kwargs):
    """An iterator after its first output, and that output."""
    outputs = engine.generate(*args, **kwargs)
    return outputs, await anext(outputs)


@pytest.mark.parametrize("params", [SHORT, TWO])
def test_output_kinds(params, monkeypatch):
    llm, is_read, patience = tiny_llm(PromptLookup()), threading.Event(), [0.0]
    want, step = llm.generate(TEXTS[0], params)[0], llm.decoder.step

    def stepped(seqs):
        is_read.wait(patience[0])  # for the reader, who would miss rounds otherwise
        is_read.clear()
        return step(seqs)

    monkeypatch.setattr(llm.decoder, "step", stepped)

    async def outputs_of(engine, kind):
        outputs, patience[0] = [], 0.0 if kind is FINAL_ONLY else 10.0
        is_read.set()
        async for output in engine.generate(TEXTS[0], replace(params, output_kind=kind)):
            outputs.append(output)
            is_read.set()
        return outputs

    async def main(engine):
        return [await outputs_of(engine, kind) for kind in (DELTA, CUMULATIVE, FINAL_ONLY)]

    deltas, cumulative, final = serve(llm, main)
    assert len(deltas) > 1
    assert all(len(output.outputs) == params.n for output in (*deltas, *cumulative, *final))
    for index, one in enumerate(want.outputs):
        parts = [output.outputs[index] for output in deltas]
        assert "".join(part.text for part in parts) == one.text
        assert [token for part in parts for token in part.token_ids] == one.token_ids
        assert sum(len(part.rounds) for part in parts) == len(one.rounds)
    for before, after in pairwise(cumulative):
        for one, other in zip(before.outputs, after.outputs, strict=True):
            assert other.token_ids[: len(one.token_ids)] == one.token_ids
    assert facts(cumulative[-1]) == facts(final[0]) == facts(want)
    assert [output.finished for output in (*deltas[:-1], deltas[-1], *final)] == [False] * (len(deltas) - 1) + [
        True
    ] * 2


def test_a_slow_reader_gets_rounds_joined():
    llm = tiny_llm()

    async def main(engine):
        outputs, first = await begun(engine, TEXTS[0], SHORT)
        await idle(engine)
        return [first, *[one async for one in outputs]]

    whole, *rest = serve(llm, main)
    assert len(rest) == (not whole.finished)
    for output in rest:
        whole = whole.joined(output)
    assert facts(whole) == facts(llm.generate(TEXTS[0], SHORT)[0])


def test_abort_frees_slots_and_tells_what_there_was():
    llm = tiny_llm(slots=2)
    want, step = llm.generate(TEXTS[0], LONG)[0].token_ids, llm.decoder.step
    llm.decoder.step = lambda seqs: (time.sleep(0.005), step(seqs))[1]  # none is at its end too soon

    async def main(engine):
        outputs, whole = await begun(engine, TEXTS[0], LONG, "one")
        waiting = [asyncio.create_task(answer(engine, TEXTS[1], LONG, name)) for name in ("two", "three")]
        while (engine.num_running, engine.num_waiting) != (2, 1):
            await asyncio.sleep(0.001)
        await engine.abort("three")
        for name in ("one", "two", "unknown"):
            await engine.abort(name)
        assert all_free(llm.runner)
        async for output in outputs:
            whole = whole.joined(output)
        stats = engine.stats()
        assert (stats.aborted, stats.finished, stats.free_slots) == (3, 0, 2)
        return whole, *[await one for one in waiting]

    one, two, three = serve(llm, main)
    assert [output.finish_reason for output in (one, two, three)] == ["abort"] * 3
    assert one.token_ids == want[: len(one.token_ids)] != []
    assert (two.token_ids != [], three.token_ids) == (True, [])


@pytest.mark.parametrize("way", ["close", "cancel", "break"])
def test_a_reader_that_leaves_frees_its_slot(way):
    llm = tiny_llm(slots=1)

    async def main(engine):
        if way == "close":
            outputs, _ = await begun(engine, TEXTS[0], LONG)
            await outputs.aclose()
        elif way == "cancel":
            task = asyncio.create_task(answer(engine, TEXTS[0], LONG))
            while not engine.num_running:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            async for _ in engine.generate(TEXTS[0], LONG):
                break
        return facts(await answer(engine, TEXTS[1], SHORT))

    assert serve(llm, main) == facts(llm.generate(TEXTS[1], SHORT)[0])


def test_what_cannot_be_answered_is_said_at_once():
    llm = tiny_llm(slots=1, max_model_len=64)

    async def main(engine):
        outputs, _ = await begun(engine, TEXTS[0], LONG, "first")
        for prompt, params, error in [
            ([], SHORT, ConfigError),
            (TEXTS[3], SHORT, CacheFull),
            (TEXTS[0], "greedy", ConfigError),
        ]:
            with pytest.raises(error):
                await answer(engine, prompt, params)
        with pytest.raises(ConfigError, match="id"):
            await answer(engine, TEXTS[0], SHORT, "first")
        waits = asyncio.create_task(answer(engine, TEXTS[0], SHORT))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await answer(engine, TEXTS[0], SHORT)
        waits.cancel()
        await outputs.aclose()

    serve(llm, main, max_waiting=1)


def test_waiting_images_are_bounded(monkeypatch):
    llm = LLM(seeing(), max_num_seqs=1)
    monkeypatch.setattr(async_llm, "MAX_WAITING_PIXEL_BYTES", 1)

    async def main(engine):
        outputs, _ = await begun(engine, [1, 5, 6], LONG)
        chat = [user(make_image(1), "what is it?")]
        waits = asyncio.create_task(answer(engine, chat, SHORT))
        while all(one.request is None for one in engine._thread.tickets.values() if one.request_id == "1"):
            await asyncio.sleep(0.005)
        with pytest.raises(QueueFull, match="images"):
            await answer(engine, chat, SHORT)
        await outputs.aclose()
        assert facts(await waits) == facts(llm.generate([chat], SHORT)[0])

    serve(llm, main)


def test_a_long_prompt_is_read_between_the_rounds_of_others(monkeypatch):
    """And a short one that comes after it does not wait for it."""
    llm = tiny_llm(slots=3, chunk=16)
    events, may_go_on = list[tuple[str, tuple[int, ...]]](), threading.Event()
    read, step = ModelRunner.prefill_chunk, llm.decoder.step

    def prefill_chunk(self, slot, *rest):
        events.append(("read", (slot,)))
        return read(self, slot, *rest)

    def stepped(seqs):
        assert not events or may_go_on.wait(30)
        events.append(("round", tuple(seq.slot for seq in seqs)))
        return step(seqs)

    monkeypatch.setattr(ModelRunner, "prefill_chunk", prefill_chunk)
    monkeypatch.setattr(llm.decoder, "step", stepped)

    async def main(engine):
        outputs, _ = await begun(engine, "x", LONG)
        asks = [asyncio.create_task(answer(engine, text, SHORT)) for text in ("0123456789" * 16, "ab")]
        while len(tickets := engine._thread.tickets) < 3 or any(one.request is None for one in tickets.values()):
            await asyncio.sleep(0.001)
        may_go_on.set()
        await asyncio.gather(*asks)
        await outputs.aclose()

    serve(llm, main)
    reads = [place for place, (kind, slots) in enumerate(events) if (kind, slots) == ("read", (1,))]
    assert len(reads) == 9  # of 160 tokens; the last chunk goes with the first round
    for one, other in pairwise(reads):
        assert any(kind == "round" and 0 in slots for kind, slots in events[one + 1 : other])
    assert max(place for place, (kind, slots) in enumerate(events) if kind == "round" and 2 in slots) < reads[-1]


def test_slots_are_given_in_turn():
    """Ten answers to one prompt do not keep a later request from the only slot."""
    llm, ends = tiny_llm(slots=1), list[str]()
    may_go_on = held(llm)
    many = SamplingParams(temperature=1.0, seed=1, n=10, max_tokens=8, ignore_eos=True)

    async def named(engine, name, params):
        await answer(engine, TEXTS[0], params, name)
        ends.append(name)

    async def main(engine):
        many_task = asyncio.create_task(named(engine, "many", many))
        await submitted(engine, 1)
        others = [asyncio.create_task(named(engine, name, SHORT)) for name in ("second", "third")]
        await submitted(engine, 3)
        may_go_on.set()
        await asyncio.gather(many_task, *others)

    serve(llm, main)
    assert ends == ["second", "third", "many"]


def test_a_request_with_many_answers_leaves_a_slot_to_others():
    """A short request begins while all its answers are decoded, and ends before any of them."""
    llm, sizes, may_go_on = tiny_llm(slots=8), list[int](), threading.Event()
    step = llm.decoder.step
    llm.decoder.step = lambda seqs: (sizes.append(len(seqs)), 7 in sizes and may_go_on.wait(30), step(seqs))[2]
    many = SamplingParams(temperature=1.0, seed=1, n=20, max_tokens=60, ignore_eos=True)

    async def main(engine):
        task = asyncio.create_task(answer(engine, TEXTS[0], many, "many"))
        while 7 not in sizes:
            await asyncio.sleep(0)
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        short = asyncio.create_task(answer(engine, TEXTS[1], params, "short"))
        await submitted(engine, 2)
        may_go_on.set()
        await asyncio.gather(task, short)

    serve(llm, main)
    assert max(place for place, size in enumerate(sizes) if size == 8) < 60
    assert max(sizes) == 8
    assert sizes.count(8) <= 2, "only the short request has the last slot"


def test_drain_and_shutdown():
    llm = tiny_llm()
    want = facts(llm.generate(TEXTS[0], SHORT)[0])

    step = llm.decoder.step
    llm.decoder.step = lambda seqs: (time.sleep(0.01), step(seqs))[1]  # a long answer is not at its end too soon

    async def main():
        engine = AsyncLLM(llm)
        short = asyncio.create_task(answer(engine, TEXTS[0], SHORT))
        long = asyncio.create_task(answer(engine, TEXTS[0], replace(LONG, max_tokens=None)))
        await asyncio.sleep(0)
        while engine.num_waiting:
            await asyncio.sleep(0.001)
        drained = asyncio.create_task(engine.drain(1.0))
        await asyncio.sleep(0)
        with pytest.raises(EngineStopped):
            await answer(engine, TEXTS[0], SHORT)
        assert facts(await short) == want
        await drained
        assert (await long).finish_reason in ("abort", "length")
        assert engine.is_alive
        assert all_free(llm.runner)
        engine.shutdown()
        engine.shutdown()
        assert not engine.is_alive

        other = AsyncLLM(llm)
        task = asyncio.create_task(answer(other, TEXTS[0], LONG))
        while not other.num_running:
            await asyncio.sleep(0.001)
        other.shutdown()
        with pytest.raises(EngineStopped, match="shut down"):
            await task

    asyncio.run(main())
    assert all_free(llm.runner)
    assert facts(llm.generate(TEXTS[0], SHORT)[0]) == want


def test_statistics_add_up():
    llm = tiny_llm(PromptLookup())

    async def main(engine):
        outputs = await asyncio.gather(*(answer(engine, text, params) for text in TEXTS for params in (SHORT, TWO)))
        return outputs, engine.stats()

    outputs, stats = serve(llm, main)
    answers = [one for output in outputs for one in output.outputs]
    rounds = [one for answer in answers for one in answer.rounds]
    assert (stats.finished, stats.aborted, stats.failed, stats.retried) == (10, 0, 0, 0)
    assert stats.prompt_tokens == sum(len(output.prompt_token_ids) * len(output.outputs) for output in outputs)
    assert stats.generated_tokens == sum(len(one.token_ids) for one in answers)
    assert stats.draft_tokens == sum(one.num_nodes for one in rounds)
    assert stats.accepted_tokens == sum(stats.accepted_by_position) == sum(one.num_accepted for one in rounds)
    assert list(stats.accepted_by_position) == sorted(stats.accepted_by_position, reverse=True)
    assert 0 < stats.rounds <= len(rounds)
    assert stats.seconds > 0


def test_the_llm_may_be_used_meanwhile():
    llm = tiny_llm(PromptLookup(), slots=3)
    want = facts(llm.generate(TEXTS[1], TWO)[0])
    got, failed = list[object](), list[Exception]()

    def work():
        try:
            for turn in range(6):
                if turn % 2:
                    got.append(facts(llm.generate(TEXTS[1], TWO)[0]))
                else:
                    params = replace(TWO, n=1)
                    got.append([facts_of_stream([*llm.stream(TEXTS[1], params)]), want[1]])
        except Exception as error:
            failed.append(error)

    def facts_of_stream(chunks):
        done = chunks[-1].completion
        assert "".join(chunk.text for chunk in chunks) == done.text
        return (done.text, done.token_ids, done.finish_reason, done.stop_reason, done.logprobs)

    async def main(engine):
        async with aclosing(engine.generate(TEXTS[0], replace(LONG, max_tokens=None))) as outputs:
            await anext(outputs)
            await asyncio.to_thread(work)
        assert facts(await answer(engine, TEXTS[1], TWO)) == want

    serve(llm, main)
    assert failed == []
    assert got == [want] * 6
    assert threading.active_count() < 20


@pytest.mark.usefixtures("unchecked_types")
def test_a_model_in_place_of_an_llm_is_refused():
    with pytest.raises(ConfigError, match=r"AsyncLLM\.llm has a wrong value\. Got: 'smollm2-135m'.*an instance of LLM"):
        AsyncLLM("smollm2-135m")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="AsyncLLM takes no 'drafter'"):
        AsyncLLM(drafter="lookup")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"max_waiting has a wrong value\. Got: -1"):
        AsyncLLM(tiny_llm(PromptLookup()), max_waiting=-1)
