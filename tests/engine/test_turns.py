"""Who comes next: priorities, accounts, turns; and what becomes of those that wait again."""

import asyncio
import time
from collections import Counter

import pytest

from paceline import LLM, SamplingParams
from paceline.engine import queue
from paceline.engine.request import Answer, Request
from paceline.engine.scheduler import Scheduler
from paceline.errors import ConfigError, EngineStopped
from tests.async_llm.common import TEXTS, answer, held, serve, submitted, tiny_llm
from tests.exactness.test_identity import TARGET
from tests.helpers import all_free, sequence

LONG = SamplingParams(max_tokens=60, ignore_eos=True)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(queue, "PATIENCE_S", 0.005)
    monkeypatch.setattr(queue, "QUANTUM_S", 0.01)
    monkeypatch.setattr(queue, "QUANTUM_TOKENS", 1)
    monkeypatch.setattr(queue, "_READINGS", 0)


def order(llm: LLM, *asks) -> list[int]:
    """The places of requests in the order of their ends. Each begins to wait before the next."""
    ended, may_go_on = list[int](), held(llm)

    async def one(engine, place, text, params, priority):
        await answer_of(engine, text, params, priority)
        ended.append(place)

    async def main(engine):
        tasks = list[asyncio.Task]()
        for place, (text, params, priority) in enumerate(asks):
            tasks.append(asyncio.create_task(one(engine, place, text, params, priority)))
            await submitted(engine, place + 1)
        may_go_on.set()
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
    for each in running:
        each.seq.token_ids += [7] * 64
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
    running[2].served_s = 50.0
    assert [*queue.yielding(one, running[:3], lambda given: len(given) == 3)] == running[:3]
    running[1].served_s = 50.0  # all its times count
    assert queue.yielding(one, running[:3], lambda given: True) == [running[1]]
    running[1].served_s, one.since = 0.0, now
    assert queue.yielding(one, running, lambda given: True) == [running[3]]
    one.since, running[0].read_s = now - 1, 20.0
    assert queue.yielding(one, running[:3], lambda given: True) == [running[0]]
    running[0].seq.token_ids.pop()
    assert queue.yielding(one, running[:1], lambda given: True) == ()
    one.served_s = 3.0  # no new one: each reading is to be worth it
    assert queue.yielding(one, running[:3], lambda given: True) == [running[1]]
    for place, answer_ in enumerate(running):
        answer_.since = now + place / 1e6
    assert queue.yielding(one, running[:3], lambda given: True) == ()
    assert queue.growing(running[:3], lambda one: one is running[2]) is running[1]
    assert queue.growing([running[0], running[3], running[4]], lambda one: one is running[3]) is running[3]
