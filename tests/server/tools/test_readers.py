"""Calls and thoughts of each family are found, wherever the text is cut, and all else stays text."""

import json
import re
import time
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.server.tools import reader as reader_module
from paceline.server.tools.families import CALLS, THOUGHTS, Asked, format_of
from paceline.server.tools.reader import Reader
from paceline.server.tools.xml_calls import typed
from tests.server.helpers import whole_calls
from tests.server.tools.answers import ANSWERS, TOOLS

NOT_CALLS = {
    "hermes": [
        '<tool_call>{"name": 3}</tool_call>', "<tool_call></tool_call>", '<tool_call>{"name": "\\x"}</tool_call> x',
        '{"name": "wat", "arguments": {}}', '{"a": 1}', '```json\n{"name": "wat"}\n```', "```\n```\n```", "[1, 2]",
        '{"name": "add", "description": "Add", "parameters": {"type": "object"}}', "[add(a=b)]", "a < b", " \n ",
    ],
    "pythonic": ["[f(a=1)", "[unknown(a=1)]", "[add(a=1+1)]", "[add(**x)]", "[add(a=1e999)]", "[add(1, 2, 3)]", "[]"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] [1]", "[TOOL_CALLS]add"],
    "glm45": ["<tool_call>\n{}", "<tool_call>add you</tool_call>"],
    "qwen3_coder": ["<tool_call>\n<function>", "<function=>"],
    "gemma4": ["<|tool_call>call:add{a:}b", "<|tool_call>call:add{a", "<|tool_call>" + "call:add{a:" + "[" * 99],
    "deepseek_v3": ["<｜tool▁call▁begin｜>add", "<｜tool▁calls▁begin｜>add"],
    "openai": ['plain {"x"} text', " to the end"],
}  # fmt: skip


def reader_of(parser, thoughts="none", **options):
    form = format_of("", None, parser, thoughts)
    return form.reader(Asked(tools=TOOLS, **options)) or Reader({})


def read(reader, pieces, opened=False):
    """The text, the thoughts and the calls of an answer in pieces."""
    reader.begin(f"a:{reader.thoughts[0]}\n" if opened else "a:")
    found = [reader.feed(piece) for piece in pieces]
    found.append(reader.feed("", is_end=True))
    calls = whole_calls(call for piece in found for call in piece.calls)
    told = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return "".join(piece.text for piece in found), "".join(piece.reasoning for piece in found), told


def finds(answer):
    """The same from the whole text as from its characters, and from its two parts wherever it is cut."""
    kind = answer.parser, answer.thoughts or "none"
    content, reasoning, calls = read(reader_of(*kind), [answer.text], answer.opened)
    assert (content, reasoning) == (answer.content, answer.reasoning)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == answer.calls
    cuts = [[*answer.text]] + [[answer.text[:at], answer.text[at:]] for at in range(1, len(answer.text))]
    for pieces in cuts:
        assert read(reader_of(*kind), pieces, answer.opened) == (content, reasoning, calls)


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_calls_and_thoughts_are_found_wherever_the_text_is_cut(answer):
    finds(answer)


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_that_ends_early_is_the_same_in_pieces(answer):
    kind = answer.parser, answer.thoughts or "none"
    for end in range(0, len(answer.text), 3):
        text = answer.text[:end]
        whole = read(reader_of(*kind), [text], answer.opened)
        assert read(reader_of(*kind), [*text], answer.opened) == whole
        assert len(whole[2]) <= len(answer.calls)


@pytest.mark.parametrize(("parser", "text"), [(name, text) for name, texts in NOT_CALLS.items() for text in texts])
def test_what_is_no_call_stays_text(parser, text):
    for pieces in ([text], [*text]):
        assert read(reader_of(parser), pieces) == (text, "", [])


def blind(monkeypatch):
    monkeypatch.setattr(reader_module, "_overlap", lambda text, mark: 0)


def hasty(monkeypatch):
    def sees(self, text, put=None):
        found = self._text.startswith(text, self._at)
        if found:
            self.take(len(text), put or self.hold)
        return found
        yield

    monkeypatch.setattr(Reader, "sees", sees)


def forgetful(monkeypatch):
    before = Reader.before

    def cut(self, pattern, put):
        char = yield from before(self, pattern, put)
        self._at = len(self._text) if not self._is_whole and len(self._text) == 1 else self._at
        return char

    monkeypatch.setattr(Reader, "before", cut)


@pytest.mark.parametrize("mutant", [blind, hasty, forgetful])
@pytest.mark.parametrize("name", ["hermes", "qwen3 coder", "kimi k2"])
def test_a_reader_that_does_not_wait_is_noticed(monkeypatch, mutant, name):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        finds(ANSWERS[name])


def test_the_name_of_a_call_and_its_arguments_come_as_they_are_written():
    reader = reader_of("hermes")
    assert reader.feed('<tool_call>\n{"name": "add", "arguments": ').calls == []
    (begun,) = reader.feed('{"a": 1').calls
    assert begun["function"] == {"name": "add", "arguments": '{"a": 1'}
    assert reader.feed("7").calls == [{"index": 0, "function": {"arguments": "7"}}]
    assert reader.feed("}}</tool_call>").calls == [{"index": 0, "function": {"arguments": "}"}}]


def test_an_argument_in_xml_comes_when_it_is_whole():
    reader = reader_of("qwen3_coder")
    (begun,) = reader.feed("<tool_call>\n<function=add>\n<parameter=a>\n1").calls
    assert begun["function"] == {"name": "add", "arguments": ""}
    (more,) = reader.feed("7\n</parameter>").calls
    assert more["function"]["arguments"] == '{"a": 17'


