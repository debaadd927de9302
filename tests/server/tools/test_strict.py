"""Strict tools: text is free, and a call that the model begins has the schema of its tool."""

import asyncio
import json

import pytest

from paceline import LLM, PromptLookup, SamplingParams
from paceline.errors import ConfigError
from paceline.sampling.grammar import make_grammar
from paceline.server.protocol import ChatRequest
from paceline.server.tools.families import CALLS, Asked, format_of
from paceline.server.tools.forms import strict_form
from tests.server.helpers import ASK, calling_llm, server
from tests.server.tools.test_readers import read

CHOICES = {"type": "object", "properties": {"x": {"enum": [1, 2, 3]}}, "required": ["x"]}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": CHOICES, "strict": True}},
    {"type": "function", "function": {"name": "g"}},
]
FORCED = [name for name, (kind, _, _) in CALLS.items() if kind.form is not None]
CHAT = ChatRequest.model_validate({**ASK, "tools": TOOLS})


def form_of(parser):
    return strict_form(CHAT, format_of("", calling_llm().tokenizer, parser))


def allowed(form, text):
    """How much of a text the grammar allows, and whether the answer may end there."""
    llm = calling_llm()
    params = SamplingParams(structured_outputs=form).structured_outputs
    grammar = make_grammar(params, llm.tokenizer, llm.loaded.vocab_size, llm.loaded.eos_ids, False)
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    count = grammar.count_allowed([], ids)
    may_end = count == len(ids) and bool(grammar.mask(ids)[list(llm.loaded.eos_ids)].any())
    return llm.tokenizer.decode(ids[:count]), may_end


@pytest.mark.parametrize("parser", [name for name in FORCED if name != "deepseek_v3"])  # its bars are no bytes here
def test_a_call_that_is_begun_has_the_schema_of_its_tool(parser):
    """What is forced is also what the reader of the family reads."""
    form, (mark, before, behind) = form_of(parser), CALLS[parser][0].form
    lead = "<|channel|>commentary " if parser == "openai" else "Ok. "
    call = lead + mark + before.replace("NAME", "f") + '{"x": 2}' + behind
    assert allowed(form, call) == (call, True)
    reader = format_of("", None, parser).reader(Asked(tools={"f": CHOICES}, is_strict=True))
    assert read(reader, [call])[2] == [("f", '{"x": 2}')]
    assert allowed(form, call.replace("2", "4")) == (call.partition("2")[0], False)
    for wrong in ("wat!", '{"name": "h"'):
        kept, may_end = allowed(form, lead + mark + wrong)
        assert (len(kept) < len(lead + mark + wrong), may_end) == (True, False)
    assert allowed(form, "Just a text, with < and {.") == ("Just a text, with < and {.", True)


def test_drafts_change_nothing(monkeypatch):
    """A model that would rather write something else, by a processor that prefers the next character of a text."""
    llm = calling_llm()
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 9}}\n</tool_call>'
    wish = llm.tokenizer.encode(f"ab {call}{call} ab ab ab", add_special_tokens=False)
    prompt = llm.tokenizer.encode("ab ab", add_special_tokens=False)

    def prefer(ids, scores):
        scores[:, wish[min(ids.shape[1] - len(prompt), len(wish) - 1)]] += 50
        return scores

    params = SamplingParams(max_tokens=150, structured_outputs=form_of("hermes"), logits_processors=[prefer])
    drafting = LLM(llm.loaded, drafter=PromptLookup(), max_num_seqs=2)
    result = drafting.generate(prompt, params)[0]
    assert result.token_ids == llm.plain().generate(prompt, params)[0].token_ids
    reader = format_of("", None).reader(Asked(tools={"f": CHOICES}))
    _, _, calls = read(reader, [result.text])
    assert len(calls) == 2
    assert all(json.loads(arguments)["x"] in (1, 2, 3) for _, arguments in calls)


@pytest.mark.parametrize("parser", ["glm45", "qwen3_coder", "pythonic", "gemma4", "none"])
def test_formats_whose_arguments_are_no_json_refuse_strict(parser):
    with pytest.raises(ConfigError, match="arguments are JSON"):
        form_of(parser)


def test_the_server_takes_strict_tools():
    async def ask(**more):
        async with server(calling_llm()) as client:
            return await client.post("/v1/chat/completions", json={**ASK, "tools": TOOLS, **more})

    assert asyncio.run(ask()).status_code == 200
    form = {"structured_outputs": {"choice": ["ab"]}}  # of the whole answer, which comes first
    assert asyncio.run(ask(**form)).json()["choices"][0]["message"]["content"] == "ab"
