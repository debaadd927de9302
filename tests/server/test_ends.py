"""Clients that go and answers that take too long: the slot is free soon after, and the metrics know."""

import asyncio

import httpx
import pytest

from tests.server.helpers import ASK, listening, server, slowed
from tests.server.test_connections import connect, request, wait_until

CHAT = "/v1/chat/completions"
LONG = {**ASK, "max_tokens": 2000, "ignore_eos": True, "temperature": 0}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_a_client_that_goes_frees_its_slots(stream, n):
    body = {**LONG, "stream": stream, "n": n, "temperature": 0.7 if n > 1 else 0}
    with listening() as (url, engine, service):
        with connect(url) as raw:
            raw.sendall(request(body))
            wait_until(lambda: engine.num_running)
        wait_until(lambda: not engine.num_running and sum(service.metrics.finished.values()) == n)
        assert service.metrics.finished["abort"] == n, "the answer was finished for nobody"
        assert httpx.post(url + CHAT, json=ASK, timeout=30).status_code == 200


def test_a_client_that_goes_while_it_waits():
    async def ask():
        async with server() as client:
            long = {**LONG, "max_tokens": 400}
            running = [asyncio.create_task(client.post(CHAT, json=long)) for _ in range(2)]
            waiting = asyncio.create_task(client.post(CHAT, json=ASK))
            while not client.engine.num_waiting:
                await asyncio.sleep(0.01)
            waiting.cancel()
            while client.engine.num_waiting:
                await asyncio.sleep(0.01)
            return [answer.status_code for answer in await asyncio.gather(*running)]

    assert asyncio.run(ask()) == [200, 200]


def test_an_answer_that_takes_too_long(monkeypatch):
    slowed(monkeypatch)

    async def ask():
        async with server(request_timeout_s=1.0) as client:
            answer = await client.post(CHAT, json=LONG)
            while client.engine.num_running:
                await asyncio.sleep(0.01)
            return answer, client.service.metrics.finished["abort"]

    answer, num_aborted = asyncio.run(ask())
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    assert num_aborted == 1
