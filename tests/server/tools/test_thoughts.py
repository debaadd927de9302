"""Thoughts and marks that are special tokens, through the whole server."""

import asyncio
from functools import cache
from string import printable

import pytest

from paceline import LLM, PromptLookup
from paceline.core.round import Origin, Round
from paceline.engine.output import Completion
from paceline.sampling.detokenize import Detokenizer
from paceline.server.answers import Choice
from paceline.server.chats import thinking
from paceline.server.tools.families import Asked, format_of
from tests.helpers import SPECIAL, byte_pairs
from tests.server.helpers import ASK, calls_of, events, joined, server, tiny_llm

MARKS = ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if tools %}[TOOL_CALLS]{% endif %}a:{% if enable_thinking %}[THINK]{% endif %}"
)


@cache
def thinking_llm(template=TEMPLATE):
    """The tiny model with a tokenizer of characters that has the marks of Mistral as special tokens."""
    rest = [*(one for one in printable[:94] if one not in "`^~|\\%"), "Ġ", "Ċ"]
    tokenizer = byte_pairs([*SPECIAL.values(), *rest], chat_template=template, **SPECIAL)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    assert len(tokenizer) == tiny_llm().loaded.vocab_size
    return LLM(tiny_llm().loaded.model, tokenizer=tokenizer, drafter=PromptLookup(), max_num_seqs=2)


def saying(*parts):
    """The field that makes an answer of these texts and special tokens."""
    ids = thinking_llm().tokenizer.convert_tokens_to_ids
    told = [f"<[{ids(part)}]>" if part in MARKS else f'"{part}"' for part in parts]
    return {"structured_outputs": {"grammar": "start: " + " ".join(told)}}


def chat(*said, settings=None, llm=None, **body):
    """The whole answer and the chunks of the streamed one."""

    async def ask(stream):
        async with server(llm or thinking_llm(), **(settings or {})) as client:
            asked = {**ASK, "max_tokens": 200, **saying(*said), "stream": stream, **body}
            answer = await client.post("/v1/chat/completions", json=asked)
            return events(answer.text) if stream else answer.json()

    return asyncio.run(ask(False)), asyncio.run(ask(True))


CALLING = "[THINK]", "it is f", "[/THINK]", "[TOOL_CALLS]", "f", "[ARGS]", "{}"


def test_thoughts_and_calls_between_special_tokens():
    whole, pieces = chat(*CALLING, tools=[TOOL])
    (choice,) = whole["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("it is f", "it is f", None)
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "f", "arguments": "{}"}]
    assert choice["finish_reason"] == pieces[-1]["choices"][0]["finish_reason"] == "tool_calls"
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "it is f"
    assert (joined(pieces), [call["function"] for call in calls_of(pieces)]) == (
        "", [call["function"] for call in message["tool_calls"]]
    )  # fmt: skip
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("it is f") + 2}


ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}


@pytest.mark.parametrize(
    ("asked", "default", "is_on"),
    [
        ({"chat_template_kwargs": OFF}, {}, False),
        ({"chat_template_kwargs": ON}, OFF, True),
        ({}, ON, True),
        ({"reasoning_effort": "none"}, ON, False),
        ({"reasoning_effort": "low"}, OFF, True),
        ({"reasoning_effort": "low", "chat_template_kwargs": OFF}, {}, False),
    ],
)
def test_the_prompt_may_have_opened_the_thoughts(asked, default, is_on):
    whole, _ = chat("one", "[/THINK]", "two", settings={"chat_template_kwargs": default}, **asked)
    message = whole["choices"][0]["message"]
    assert (message.get("reasoning"), message["content"]) == (("one", "two") if is_on else (None, "onetwo"))


@pytest.mark.parametrize(
    ("effort", "told"), [(None, None), ("none", None), ("minimal", "low"), ("medium", "medium"), ("max", "high")]
)
def test_templates_know_three_efforts(effort, told):
    assert thinking("{{ reasoning_effort }}", True, effort).get("reasoning_effort") == told


@pytest.mark.parametrize(
    ("template", "effort", "status"),
    [
        ("{{ messages[0].content }}", "low", 400),
        ("{{ messages[0].content }}", "none", 200),  # nor does such a model think
        ("<think>{{ messages[0].content }}", "none", 400),
    ],
)
def test_an_effort_that_the_template_cannot_say_is_refused(template, effort, status):
    async def ask():
        async with server(thinking_llm(template)) as client:
            return await client.post("/v1/chat/completions", json={**ASK, **saying("a"), "reasoning_effort": effort})

    answer = asyncio.run(ask())
    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"]["param"] == "reasoning_effort"


