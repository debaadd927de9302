"""/v1/responses with the `openai` client: the answers of a chat, in the API's other form."""

import asyncio
import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from paceline import SamplingParams
from tests.server.helpers import ASK, listening, out_of_time, server, tiny_llm

ASKED = {"model": "tiny", "temperature": 0.8, "max_output_tokens": 20, "extra_body": {"seed": 4}}


def wanted(messages, **options):
    params = SamplingParams(**{"temperature": 0.8, "seed": 4, "max_tokens": 20, **options})
    return tiny_llm().chat(messages, params)[0]


@pytest.fixture(scope="module")
def client():
    with listening() as (url, _, _):
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_a_text(client):
    answer = client.responses.create(**ASKED, input="ab ab")
    expected = wanted(ASK["messages"])
    assert answer.output_text == expected.text
    assert answer.usage.input_tokens == len(expected.prompt_token_ids)
    assert answer.usage.output_tokens == len(expected.token_ids)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert (answer.object, answer.store, answer.error) == ("response", None, None)
    assert answer.id.startswith("resp_")
    type(answer).model_validate(answer.to_dict(), strict=True)  # the client itself takes anything


def test_messages_and_instructions(client):
    """An answer is given back as the client holds it, with further words."""
    first = client.responses.create(**ASKED, input=[{"role": "user", "content": "ab ab"}], instructions="be brief")
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "ab ab"}]
    assert first.output_text == wanted(said).text
    more = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "cd"}]}
    talk = [{"role": "user", "content": "ab ab"}, *first.output, more]
    second = client.responses.create(**ASKED, input=talk, instructions="be brief")
    said += [{"role": "assistant", "content": first.output_text}, {"role": "user", "content": "cd"}]
    assert second.output_text == wanted(said).text


def test_why_it_ended(client):
    cut = client.responses.create(**{**ASKED, "max_output_tokens": 3}, input="ab ab")
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    done = client.responses.create(
        **{**ASKED, "extra_body": {"structured_outputs": {"choice": ["ab", "cd"]}}}, input="ab ab"
    )
    assert (done.status, done.incomplete_details) == ("completed", None)
    assert done.output_text in ("ab", "cd")
    assert (cut.output[0].status, done.output[0].status) == ("incomplete", "completed")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_aborted_is_not_complete(stream):
    async def ask():
        async with server() as one:
            long = {"model": "tiny", "input": "ab", "temperature": 0, "ignore_eos": True, "stream": stream}
            answer = asyncio.create_task(one.post("/v1/responses", json=long))
            while not one.engine.num_running:
                await asyncio.sleep(0.01)
            await one.engine.drain(0)
            return await answer

    answer = asyncio.run(ask())
    made = json.loads(answer.text.split("data: ")[-1])["response"] if stream else answer.json()
    assert (made["status"], made["incomplete_details"], made["output"][0]["status"]) == (
        "incomplete",
        None,
        "incomplete",
    )


EVENTS = ["created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"]
LAST = ["output_text.done", "content_part.done", "output_item.done"]


@pytest.mark.parametrize(("most", "end"), [(20, "incomplete"), (400, "completed")])
def test_a_stream(client, most, end):
    extra = {"seed": 4, "structured_outputs": {"regex": "[0-9]{40}"}}
    asked = {**ASKED, "max_output_tokens": most, "extra_body": extra, "input": "ab ab"}
    whole, pieces = client.responses.create(**asked), list(client.responses.create(**asked, stream=True))
    kinds = [one.type.removeprefix("response.") for one in pieces]
    deltas = [one for one in pieces if one.type == "response.output_text.delta"]
    assert [*dict.fromkeys(kinds)] == [*EVENTS, *LAST, end]
    assert [one.sequence_number for one in pieces] == list(range(len(pieces)))
    assert "".join(one.delta for one in deltas) == whole.output_text
    assert len(deltas) > 1
    for one in pieces:
        type(one).model_validate(one.to_dict(), strict=True)
    last = pieces[-1].response
    assert last.output_text == whole.output_text
    assert last.usage == whole.usage
    assert pieces[0].response.id == last.id
    assert {one.item_id for one in deltas} == {last.output[0].id}


