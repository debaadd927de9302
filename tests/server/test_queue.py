"""Who is answered first, and what a server says of it."""

import asyncio
import threading
import time

import pytest

from paceline.async_llm import AsyncLLM
from paceline.engine import queue
from tests.server.helpers import ASK, server, tiny_llm
from tests.server.test_metrics import read

CHAT = "/v1/chat/completions"
LONG = {**ASK, "max_tokens": 300, "ignore_eos": True, "temperature": 0}


async def after(client, number: int) -> None:
    while client.engine.num_running + client.engine.num_waiting < number:
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("quick", ["priority", "turns", "keys"])
def test_a_short_answer_among_long_ones(quick, monkeypatch):
    """A better priority goes first at once; without one, long answers give way. Their texts stay as they are."""
    if quick != "priority":
        monkeypatch.setattr(queue, "PATIENCE_S", 0.0)
        monkeypatch.setattr(queue, "QUANTUM_S", 0.05)
    keys = ["key-of-a", "key-of-b"] if quick == "keys" else []
    decoder, all_wait = tiny_llm().decoder, threading.Event()
    step = decoder.step
    monkeypatch.setattr(decoder, "step", lambda seqs: (all_wait.wait(30), step(seqs))[1])
    short = {**ASK, "max_tokens": 4} | ({"priority": -1} if quick == "priority" else {})

    async def main():
        async with server(api_keys=keys) as client:

            async def ask(body, key):
                answer = await client.post(CHAT, json=body, headers={"Authorization": f"Bearer {key}"} if keys else {})
                return time.perf_counter(), answer.json()

            key = keys[0] if keys else ""
            all_wait.set()
            alone = (await ask(LONG, key))[1]["choices"]
            all_wait.clear()
            tasks = [asyncio.create_task(ask(LONG, key)) for _ in range(4)]
            await after(client, 4)
            behind = asyncio.create_task(ask(short, keys[-1] if keys else ""))
            await after(client, 5)
            all_wait.set()
            end, told = await behind
            others = [await task for task in tasks]
            return end, told, others, alone, (await client.get("/metrics")).text

    end, told, others, alone, text = asyncio.run(main())
    assert told["usage"]["completion_tokens"] == 4
    assert all(end < other for other, _ in others)
    assert all(answer["choices"] == alone for _, answer in others)
    assert read(text)["paceline:num_preemptions_total",] > 0


@pytest.mark.parametrize("priority", ["high", 1.5, 2**40])
def test_priorities_that_are_none(priority):
    async def main():
        async with server() as client:
            return await client.post(CHAT, json={**ASK, "priority": priority})

    answer = asyncio.run(main())
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")


def test_the_time_in_a_queue_is_that_of_the_last_answers(monkeypatch):
    engine = AsyncLLM(tiny_llm())
    try:
        assert engine.queue_s == 1
        now = time.perf_counter()
        engine._thread.ends.extend(now - 40 + 2 * place for place in range(20))
        for waiting, seconds in ((0, 2), (7, 14), (500, 60)):
            monkeypatch.setattr(AsyncLLM, "num_waiting", waiting)
            assert engine.queue_s in (seconds, seconds + 1)
    finally:
        engine.shutdown()
