"""Calls of tools: found in the text wherever it is cut, forced by tool_choice, and shown to the template."""

import asyncio
import json

import pytest

from paceline import LLM
from paceline.server.protocol import Tool
from paceline.server.tools.forms import spell_out
from paceline.server.tools.json_calls import Hermes
from tests.server.helpers import ASK, calling_llm, calls_of, events, joined, server, tiny_llm, whole_calls
from tests.structured.common import byte_tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"x": {"enum": [1, 2, 3]}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TEXTS = {
    "no call <tool> < b": ("no call <tool> < b", 0),
    "a  \n <": ("a  \n <", 0),
    f"before \n{CALL}\n{CALL}\n": ("before", 2),
    f"{CALL} between \n{CALL}": ("between", 2),
    f"{CALL} after <tool_ca": ("after", 1),
    f'{CALL}\n<tool_call>\n{{"name": "f", "argu': ("", 1),
    f'a <tool_call>\n{{"name": "f",\n{CALL}': ('a <tool_call>\n{"name": "f",', 1),
    f"a {CALL}".removesuffix("</tool_call>"): ("a", 1),
    "<tool_call>no JSON</tool_call>.": ("<tool_call>no JSON</tool_call>.", 0),
    '<tool_call>{"name": 3}</tool_call>': ('<tool_call>{"name": 3}</tool_call>', 0),
    '<tool_call>{"name": "f", "argu': ('<tool_call>{"name": "f", "argu', 0),
}


def read(kind, text, size=1000):
    """The text and the calls in an answer that comes in pieces."""
    reader = kind({"f": {}})
    pieces = [reader.feed(text[at : at + size], at + size >= len(text)) for at in range(0, len(text), size)]
    return "".join(piece.text for piece in pieces), whole_calls(call for piece in pieces for call in piece.calls)


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize("text", TEXTS)
def test_the_reader_finds_the_same_wherever_text_is_cut(text, size):
    shown, calls = read(Hermes, text, size)
    assert (shown, len(calls)) == TEXTS[text]
    for call in calls:
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", {"x": 1})
    assert len({call["id"] for call in calls}) == len(calls)


def test_text_is_not_held_back_longer_than_a_tag_may_be_in_it():
    assert Hermes({}).feed("one <tool two <").text == "one <tool two"


@pytest.mark.parametrize("written", ['"arguments": ""', '"arguments": null', '"parameters": {}'])
def test_a_call_without_arguments_has_an_empty_object(written):
    _, (call,) = read(Hermes, f'<tool_call>{{"name": "f", {written}}}</tool_call>')
    assert call["function"]["arguments"] == "{}"


def chat(llm=None, **body):
    async def ask():
        async with server(llm) as client:
            return await client.post("/v1/chat/completions", json={**ASK, "max_tokens": 200, **body})

    return asyncio.run(ask())


SAID = f"Let me add.\n\n{CALL}\n{CALL}"


