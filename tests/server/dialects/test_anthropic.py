"""Anthropic's API: shapes of answers and events, what is accepted without effect, and what is refused."""

import pytest

from tests.server.dialects.common import ANTHROPIC, SAID, ask, message_of, pieces, saying, thinking_llm, told
from tests.server.helpers import calling_llm
from tests.server.test_tools import CALL, TOOL

BODY = {"messages": SAID, "max_tokens": 12, "temperature": 0}
USAGE = {"input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens"}
TOOLS = [{"name": "f", "input_schema": TOOL["function"]["parameters"]}]


def both(body, llm=None):
    """The whole answer, and the one that the events make; they must be the same."""
    whole, streamed = ask((ANTHROPIC, body), (ANTHROPIC, {**body, "stream": True}), llm=llm)
    assert whole.status_code == streamed.status_code == 200, whole.text
    made, joined = whole.json(), message_of(pieces(streamed))
    for one in (made, joined):
        for block in one["content"]:
            assert block.pop("id", "call_").startswith("call_")
    changing = {"id", "usage"}
    assert {name: made[name] for name in made if name not in changing} == {
        name: joined[name] for name in joined if name not in changing
    }
    assert made["usage"]["output_tokens"] == joined["usage"]["output_tokens"]
    return made


def test_a_message():
    made = both(BODY)
    assert made.keys() == {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}
    assert made["usage"].keys() == USAGE
    assert made["id"].startswith("msg_")
    assert (made["type"], made["role"], made["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert [block["type"] for block in made["content"]] == ["text"]


def test_events_have_their_names():
    (answer,) = ask((ANTHROPIC, {**BODY, "stream": True}))
    named = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
    assert named == [part["type"] for part in pieces(answer)]
    assert [*dict.fromkeys(named)] == [
        *("message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]


def test_why_it_ended(monkeypatch):
    full = both({**BODY, "messages": [{"role": "user", "content": "a" * 2030}], "max_tokens": 100})
    assert full["stop_reason"] == "model_context_window_exceeded"
    saying(monkeypatch, "abcd")
    made = both({**BODY, "stop_sequences": ["c"]})
    assert (made["stop_reason"], made["stop_sequence"], made["content"][0]["text"]) == ("stop_sequence", "c", "ab")
    assert both(BODY)["stop_reason"] == "end_turn"


def test_thoughts_words_and_calls_are_blocks(monkeypatch):
    saying(monkeypatch, f"hm</think>so {CALL}\n{CALL}")
    body = {**BODY, "tools": TOOLS, "max_tokens": 300, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    made = both(body, thinking_llm())
    use = {"type": "tool_use", "name": "f", "input": {"x": 1}}
    assert made["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "so"}, use, use,
    ]  # fmt: skip
    assert made["stop_reason"] == "tool_use"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "f"}])
def test_a_demanded_call(choice):
    made = both({**BODY, "tools": TOOLS, "tool_choice": choice, "max_tokens": 200})
    (block,) = made["content"]
    assert block["input"]["x"] in (1, 2, 3)


def test_an_answer_goes_on_with_its_beginning():
    begun = [*SAID, {"role": "assistant", "content": "xyz"}]
    made = both({**BODY, "messages": begun})
    (render, form) = calling_llm().tokenizer.apply_chat_template, {"tokenize": False, "continue_final_message": True}
    prompt = render([*SAID, {"role": "assistant", "content": "xyz"}], **form)
    (plain,) = ask(("/v1/completions", {"prompt": prompt, "max_tokens": 12, "temperature": 0}))
    assert made["content"][0]["text"] == plain.json()["choices"][0]["text"]


def num_tokens(**body):
    (answer,) = ask(("/v1/messages/count_tokens", {"messages": SAID, **body}))
    assert answer.status_code == 200, answer.text
    return answer.json()["input_tokens"]


def test_tokens_are_counted_as_they_are_read():
    (answer,) = ask((ANTHROPIC, {**BODY, "tools": TOOLS, "system": "be brief"}))
    assert num_tokens(tools=TOOLS, system="be brief") == told(ANTHROPIC, answer)[3]
    assert num_tokens(tools=TOOLS, tool_choice={"type": "none"}) == num_tokens()


def test_what_coding_agents_send():
    """Blocks for Anthropic's accounting and marks of its cache are no text."""
    marked = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    billed = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"}
    agent = {
        "system": [billed, {"type": "text", "text": "be brief", **marked}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "ab ab", "citations": None, **marked}]}],
        "tools": [{**TOOLS[0], "type": "custom", "eager_input_streaming": True, **marked}],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "max"}, "thinking": {"type": "adaptive"},
    }  # fmt: skip
    assert num_tokens(**agent) == num_tokens(tools=TOOLS, system="be brief")
    more = {"metadata": {"user_id": "u"}, "service_tier": "auto", **marked}
    (answer,) = ask((f"{ANTHROPIC}?beta=true", {**agent, **more, "max_tokens": 4}))
    assert answer.status_code == 200, answer.text


def test_messages_of_one_role_are_one():
    said = [{"role": "user", "content": "ab"}, {"role": "user", "content": [{"type": "text", "text": "cd"}]}]
    assert num_tokens(messages=said) == num_tokens(messages=[{"role": "user", "content": "ab\ncd"}])


REFUSED = {
    "no limit": ({"max_tokens": None}, "max_tokens"),
    "nothing said": ({"messages": []}, "messages"),
    "no blocks": ({"messages": [{"role": "user", "content": []}], "system": "a"}, "messages"),
    "too many results": (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}] * 3000}]}, "messages",
    ),
    "too hot": ({"temperature": 1.5}, "temperature"),
    "an unknown field": ({"wat": 1}, "wat"),
    "a document": ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
    "a picture": (
        {"messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}]}]},
        "image",
    ),
    "a tool of the server": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    "a tool without a name": ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice"),
    "a tool that is not there": ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    "results left out": ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "edits[0].type"),
    "servers of tools": ({"mcp_servers": [{}]}, "mcp_servers"),
    "a long chat": ({"messages": [{"role": "user", "content": "a" * 4000}]}, "fills the context"),
    "another model": ({"model": "claude"}, "does not exist"),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(fields, words, stream):
    (answer,) = ask((ANTHROPIC, {**BODY, "stream": stream, **fields}))
    assert answer.status_code == (404 if "model" in fields else 400)
    told = answer.json()
    assert (told["type"], told.keys()) == ("error", {"type", "error"})
    assert told["error"]["type"] == ("not_found_error" if "model" in fields else "invalid_request_error")
    assert words in told["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), ({"x-api-key": "wrong"}, 401), ({"x-api-key": ""}, 401), ({"x-api-key": "k"}, 200),
     ({"Authorization": "Bearer k"}, 200), ({"Authorization": "Bearer wrong", "x-api-key": "k"}, 401)],
)  # fmt: skip
def test_keys(headers, status):
    (answer,) = ask((ANTHROPIC, BODY), headers=headers, api_keys=["k"])
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]["type"] == "authentication_error"
