"""Answers sent back: agent loops of the `openai` client, and the bodies that other clients made of the same chat."""

import asyncio
import json
from pathlib import Path

import openai
import pytest

from tests.server.helpers import ASK, calling_llm, listening, server, whole_calls
from tests.server.test_tools import TOOL

STRICT = {**TOOL, "function": {**TOOL["function"], "strict": True}}


def call(x: int) -> str:
    return f'<tool_call>\n{{"name": "f", "arguments": {{"x": {x}}}}}\n</tool_call>'


SCRIPT = [f"Let me add.\n\n{call(1)}\n{call(2)}", call(3), "It is 6."]
PROMPT = (
    'user:ab ab;assistant:Let me add.f{"x": 1}f{"x": 2};tool:1;tool:2;assistant:f{"x": 3};tool:3;assistant:It is 6.;'
)
BODIES = json.loads(Path(__file__).with_name("histories.json").read_text())
"""What clients sent with a message after such a chat, recorded where this server's answers were `SCRIPT`."""


async def _prompt(messages):
    async with server(calling_llm()) as client:
        ids = await client.post("/tokenize", json={"messages": messages})
        assert ids.status_code == 200, ids.text
        return (await client.post("/detokenize", json={"tokens": ids.json()["tokens"]})).json()["prompt"]


def prompt(*messages):
    """What a template writes of the messages."""
    return asyncio.run(_prompt(messages))


def dumped(client, asked):
    return client.chat.completions.create(**asked).choices[0].message.model_dump()


def held(client, asked):
    """The client's own object, which it writes itself."""
    return client.chat.completions.create(**asked).choices[0].message


def helped(client, asked):
    with client.chat.completions.stream(**{**asked, "tools": [STRICT]}) as stream:
        return stream.get_final_completion().choices[0].message.model_dump()


def gathered(client, asked):
    """As agents do that read streams themselves."""
    deltas = [piece.choices[0].delta.model_dump() for piece in client.chat.completions.create(**asked, stream=True)]
    parts = [one for delta in deltas for one in delta["tool_calls"] or ()]
    calls = whole_calls({name: value for name, value in one.items() if value is not None} for one in parts)
    return {**deltas[0], "content": "".join(one["content"] or "" for one in deltas), "tool_calls": calls}


@pytest.fixture(scope="module")
def client():
    with listening(calling_llm()) as (url, _, _):
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("ask", [dumped, held, helped, gathered])
def test_an_agent_of_two_rounds(client, ask):
    messages = [*ASK["messages"]]
    for said in SCRIPT:
        form = {"extra_body": {"structured_outputs": {"choice": [said]}}}
        messages.append(ask(client, {**ASK, "max_tokens": 400, "messages": messages, "tools": [TOOL], **form}))
        calls = messages[-1]["tool_calls"] if isinstance(messages[-1], dict) else messages[-1].tool_calls
        for one in calls or ():
            one = one if isinstance(one, dict) else one.model_dump()
            x = json.loads(one["function"]["arguments"])["x"]
            messages.append({"role": "tool", "tool_call_id": one["id"], "content": str(x)})
    sent = [one if isinstance(one, dict) else one.model_dump(exclude_unset=True) for one in messages]
    assert prompt(*sent) == PROMPT


@pytest.mark.parametrize("name", BODIES)
def test_the_bodies_of_clients(name):
    async def ask():
        async with server(calling_llm()) as client:
            return await client.post("/v1/chat/completions", json=BODIES[name])

    assert asyncio.run(ask()).status_code == 200
    assert prompt(*BODIES[name]["messages"]) == PROMPT + "user:ab;"


CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
PLAIN = {"role": "assistant", "content": "a", "tool_calls": [CALLED]}
EFFECTLESS = {
    "nulls": {"annotations": None, "audio": None, "function_call": None, "refusal": None, "name": None, "wat": None},
    "of an answer": {"id": "m", "annotations": [{"type": "url_citation"}], "parsed": {"a": 1}, "thinking_blocks": []},
    "a streamed call": {"tool_calls": [{**CALLED, "index": 0, "wat": None}]},
    "a call for a cache": {
        "tool_calls": [{**CALLED, "cache_control": {"type": "ephemeral"}, "extra_content": {"a": 1}}]
    },
    "a parsed call": {"tool_calls": [{**CALLED, "function": {**CALLED["function"], "parsed_arguments": {"x": 1}}}]},
    "parts": {"content": [{"type": "text", "text": "a", "annotations": None, "cache_control": {"type": "ephemeral"}}]},
}


@pytest.mark.parametrize("fields", EFFECTLESS.values(), ids=EFFECTLESS)
def test_fields_without_effect_are_left_out(fields):
    assert prompt({**PLAIN, **fields}) == prompt(PLAIN) == 'assistant:af{"x": 1};'


@pytest.mark.parametrize(
    ("arguments", "written"),
    [("", "{}"), (None, "{}"), ("null", "{}"), ('{"x": ', '"{\\"x\\": "'), ("[" * 1200, json.dumps("[" * 1200))],
    ids=["empty", "null", "null as text", "cut", "deep"],
)
def test_arguments_that_are_no_object(arguments, written):
    message = {**PLAIN, "tool_calls": [{**CALLED, "function": {"name": "f", "arguments": arguments}}]}
    assert prompt(message) == f"assistant:af{written};"


def test_thoughts_go_to_the_template_and_nothing_is_nothing():
    for name in ("reasoning", "reasoning_content"):
        assert prompt({"role": "assistant", "content": "a", name: "b"}) == "assistant:ba;"
    for content in (None, "", []):
        assert prompt({"role": "assistant", "content": content, "tool_calls": []}) == "assistant:;"


REFUSED = {
    "messages[0].wat": {"wat": 1},
    "messages[0].audio": {"audio": {"id": "a"}},
    "messages[0].refusal": {"refusal": "no"},
    "messages[0].function_call": {"function_call": {"name": "f", "arguments": "{}"}},
    "messages[0].content[0].wat": {"content": [{"type": "text", "text": "a", "wat": 1}]},
    "messages[0].tool_calls[0].wat": {"tool_calls": [{**CALLED, "wat": 1}]},
    "messages[0].tool_calls[0].function.wat": {"tool_calls": [{**CALLED, "function": {"name": "f", "wat": 1}}]},
    "messages[0].tool_calls[0].type": {"tool_calls": [{**CALLED, "type": "custom"}]},
    "annotations": None,
}


@pytest.mark.parametrize(("param", "fields"), REFUSED.items(), ids=REFUSED)
def test_fields_with_an_effect_are_refused_by_name(param, fields):
    async def ask():
        body = {**ASK, "annotations": None} if fields is None else {**ASK, "messages": [{**PLAIN, **fields}]}
        async with server(calling_llm()) as client:
            return await client.post("/v1/chat/completions", json=body)

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_items_of_responses(client):
    """With null and further fields; those with an effect are refused by name."""
    asked = {"model": "tiny", "max_output_tokens": 8, "temperature": 0}
    first = client.responses.create(**asked, input="ab ab").output[0].model_dump()
    said = first["content"][0]["text"]
    part = {"type": "output_text", "text": said, "annotations": None, "logprobs": None, "parsed": None, "wat": None}
    asking = {"role": "user", "content": "ab", "id": None, "status": None, "type": None}
    item = {**first, "phase": "final_answer", "content": [part], "cache_control": {"type": "ephemeral"}}
    plain = [
        {"role": "user", "content": "ab ab"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "ab"},
    ]
    wanted = client.responses.create(**asked, input=plain).output_text
    for one in (first, item):
        assert client.responses.create(**asked, input=[plain[0], one, asking]).output_text == wanted
    for more, param in (({"wat": 1}, "input[0].wat"), ({"content": [{**part, "wat": 1}]}, "input[0].content[0].wat")):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**asked, input=[{**item, **more}])
        assert caught.value.param == param
