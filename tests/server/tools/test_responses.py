"""Thoughts and calls in /v1/responses, with the `openai` client."""

import json

import openai
import pytest

from tests.server.helpers import listening
from tests.server.tools.test_thoughts import CALLING, saying, thinking_llm

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
ASKED = {"model": "tiny", "input": "ab ab", "max_output_tokens": 200, "tools": [TOOL]}
TWICE = "ok ", "[TOOL_CALLS]", "f", "[ARGS]", "{}", "[TOOL_CALLS]", "f", "[ARGS]", "{1}"


@pytest.fixture(scope="module")
def client():
    with listening(thinking_llm()) as (url, _, _):
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_thoughts_and_calls_are_items(client):
    answer = client.responses.create(**ASKED, extra_body=saying(*CALLING))
    thoughts, call = answer.output
    assert (thoughts.type, thoughts.content[0].text) == ("reasoning", "it is f")
    assert (call.type, call.name, call.arguments, call.status) == ("function_call", "f", "{}", "completed")
    assert (answer.status, answer.output_text, answer.tool_choice) == ("completed", "", "auto")
    assert answer.usage.output_tokens_details.reasoning_tokens == len("it is f") + 2
    type(answer).model_validate(answer.to_dict(), strict=True)
    results = {"type": "function_call_output", "call_id": call.call_id, "output": "1"}
    talk = [{"role": "user", "content": "ab"}, *answer.output, results]
    again = client.responses.create(**{**ASKED, "input": talk}, extra_body=saying("done"))
    assert again.output_text == "done"


@pytest.mark.parametrize(("effort", "texts"), [("none", ["onetwo"]), ("high", ["one", "two"])])
def test_an_effort_is_passed_to_the_template(client, effort, texts):
    asked = {"reasoning": {"effort": effort, "summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    answer = client.responses.create(**ASKED, **asked, store=False, extra_body=saying("one", "[/THINK]", "two"))
    assert [item.content[0].text for item in answer.output] == texts
    assert (answer.reasoning.effort, answer.reasoning.summary) == (effort, "auto")


@pytest.mark.parametrize("said", [CALLING, TWICE, ("[THINK]", "a", "[/THINK]", "b"), ("[THINK]", "a")])
def test_a_stream_has_the_same_items(client, said):
    whole = client.responses.create(**ASKED, extra_body=saying(*said))
    pieces = list(client.responses.create(**ASKED, extra_body=saying(*said), stream=True))
    for one in pieces:
        type(one).model_validate(one.to_dict(), strict=True)
    assert [one.sequence_number for one in pieces] == list(range(len(pieces)))

    def plain(item):
        return {name: value for name, value in item.to_dict().items() if name not in ("id", "call_id")}

    last = pieces[-1].response
    assert [plain(item) for item in last.output] == [plain(item) for item in whole.output]
    assert [one.item.id for one in pieces if one.type == "response.output_item.added"] == [
        one.id for one in last.output
    ]
    assert {one.item.id for one in pieces if one.type == "response.output_item.done"} == {one.id for one in last.output}
    for item in last.output:
        parts = [one.delta for one in pieces if one.type.endswith(".delta") and one.item_id == item.id]
        assert "".join(parts) == (item.arguments if item.type == "function_call" else item.content[0].text)


def test_the_clients_own_reader_of_streams(client):
    with client.responses.stream(**ASKED, extra_body=saying(*TWICE)) as stream:
        done = [one for one in stream if one.type == "response.function_call_arguments.done"]
        final = stream.get_final_response()
    assert [one.arguments for one in done] == ["{}", "{1}"]
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
def test_a_demanded_call(client, choice):
    answer = client.responses.create(**ASKED, tool_choice=choice, extra_body={"logit_bias": {"85": -100}, "seed": 1})
    (call,) = answer.output
    assert (call.name, type(json.loads(call.arguments))) == ("f", dict)
    assert answer.to_dict()["tool_choice"] == choice


def test_one_call_alone(client):
    answer = client.responses.create(**ASKED, parallel_tool_calls=False, extra_body=saying(*TWICE))
    assert [item.type for item in answer.output] == ["message", "function_call"]
    assert answer.parallel_tool_calls is False