def test_a_form_of_the_answer_leaves_no_place_for_thoughts():
    form = {"structured_outputs": {"choice": ["one"]}, "chat_template_kwargs": {"enable_thinking": True}}
    message = chat(**form)[0]["choices"][0]["message"]
    assert (message.get("reasoning"), message["content"]) == (None, "one")


def test_special_tokens_are_shown_where_the_request_asks_for_them():
    whole, _ = chat("a", "[ARGS]", "b", tools=[TOOL], skip_special_tokens=False)
    assert whole["choices"][0]["message"]["content"] == "a[ARGS]b"
    assert chat("a", "[ARGS]", "b", tools=[TOOL])[0]["choices"][0]["message"]["content"] == "ab"
    assert chat("a", "[ARGS]", "b")[0]["choices"][0]["message"]["content"] == "ab"


def test_parsers_can_be_turned_off():
    off = {"tool_call_parser": "none", "reasoning_parser": "none"}
    whole, pieces = chat(*CALLING, tools=[TOOL], settings=off)
    assert whole["choices"][0]["message"]["content"] == joined(pieces) == "it is ff{}"


def test_one_call_alone_where_calls_in_parallel_are_not_wanted():
    said = "[TOOL_CALLS]", "f", "[ARGS]", "{}", "[TOOL_CALLS]", "f", "[ARGS]", "{}"
    both, _ = chat(*said, tools=[TOOL])
    assert len(both["choices"][0]["message"]["tool_calls"]) == 2
    whole, pieces = chat(*said, tools=[TOOL], parallel_tool_calls=False)
    (choice,) = whole["choices"]
    assert (len(choice["message"]["tool_calls"]), choice["finish_reason"]) == (1, "tool_calls")
    assert len(calls_of(pieces)) == 1


def test_an_answer_with_thoughts_is_sent_back():
    whole, _ = chat(*CALLING, tools=[TOOL])
    message = whole["choices"][0]["message"]
    results = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "1"}
    again, _ = chat("ok", messages=[*ASK["messages"], message, results], tools=[TOOL])
    assert again["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize("size", [1, 4, 99])
def test_tokens_behind_the_only_call_do_not_count(size):
    """However many come at once. The server's usage and log-probabilities are those of the choice."""
    tokenizer, asked = thinking_llm().tokenizer, Asked(tools={"f": {}}, most=1)
    ids = tokenizer.encode("[TOOL_CALLS]f[ARGS]{1111}okokokok", add_special_tokens=False)
    reader, measure = format_of("[TOOL_CALLS]tools", tokenizer).reader(asked), Detokenizer(tokenizer, (), False)
    choice = Choice(index=0, reader=reader, measure=measure)
    known = {"index": 0, "logprobs": None, "finish_reason": None, "stop_reason": None, "seed": 1, "lossless": True}
    for part in [ids[at : at + size] for at in range(0, len(ids), size)]:
        if choice.finish_reason is None:
            given = {"text": tokenizer.decode(part), "token_ids": [*part], "rounds": [Round("", 0, 0, len(part))]}
            origins = {"origins": [Origin.PLAIN] * len(part), "sources": [""] * len(part)}
            choice.take(Completion(**known, **given, **origins, exact=True, numerics="invariant"))
    assert (choice.finish_reason, tokenizer.decode(choice.token_ids)) == ("tool_calls", "[TOOL_CALLS]f[ARGS]{1111}")
    assert sum(record.num_emitted for record in choice.rounds) == len(choice.token_ids)


def test_the_usage_of_an_answer_with_the_only_call():
    asked = {"tools": [TOOL], "parallel_tool_calls": False, "logprobs": True, "return_provenance": True}
    whole, _ = chat("[TOOL_CALLS]", "f", "[ARGS]", "{1111}okokokok", **asked)
    (choice,) = whole["choices"]
    counts = len(choice["logprobs"]["content"]), len(choice["provenance"]), whole["usage"]["completion_tokens"]
    assert counts == (len("[f[{1111}"),) * 3