@pytest.mark.parametrize("name", ["hermes", "mistral v13", "deepseek v3", "glm 4.6", "llama 4", "minimax m2"])
def test_calls_after_the_first_are_not_read_where_one_is_wanted(name):
    answer = ANSWERS[name]
    for pieces in ([answer.text], [*answer.text]):
        reader = reader_of(answer.parser, answer.thoughts or "none", most=1)
        content, _, calls = read(reader, pieces, answer.opened)
        assert (content, len(calls), reader.is_over) == (answer.content, 1, True)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("17", {"type": "string"}, "17"), ("17", {"type": "integer"}, 17), ("1.5", {"type": "number"}, 1.5),
        ("true", {"type": "boolean"}, True), ("True", {"type": "boolean"}, True),
        ("null", {"type": ["string", "null"]}, None),
        ("17", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "17"), ("[1]", {"type": "array"}, [1]),
        ("17", None, 17), ("a", None, "a"), ("b", {"type": "integer"}, "b"), ("1", {"enum": ["1", "2"]}, "1"),
        ("NaN", {"type": "number"}, "NaN"), ("true", {"type": "integer"}, True),
        ("{'k': [None, True]}", {"type": "object"}, {"k": [None, True]}), ("f()", {"type": "array"}, "f()"),
        ("'x'", {"type": ["string", "null"]}, "'x'"), ("1e999", {"type": "number"}, "1e999"), ("1e999", None, "1e999"),
    ],
)  # fmt: skip
def test_values_without_quotes_get_the_types_of_the_schema(text, schema, value):
    assert repr(typed(text, schema)) == repr(value)


HOSTILE = {
    "hermes": ['<tool_call>{"arguments":{', "<tool_call>", '<tool_call>{"name":"', "```json\n", " \n", "<"],
    "pythonic": ["[add(", '[add("', "[add(a="],
    "qwen3_coder": ["<tool_call><function=add>", "<function=add><parameter=a>"],
    "gemma4": ["<|tool_call>call:add{a:[", '<|tool_call>call:add{a:<|"|>'],
    "openai": ["<|channel|>", "<|start|><|message|>", " to="],
    "deepseek_v3": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>a"],
}


@pytest.mark.parametrize(("parser", "text"), [(name, text) for name, texts in HOSTILE.items() for text in texts])
def test_a_hostile_text_takes_a_time_linear_in_its_length(parser, text):
    def seconds(count):
        begin = time.process_time()
        read(reader_of(parser), [text] * count)
        return time.process_time() - begin

    seconds(10)
    short = min(seconds(400) for _ in range(3))
    assert any(seconds(4000) < 40 * short + 0.1 for _ in range(3))  # a collection of garbage may fall into one of them


def test_special_tokens_of_a_format_are_left_out_of_the_text():
    (kind, _, _), hidden = CALLS["mistral"], ("[TOOL_CALLS]", "[ARGS]")
    for text in ("a[ARGS]b", "a[TOOL_CALLS]b"):
        assert read(kind(TOOLS, None, hidden), [text])[0] == "ab"


def test_the_documentation_has_all_parsers():
    told = (Path(__file__).parents[3] / "docs" / "tools.md").read_text(encoding="utf-8")
    assert [name for name in (*CALLS, *THOUGHTS) if f"`{name}`" not in told] == []
    rows = {name for line in told.splitlines() if line.endswith(" yes |") for name in re.findall(r"`(\w+)`", line)}
    assert {name for name, (kind, _, _) in CALLS.items() if kind.form is not None} <= rows
    assert not {name for name, (kind, _, _) in CALLS.items() if kind.form is None} & rows


TEMPLATES = {
    "hermes": "{% if tools %}<tool_call>", "qwen3_coder": "{{ tools }}<tool_call><function=f><parameter=p>",
    "glm45": "{{ tools }}<tool_call>{name}<arg_key>", "mistral": "{{ tools }}[TOOL_CALLS]",
    "openai": "{{ tools }}<|channel|>",
    "deepseek_v32": "{% set dsml = '｜DSML｜' %}{{ tools }}<|tool_call|>",
    "pythonic": "{% set tools = 'List of tools: <|tool_list_start|>[' %}",
    "llama3_json": "{{ tools }}Environment: ipython", "gemma4": "{{ tools }}<|tool_call>call:",
}  # fmt: skip


@pytest.mark.parametrize(("name", "template"), TEMPLATES.items(), ids=TEMPLATES)
def test_the_template_tells_the_family(name, template):
    assert format_of(template, None).calls is CALLS[name][0]


def test_thoughts_are_those_of_the_template_or_of_the_named_parser():
    assert format_of("{% if enable_thinking %}<think>", None).thoughts == THOUGHTS["qwen3"][0]
    assert format_of("<think>", None, None, "none").thoughts is None
    assert format_of("", None, None, "deepseek-r1").thoughts == ("<think>", "</think>")
    assert format_of("", None, None, "openai_gptoss").calls is CALLS["openai"][0]
    assert format_of("", None, "none").reader(Asked(tools=TOOLS)) is None


@pytest.mark.parametrize("names", [("wat", None), (None, "wat")])
def test_an_unknown_parser_is_refused_with_the_known_ones(names):
    with pytest.raises(ConfigError, match=r"auto, none, .*granite.*mistral"):
        format_of("", None, *names)
