"""An answer that gives its slot goes on later with the tokens that it would have had, whoever drafts."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import replace

import pytest
import regex

from paceline import LLM, Fixed, PromptLookup, SamplingParams
from paceline.attention.columns import Reserved
from paceline.attention.kv_cache import SlotCache
from paceline.core.structured import StructuredOutputsParams
from paceline.engine import queue
from paceline.engine.loop import SpeculativeDecoder
from paceline.engine.request import Answer, Request
from paceline.engine.scheduler import Scheduler
from paceline.errors import CacheFull, ConfigError, EngineStopped
from paceline.target import make_runner
from tests.async_llm.common import TEXTS, answer, facts, run, schedule, serve, tiny_llm, wrong
from tests.engine.common import push
from tests.exactness.drafters import DRAFTERS, runner_for
from tests.exactness.test_identity import REQUESTS, TARGET, future
from tests.helpers import all_free, assert_identical, loaded, on_torch, reading_apart, sequence, talking, tokenizer
from tests.structured.common import FORMS, byte_tokenizer
from tests.tiny import tiny_model
from tests.vision.families import make_image, seeing, user

LONG = SamplingParams(max_tokens=60, ignore_eos=True)


def mistakes(llm: LLM, seed: int, prompts=TEXTS, **options) -> tuple[list[int], int]:
    """The wrong answers of a schedule, and how often answers gave their slots."""
    asks, counts = schedule(seed, 14, prompts), list[int]()

    async def main(engine):
        got = await run(engine, asks)
        counts.append(engine.stats().preemptions)
        return got

    return wrong(llm, asks, serve(llm, main, **options)), counts[0]


@pytest.mark.diagonal
@pytest.mark.parametrize("often", [1.0, 0.3])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter(name, slots, often, monkeypatch):
    push(monkeypatch, often)
    drafter = DRAFTERS[name](TARGET, future())
    order = random.Random(slots).sample(REQUESTS, len(REQUESTS))
    assert_identical(runner_for(name, slots), drafter, order, 4, 24)


REREAD = "draft model", "self int4", "lookup recent", "suffix", "eagle", "eagle3", "peagle", "dflash", "mtp", "medusa"


@pytest.mark.parametrize("name", REREAD)
def test_drafts_are_those_of_an_answer_that_kept_its_slot(name, monkeypatch):
    """What drafters read of the target is there again; a text is read apart, so that they draft in each round."""
    asked, both = [(REQUESTS[0][0], SamplingParams(0.7, max_tokens=20, logprobs=2))], list[list[object]]()
    for often in (0, 1.0):
        with monkeypatch.context() as patched:
            push(patched, often)
            on, drafter = reading_apart(make_runner(loaded(), 1)), DRAFTERS[name](TARGET, future())
            (seq,) = assert_identical(on, drafter, asked, 4, 24)
        both.append([seq.rounds, seq.logprobs, seq.origins, seq.sources])
    assert both[0] == both[1]
    assert sum(record.num_nodes for record in both[0][0])


@pytest.mark.parametrize("often", [1.0, 0.3])
@pytest.mark.parametrize("drafter", [None, PromptLookup])
def test_streams(drafter, often, monkeypatch):
    """Stop strings, log-probabilities, two answers, readers that leave: nothing is sent twice or lost."""
    push(monkeypatch, often)
    llm = tiny_llm(drafter and drafter(), chunk=16)
    for size in (0, 1 << 30):
        wrong_ones, count = mistakes(llm, 7, prefix_cache_bytes=size)
        assert wrong_ones == []
        assert count > 20


def test_images(monkeypatch):
    push(monkeypatch, 0.5)
    llm = LLM(seeing(), drafter=PromptLookup(), max_num_seqs=3)
    llm.runner.chunk = 8
    small, wide = make_image(1), make_image(2, 60, 24)
    chats = [[user(small, "what is it?")], [user("see ", wide, " then say")], [user(wide, " or ", small, "?")]]
    assert mistakes(llm, 5, prompts=chats)[0] == []


def test_forms_and_prompt_logprobs(monkeypatch):
    options = [
        SamplingParams(
            1.0,
            seed=3,
            max_tokens=30,
            logprobs=1,
            prompt_logprobs=1,
            structured_outputs=StructuredOutputsParams(**form),
        )
        for form in (FORMS["json"][0], FORMS["regex"][0])
    ]
    model = replace(loaded(), tokenizer=byte_tokenizer())
    llm = LLM(model, drafter=PromptLookup(), policy=Fixed(3), max_num_seqs=2)
    llm.runner.chunk = 16
    want = llm.generate([TEXTS[0], TEXTS[3]], options)
    push(monkeypatch, 0.5)
    got = llm.generate([TEXTS[0], TEXTS[3]], options)
    for one, other in zip(got, want, strict=True):
        assert facts(one) == facts(other)
        assert one.prompt_logprobs == other.prompt_logprobs
    assert regex.fullmatch(FORMS["json"][1], got[0].text)


def test_recurrent_layers(monkeypatch):
    push(monkeypatch, 0.5)
    requests = [([5, 9, 31, 7, 5, 9, 31, 8] * 5, SamplingParams(t, max_tokens=24)) for t in (0.0, 1.0)]
    target = loaded("qwen3_next")
    assert target.is_native
    assert_identical(make_runner(target, 2), PromptLookup(), requests)


def test_times_and_counts(monkeypatch):
    llm = tiny_llm(PromptLookup(), slots=1)
    push(monkeypatch, 1.0)
    (output,) = llm.generate(TEXTS[0], SamplingParams(max_tokens=12, ignore_eos=True))
    assert output.metrics.rounds == len(output.rounds) == llm._stats.preemptions + 1
    assert llm._stats.prompt_tokens == len(output.prompt_token_ids)
    assert all(record.queue_s > 0 and record.prefill_s > 0 for record in output.rounds)
    assert output.num_cached_tokens == 0


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
        SlotCache, "_grown", lambda self, old, to: self._columns(old, old.shape[1], to, old.shape[3])),
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


def test_an_open_stream_holds_its_columns():
    llm = limited(256, max_num_seqs=2)
    stream = llm.stream(TEXTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    with pytest.raises(CacheFull, match="the cache is full"):
        llm.generate(TEXTS[1], SamplingParams(max_tokens=100, ignore_eos=True))
    stream.close()
    assert llm.generate(TEXTS[1], SamplingParams(max_tokens=100, ignore_eos=True))[0].token_ids


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(queue, "PATIENCE_S", 0.005)
    monkeypatch.setattr(queue, "QUANTUM_S", 0.01)
    monkeypatch.setattr(queue, "_READINGS", 0)


def order(llm: LLM, *asks) -> list[int]:
    """The places of requests in the order of their ends. Each begins to wait before the next."""
    ended = list[int]()

    async def one(engine, place, text, params, priority):
        await answer_of(engine, text, params, priority)
        ended.append(place)

    async def main(engine):
        tasks = list[asyncio.Task]()
        for place, (text, params, priority) in enumerate(asks):
            tasks.append(asyncio.create_task(one(engine, place, text, params, priority)))
            while engine.num_running + engine.num_waiting <= place and not ended:
                await asyncio.sleep(0)
            await asyncio.sleep(0.003)
        await asyncio.gather(*tasks)

    serve(llm, main)
    return ended


async def answer_of(engine, text, params, priority):
    async for output in engine.generate(text, params, priority=priority):
        whole = output
    return whole


SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
LONGEST = SamplingParams(max_tokens=150, ignore_eos=True)


@pytest.mark.usefixtures("quick")
def test_a_short_answer_does_not_wait_for_long_ones():
    assert order(tiny_llm(slots=1), (TEXTS[0], LONGEST, 0), (TEXTS[1], LONGEST, 0), (TEXTS[2], SHORT, 0))[0] == 2


def test_it_would_wait_where_none_gives_way(monkeypatch):
    """Mutant."""
    monkeypatch.setattr(Scheduler, "_make_way", lambda self: None)
    assert order(tiny_llm(slots=1), (TEXTS[0], LONGEST, 0), (TEXTS[2], SHORT, 0)) == [0, 1]


def test_a_better_priority_takes_a_slot_at_once():
    llm = tiny_llm(slots=1)
    asks = [(TEXTS[0], LONGEST, 1), (TEXTS[1], LONG, 1), (TEXTS[2], LONG, 0), (TEXTS[2], LONG, -3)]
    assert order(llm, *asks) == [3, 2, 1, 0]  # one that had a slot goes behind those of its priority that had none


def test_priorities_of_generate():
    llm, begun = tiny_llm(slots=1), list[list[int]]()
    admit = llm.decoder.admit
    llm.decoder.admit = lambda seq, is_used=None: begun.append(seq.prompt_ids) or admit(seq, is_used)
    outputs = llm.generate(list(TEXTS[:3]), SHORT, priority=[2, 0, 1])
    assert begun == [outputs[place].prompt_token_ids for place in (1, 2, 0)]
    with pytest.raises(ConfigError, match="priority and prompts differ in number"):
        llm.generate(TEXTS[0], SHORT, priority=[1, 2])
    with pytest.raises(ConfigError, match="lower ones are answered first"):
        SamplingParams(extra_args={"priority": "high"})


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("way", ["abort", "drain", "shutdown"])
def test_ends_while_answers_wait_again(way):
    llm = tiny_llm(slots=2)

    async def main(engine):
        tasks = [asyncio.create_task(answer(engine, text, LONG, text)) for text in TEXTS]
        while engine.stats().preemptions < 3:
            await asyncio.sleep(0.001)
        if way == "abort":
            for text in TEXTS:
                await engine.abort(text)
        elif way == "drain":
            await engine.drain(0.05)
        else:
            engine.shutdown()
        got = await asyncio.gather(*tasks, return_exceptions=True)
        assert all_free(llm.runner)
        return got

    got, want = serve(llm, main), llm.generate(list(TEXTS), LONG)
    if way == "shutdown":
        assert all(isinstance(one, EngineStopped) for one in got)
    else:
        assert all(one.token_ids == whole.token_ids[: len(one.token_ids)] for one, whole in zip(got, want, strict=True))


def test_an_error_of_a_second_admission_ends_that_request_alone(monkeypatch):
    push(monkeypatch, 0.5)
    llm = tiny_llm(slots=2)
    admit = llm.decoder.admit

    def failing(seq, is_used=None):
        if seq.num_output and seq.params.max_tokens == 24:
            raise RuntimeError("no")
        return admit(seq, is_used)

    llm.decoder.admit = failing
    one, other = SamplingParams(max_tokens=24, ignore_eos=True), SamplingParams(max_tokens=20, ignore_eos=True)
    failed, whole = llm.generate(list(TEXTS[:2]), [one, other], return_exceptions=True)
    assert str(failed) == "no"
    assert facts(whole) == facts(tiny_llm().generate(TEXTS[1], other)[0])
    assert all_free(llm.runner)


def waiting(*asks: tuple[str, int]) -> list[Answer]:
    """Answers of these accounts and priorities, in the order in which they began to wait."""
    made = [SamplingParams(extra_args={"priority": priority} | {"account": account}) for account, priority in asks]
    return [Request.of(None, sequence(TARGET, [5], params)).answers[0] for params in made]


def test_accounts_take_turns():
    answers = waiting(("a", 0), ("a", 0), ("b", 0), ("a", -1), ("b", 0))
    queued, held, order = queue.Queue(), Counter[str](), list[int]()
    for one in answers:
        queued.add(one)
    while queued:
        one = queued.heads(held)[0]
        queued.remove(one)
        held[one.seq.params.account] += 1
        order.append(answers.index(one))
    assert order == [3, 2, 0, 4, 1]
    assert not queued


def test_one_that_had_a_slot_waits_behind_newer_ones(monkeypatch):
    old, new, newer = waiting(("", 0), ("", 0), ("", 0))
    queued, old.served_s = queue.Queue(), 3600.0
    for one in (old, new):
        queued.add(one)
    assert queued.heads({})[0] is new
    queued.remove(new)
    later = time.perf_counter() + 11
    monkeypatch.setattr(time, "perf_counter", lambda: later)
    queued.add(newer)
    assert queued.heads({})[0] is old  # ten seconds at most


def test_who_gives_a_slot():
    """The worst priority at once; else, after a wait, who had its quantum: of the largest account, the longest."""
    one, *running = waiting(("c", 0), ("a", 0), ("a", 0), ("b", 0), ("b", 1), ("a", -1))
    now = time.perf_counter()
    one.since = now - 1
    for place, answer_ in enumerate(running):
        answer_.since = now - 100 + place
    assert [running.index(found) for found in queue.yielding(one, running, lambda given: len(given) == 4)] == [
        3,
        0,
        1,
        2,
    ]
    assert queue.yielding(one, running, lambda given: len(given) == 5) == ()
    one.since = now
    assert queue.yielding(one, running, lambda given: True) == [running[3]]
    one.since, running[0].read_s = now - 1, 20.0
    assert queue.yielding(one, running[:3], lambda given: True) == [running[0]]
    one.served_s = 3.0  # no new one: each reading is to be worth it
    assert queue.yielding(one, running[:3], lambda given: True) == [running[1]]
    for answer_ in running:
        answer_.since = now
    assert queue.yielding(one, running[:3], lambda given: True) == ()
    assert queue.newest([running[0], running[3], running[4]]) is running[3]


# Mutants


def read_prompt_alone(self, seq, is_used=None):
    texts, seq.token_ids = seq.token_ids, list(seq.prompt_ids)
    chunks = ADMIT(self, seq, is_used)
    seq.token_ids = texts if seq.rounds else seq.token_ids
    return iter(()) if seq.rounds else chunks


def send_again(self, answer):
    PREEMPT(self, answer)
    answer.sent = (0, 0)


def forget_the_last(self, answer):
    PREEMPT(self, answer)
    if answer.seq.num_output > 1:
        for each in (answer.seq.token_ids, answer.seq.origins, answer.seq.sources):
            each.pop()


ADMIT, PREEMPT = SpeculativeDecoder.admit, Scheduler.preempt
MUTANTS = {
    "the answer is not read again": (SpeculativeDecoder, "admit", read_prompt_alone),
    "what was sent is sent again": (Scheduler, "preempt", send_again),
    "a token is lost": (Scheduler, "preempt", forget_the_last),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_faults_are_noticed(mutant, monkeypatch):
    owner, name, fault = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, fault)
    push(monkeypatch, 0.3)
    try:
        assert mistakes(tiny_llm(), 7)[0]
    except Exception:
        return  # noticed by the engine
