"""What a server takes where a request says nothing: sampling options, and variables of the chat template."""

import asyncio

from transformers import GenerationConfig

from paceline import LLM, SamplingParams
from tests.helpers import loaded
from tests.server.helpers import ASK, TEMPLATE, server, tiny_llm
from tests.structured.common import byte_tokenizer

CHAT = "/v1/chat/completions"


def ask(llm=None, path=CHAT, body=ASK, **settings) -> dict:
    async def answered():
        async with server(llm, **settings) as client:
            return (await client.post(path, json=body)).json()

    return asyncio.run(answered())


def text(answer: dict) -> str:
    return answer["choices"][0]["message"]["content"]


def test_sampling_defaults(monkeypatch):
    def library(**options) -> str:
        return tiny_llm().chat(ASK["messages"], SamplingParams(seed=ASK["seed"], max_tokens=24, **options))[0].text

    own = GenerationConfig(temperature=0.4, top_k=3)
    monkeypatch.setattr(tiny_llm().loaded.model, "generation_config", own)
    assert text(ask()) == library(temperature=0.4, top_k=3)
    assert text(ask(takes_model_defaults=False)) == library(temperature=1.0)
    assert text(ask(defaults={"temperature": 0.0})) == library(temperature=0.0, top_k=3)
    assert text(ask(body={**ASK, "temperature": 0.7}, defaults={"temperature": 0.0})) == library(
        temperature=0.7, top_k=3
    )


def test_variables_of_the_template():
    llm = LLM(loaded("llama", max_position_embeddings=2048).model, tokenizer=byte_tokenizer(TEMPLATE + "{{ mood }}"))
    counts = [
        ask(llm, "/tokenize", {"messages": ASK["messages"]}, chat_template_kwargs=given)["count"]
        for given in ({}, {"mood": "zq!"})
    ]
    assert counts[1] == counts[0] + 3
    used = [
        ask(llm, body={**ASK, **body}, chat_template_kwargs={"mood": "zq!"})["usage"]["prompt_tokens"]
        for body in ({}, {"chat_template_kwargs": {"mood": "d"}})
    ]
    assert used == [counts[0] + 3, counts[0] + 1]