@pytest.mark.parametrize(
    ("cut", "content", "num_calls"),
    [
        (3, "Let", 0),
        (13, "Let me add.\n\n", 0),
        (18, "Let me add.\n\n<tool", 0),
        (len(SAID) - len(CALL), "Let me add.", 1),
        (len(SAID) - len(CALL) + 5, "Let me add.", 1),
        (len(SAID) - 20, "Let me add.", 2),
        (len(SAID) - 3, "Let me add.", 2),
        (len(SAID), "Let me add.", 2),
    ],
)
def test_an_answer_that_is_cut_says_so(cut, content, num_calls):
    """A character is a token. Streamed and whole it is the same, with the calls that were complete."""
    form = {"structured_outputs": {"choice": [SAID]}, "max_tokens": cut, "tools": [TOOL]}
    (whole,) = chat(calling_llm(), **form).json()["choices"]
    pieces = events(chat(calling_llm(), **form, stream=True).text)
    calls = calls_of(pieces)
    assert (whole["message"]["content"], joined(pieces)) == (content, content)
    made = [call["function"] for call in whole["message"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == made
    assert len(made) == num_calls
    end = "tool_calls" if cut == len(SAID) else "length"
    assert whole["finish_reason"] == pieces[-1]["choices"][0]["finish_reason"] == end


def test_a_demanded_call_that_is_cut_says_so():
    (made,) = chat(tools=[TOOL], tool_choice="required", max_tokens=9).json()["choices"]
    assert made["finish_reason"] == "length"
    assert "tool_calls" not in made["message"]
    assert made["message"]["content"].startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_demanded_call_is_made(choice):
    body = {"tools": [TOOL], "tool_choice": choice}
    (made,) = chat(**body).json()["choices"]
    assert made["finish_reason"] == "tool_calls"
    assert made["message"]["content"] is None
    (call,) = made["message"]["tool_calls"]
    assert call["function"]["name"] == "f"
    assert json.loads(call["function"]["arguments"])["x"] in (1, 2, 3)
    pieces = events(chat(**body, stream=True).text)
    assert joined(pieces) == ""
    assert pieces[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert [one["function"] for one in calls_of(pieces)] == [call["function"]]


def test_a_demanded_call_ends_where_the_model_prefers_spaces():
    (made,) = chat(tools=[TOOL], tool_choice="required", logit_bias={"85": 100}).json()["choices"]
    assert made["finish_reason"] == "tool_calls"


X = {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("form", "finish"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": X}}}, "stop"),
        ({"structured_outputs": {"json": X}}, "stop"),
        ({"structured_outputs": {"json": X, "whitespace_pattern": " *"}}, "length"),
    ],
)
def test_json_ends_where_the_model_prefers_spaces(form, finish):
    (made,) = chat(**form, logit_bias={"85": 100}, max_tokens=40).json()["choices"]
    assert made["finish_reason"] == finish
    assert finish == "length" or json.loads(made["message"]["content"]) == {"x": 1}


def test_a_demanded_call_has_the_listed_arguments_alone():
    """Also where the model would rather go on with a comma, and a schema says nothing of other arguments."""
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2, 3]}}, "required": ["x"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    (comma,) = tiny_llm().tokenizer.encode(",", add_special_tokens=False)
    (made,) = chat(tools=[tool], tool_choice="required", logit_bias={str(comma): 100}).json()["choices"]
    assert made["finish_reason"] == "tool_calls"
    assert list(json.loads(made["message"]["tool_calls"][0]["function"]["arguments"])) == ["x"]


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"properties": {"x": {"const": 1}}, "required": ["x"]}, {"properties": {"y": {"const": 2}}}]},
        {"properties": {"properties": {"const": {"properties": 1}}}, "required": ["properties"]},
    ],
    ids=["parts of one object", "an argument called properties"],
)
def test_a_demanded_call_of_an_awkward_schema(schema):
    """Parts of `allOf` are not closed, each against the others, and values are no schemas."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **schema}}}
    close = str(tiny_llm().tokenizer.encode("}", add_special_tokens=False)[0])
    (made,) = chat(tools=[tool], tool_choice="required", logit_bias={close: 100}).json()["choices"]
    assert made["finish_reason"] == "tool_calls"
    found = json.loads(made["message"]["tool_calls"][0]["function"]["arguments"])
    assert found in ({"x": 1}, {"properties": {"properties": 1}})


def test_the_template_reads_tools_and_calls():
    def num_tokens(**body):
        return chat(**body, max_tokens=1).json()["usage"]["prompt_tokens"]

    assert num_tokens(tools=[TOOL]) == num_tokens() + len(tiny_llm().tokenizer.encode("f "))
    assert num_tokens(tools=[TOOL], tool_choice="none") == num_tokens()
    function = {"name": "f", "arguments": '{"x": 1}'}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    answered = {"role": "tool", "content": "2", "tool_call_id": "c"}
    assert num_tokens(messages=[*ASK["messages"], called, answered]) > num_tokens()


CALLED = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
    {"role": "tool", "content": [{"type": "text", "text": "2"}], "tool_call_id": "c"},
]


def test_a_template_that_reads_no_tools_is_told_of_them_in_words():
    tools = [Tool.model_validate(TOOL)]
    system, user, call, answer = spell_out(CALLED, tools)
    assert (system["role"], json.dumps(TOOL["function"]) in system["content"]) == ("system", True)
    assert user == CALLED[0]
    shown, (made,) = read(Hermes, call["content"])
    assert (shown, json.loads(made["function"]["arguments"])) == ("", {"x": 1})
    assert (answer["role"], "2" in answer["content"]) == ("user", True)
    (kept, *_) = spell_out([{"role": "system", "content": "Be kind."}, CALLED[0]], tools)
    assert kept["content"].startswith("Be kind.\n\n")
    assert spell_out(CALLED[:1], []) == CALLED[:1]


def test_such_a_model_calls_tools():
    tokenizer = byte_tokenizer("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }};{% endfor %}")
    llm = LLM(tiny_llm().loaded.model, tokenizer=tokenizer, max_num_seqs=2)

    async def ask():
        body = {**ASK, "max_tokens": 200, "tools": [TOOL], "tool_choice": "required", "logit_bias": {"85": -100}}
        async with server(llm) as client:
            made = (await client.post("/v1/chat/completions", json=body)).json()
            again = {**ASK, "messages": [*ASK["messages"], made["choices"][0]["message"]], "tools": [TOOL]}
            return made, await client.post("/v1/chat/completions", json=again)

    made, again = asyncio.run(ask())
    assert made["choices"][0]["finish_reason"] == "tool_calls"
    assert made["usage"]["prompt_tokens"] > len(json.dumps(TOOL["function"]))
    assert again.status_code == 200


def test_a_tool_that_is_not_there_is_refused():
    other = {"type": "function", "function": {"name": "g"}}
    assert chat(tools=[TOOL], tool_choice=other).status_code == 400
    assert chat(tool_choice="required").status_code == 400
