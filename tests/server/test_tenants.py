"""Two API keys on one server: neither is drafted from what the other was answered, nor finds its prompts."""

import asyncio

import pytest

from paceline import LLM, Fixed, Suffix
from paceline.core.request import SamplingParams
from paceline.server.responses import ResponsesRequest
from tests.server.helpers import ASK, TEMPLATE, server, tiny_llm
from tests.structured.common import byte_tokenizer

CHAT = "/v1/chat/completions"
A, B = "key-of-a", "key-of-b"
BODY = {**ASK, "messages": [{"role": "user", "content": "ab ab cd " * 6}], "temperature": 0, "max_tokens": 40}


def figures(*asked: tuple[str, dict]) -> list[tuple[int, int]]:
    """Of each answer the drafted tokens that were accepted, and how much of its prompt was found."""
    drafter = Suffix(answers=4000)
    llm = LLM(tiny_llm().loaded.model, tokenizer=byte_tokenizer(TEMPLATE), drafter=drafter, policy=Fixed(6))

    async def each():
        async with server(llm, api_keys=[A, B], return_metrics=True) as client:
            return [
                (await client.post(CHAT, json=BODY | more, headers={"Authorization": f"Bearer {key}"})).json()
                for key, more in asked
            ]

    told = asyncio.run(each())
    assert len({answer["choices"][0]["message"]["content"] for answer in told}) == 1
    assert drafter.answers is not None
    assert not any(key in repr(vars(drafter.answers)) for key in (A, B))
    return [
        (
            answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"],
            answer["usage"]["prompt_tokens_details"]["cached_tokens"],
        )
        for answer in told
    ]


def test_keys_salts_and_private_requests():
    first, again, other, private, third, salted = figures(
        (A, {}), (A, {}), (B, {}), (B, {"store": False}), (B, {}), (A, {"cache_salt": "x"})
    )
    assert again[0] > first[0]
    assert again[1] > first[1] == 0
    assert first == other == salted
    assert private == third == again, "it reads what its key was answered, and leaves nothing"


def test_responses_may_be_private():
    body = {"model": "tiny", "input": "a"}
    assert [ResponsesRequest(**body, store=store).as_chat().store for store in (None, False)] == [None, False]


def test_a_server_that_mixes_keys_is_caught(monkeypatch):
    monkeypatch.setattr(SamplingParams, "tenant", "")
    first, other = figures((A, {}), (B, {}))
    assert other[0] > first[0]
    assert other[1] > 0


@pytest.mark.parametrize("salt", ["", "x" * 257, 3])
def test_salts_that_are_none(salt):
    async def ask():
        async with server() as client:
            return (await client.post(CHAT, json={**ASK, "cache_salt": salt})).status_code

    assert asyncio.run(ask()) == 400
