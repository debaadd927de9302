"""A server on a tiny model with a tokenizer of bytes, asked in this process."""

import json
import threading
import time
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import cache
from string import printable

import httpx

from paceline import LLM, Choose, Fixed, PredictedOutput, PromptLookup, TokenRecycling
from paceline.async_llm import AsyncLLM
from paceline.server.app import make_app
from paceline.server.models import Model, Models
from paceline.server.run import Server, bind
from paceline.server.service import Settings
from paceline.server.streams import EventStream
from tests.helpers import SPECIAL, byte_pairs, loaded
from tests.structured.common import byte_tokenizer

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }} {% endfor %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% if m.tool_calls %}"
    "{{ m.tool_calls[0]['function']['arguments']['x'] }}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "ab ab"}], "seed": 3, "max_tokens": 24}


@cache
def tiny_llm() -> LLM:
    """Sampled answers of it are noise without end."""
    made = loaded("llama", max_position_embeddings=2048)
    return LLM(made.model, tokenizer=byte_tokenizer(TEMPLATE), drafter=PromptLookup(), max_num_seqs=2)


@cache
def choosing_llm() -> LLM:
    """The same model with several drafters, which always draft."""
    members = [PredictedOutput(), PromptLookup(), TokenRecycling()]
    return LLM(tiny_llm().loaded, drafter=Choose(members), policy=Fixed(6), max_num_seqs=2)


@cache
def calling_llm() -> LLM:
    """The same model with a tokenizer that can write calls of tools, so that a choice of one can demand them."""
    tokens = [*SPECIAL.values(), *(one for one in printable[:94] if one not in "`^"), "Ġ", "Ċ"]
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
        "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %};"
        "{% endfor %}"
    )
    tokenizer = byte_pairs(tokens, chat_template=template, **SPECIAL)
    return LLM(tiny_llm().loaded.model, tokenizer=tokenizer, drafter=PromptLookup(), max_num_seqs=2)


def slowed(monkeypatch) -> None:
    """Rounds of the tiny model take 10 ms: readers keep up, and long answers are not at their end too soon."""
    decoder = tiny_llm().decoder
    step = decoder.step
    monkeypatch.setattr(decoder, "step", lambda seqs: (time.sleep(0.01), step(seqs))[1])


def out_of_time(monkeypatch) -> None:
    """The time of a stream is over behind its twelfth piece; several are made at once at its beginning."""
    made = EventStream.__init__

    def begun(self, events, *more):
        async def some():
            async with aclosing(events):
                for _ in range(12):
                    yield await anext(events)
                raise TimeoutError

        made(self, some(), *more)

    monkeypatch.setattr(EventStream, "__init__", begun)


def served(engine, **settings) -> Model:
    """A model of a server that is loaded already."""
    model = Model(Settings(**settings), lambda adapters: engine)
    model.take(engine)
    return model


@asynccontextmanager
async def server(llm=None, headers=None, max_waiting=256, **settings):
    """A client of a server in this process; the engine is `client.engine`."""
    engine = AsyncLLM(llm or tiny_llm(), max_waiting=max_waiting)
    model = served(engine, model="tiny", **settings)
    app = make_app(Models([model]))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://tiny", headers=headers) as client:
        client.engine, client.service, client.models = engine, model.service, app.state.service
        try:
            yield client
        finally:
            engine.shutdown()


@contextmanager
def listening(llm=None, max_connections=512, **settings):
    """A server on a socket, in a thread of its own; yields its URL, the engine and the service."""
    engine, announced, urls = AsyncLLM(llm or tiny_llm()), threading.Event(), []
    model = served(engine, model="tiny", **settings)
    app = make_app(Models([model]))

    def announce(url):
        urls.append(url)
        announced.set()

    running = Server(app, 5.0, announce, max_connections)
    thread = threading.Thread(target=running.run, args=([bind("127.0.0.1", 0)],))
    thread.start()
    assert announced.wait(30)
    try:
        yield urls[0], engine, model.service
    finally:
        running.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
        engine.shutdown()


def events(text: str) -> list[dict]:
    """Of a stream, which must end as it should."""
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def joined(pieces: list[dict], index: int = 0) -> str:
    """The text of one choice."""
    chosen = [choice for piece in pieces for choice in piece["choices"] if choice["index"] == index]
    return "".join(one["delta"].get("content") or "" if "delta" in one else one["text"] for one in chosen)


def whole_calls(parts) -> list[dict]:
    """The calls of a stream, put together as clients do."""
    calls = []
    for part in parts:
        if "id" in part:
            assert part["index"] == len(calls)
            calls.append({**part, "function": dict(part["function"])})
        else:
            assert part["index"] == len(calls) - 1
            calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    return calls


def calls_of(pieces: list[dict]) -> list[dict]:
    """The calls of the first choice."""
    return whole_calls(call for piece in pieces for call in piece["choices"][0]["delta"].get("tool_calls", ()))