def test_the_clients_own_reader_of_streams(client):
    """It puts the answer together from the events and checks them."""
    extra = {"seed": 4, "structured_outputs": {"regex": "[0-9]{9}"}}
    with client.responses.stream(**{**ASKED, "extra_body": extra}, input="ab ab") as stream:
        text = "".join(one.delta for one in stream if one.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text
    assert len(text) == 9


class Pair(BaseModel):
    """An answer of a given form."""

    a: Literal["x", "y"]
    b: bool


def test_a_parsed_answer(client):
    asked = {**ASKED, "max_output_tokens": 400, "extra_body": {"logit_bias": {"85": -100}, "seed": 1}}
    answer = client.responses.parse(**asked, input="ab ab", text_format=Pair)
    assert isinstance(answer.output_parsed, Pair)
    assert answer.text.format.type == "json_schema"
    assert json.loads(answer.output_text) == answer.output_parsed.model_dump()


def test_log_probabilities(client):
    asked = {**ASKED, "include": ["message.output_text.logprobs"], "top_logprobs": 2, "input": "ab ab"}
    logprobs = client.responses.create(**asked).output[0].content[0].logprobs
    assert [one.logprob for one in logprobs] == [one.logprob for one in wanted(ASK["messages"], logprobs=2).logprobs]
    assert all(len(one.top_logprobs) == 2 for one in logprobs)
    pieces = client.responses.create(**asked, stream=True)
    streamed = [one for piece in pieces if piece.type == "response.output_text.delta" for one in piece.logprobs]
    assert [one.logprob for one in streamed] == [one.logprob for one in logprobs]


def test_provenance(client):
    extra = {"seed": 4, "return_provenance": True}
    answer = client.responses.create(**{**ASKED, "extra_body": extra}, input="ab ab").model_dump()
    (part,) = answer["output"][0]["content"]
    assert "".join(one["text"] for one in part["provenance"]) == part["text"]
    assert "speculative_decoding" in answer["metrics"]


REFUSED = {
    "stored": ({"store": True}, "store", "unsupported_parameter"),
    "a conversation": ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
    "tools": ({"tools": [{"type": "web_search"}]}, "tools[0]", "invalid_value"),
    "a choice without tools": ({"tool_choice": "required"}, None, "invalid_value"),
    "in the background": ({"background": True}, "background", "unsupported_parameter"),
    "an unknown field": ({"wat": 1}, "wat", "unknown_parameter"),
    "no words": ({"input": []}, "input", "invalid_value"),
    "a wrong part": (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": 3}]}]},
        "input[0].content[0]", "invalid_type",
    ),
    "a call of a tool": ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id",
                       "missing_required_parameter"),
    "an answer by its id": ({"input": [{"type": "item_reference", "id": "m"}]}, "input[0].type", "invalid_value"),
    "too hot": ({"temperature": -1}, "temperature", "invalid_value"),
    "logprobs that are not included": ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    "a long prompt": ({"input": "a" * 4000}, None, "context_length_exceeded"),
    "another model": ({"model": "other"}, "model", "model_not_found"),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param", "code"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(fields, param, code, stream):
    async def ask():
        async with server() as one:
            return await one.post("/v1/responses", json={"model": "tiny", "input": "ab", "stream": stream, **fields})

    answer = asyncio.run(ask())
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400), error
    assert (error["param"], error["code"]) == (param, code), error


def test_store_false_and_what_has_no_effect(client):
    more = {"store": False, "truncation": "disabled", "parallel_tool_calls": True, "tools": [], "user": "me"}
    answer = client.responses.create(**ASKED, input="ab ab", metadata={"a": "b"}, **more)
    assert answer.output_text == wanted(ASK["messages"]).text
    assert (answer.metadata, answer.store) == ({"a": "b"}, False)


def test_an_error_behind_the_first_event_is_an_event(monkeypatch):
    out_of_time(monkeypatch)
    long = {"model": "tiny", "input": "ab", "stream": True, "temperature": 0, "ignore_eos": True}

    async def ask():
        async with server() as one:
            return await one.post("/v1/responses", json=long)

    lines = [line for line in asyncio.run(ask()).text.split("\n") if line.startswith("data: ")]
    told = json.loads(lines[-1].removeprefix("data: "))
    assert (told["type"], told["code"]) == ("error", "timeout")
    assert told["sequence_number"] == len(lines) - 1
