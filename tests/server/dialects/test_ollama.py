"""Ollama's API: shapes of answers, what is refused, and what clients ask about the model."""

import pytest

from paceline.server.dialects.ollama import VERSION
from tests.server.dialects.common import OLLAMA, SAID, ask, get, pieces, saying, thinking_llm, told
from tests.server.helpers import calling_llm
from tests.server.test_tools import CALL, TOOL

LIMITED = {"num_predict": 12, "seed": 3}
CHAT = {"messages": SAID, "options": LIMITED}
ENDING = {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"}


def test_a_stream_is_what_is_asked_for_by_default():
    streamed, whole = ask((OLLAMA, CHAT), (OLLAMA, {**CHAT, "stream": False}))
    assert streamed.headers["content-type"] == "application/x-ndjson"
    first, *_, last = pieces(streamed)
    assert first.keys() == {"model", "created_at", "message", "done"}
    assert first["message"].keys() == {"role", "content"}
    assert last.keys() == whole.json().keys() == first.keys() | {"done_reason"} | ENDING
    assert (last["message"], last["done_reason"]) == ({"role": "assistant", "content": ""}, "length")
    assert told(OLLAMA, streamed) == told(OLLAMA, whole)


def test_a_prompt():
    """It is a chat of one message, unless it is raw."""
    chat, plain, raw, streamed = ask(
        (OLLAMA, {"messages": [{"role": "system", "content": "be brief"}, *SAID], "options": LIMITED}),
        ("/api/generate", {"prompt": "ab ab", "system": "be brief", "options": LIMITED, "stream": False}),
        ("/api/generate", {"prompt": "ab ab", "raw": True, "options": LIMITED, "stream": False}),
        ("/api/generate", {"prompt": "ab ab", "raw": True, "options": LIMITED}),
    )
    assert told("/api/generate", plain) == told(OLLAMA, chat)
    assert plain.json()["response"]
    assert "message" not in plain.json()
    assert raw.json()["prompt_eval_count"] == len(calling_llm().encode("ab ab"))
    assert told("/api/generate", streamed) == told("/api/generate", raw)


@pytest.mark.parametrize("path", [OLLAMA, "/api/generate"])
def test_nothing_is_how_clients_load_a_model(path):
    (answer,) = ask((path, {"keep_alive": -1}))
    assert (answer.json()["done"], answer.json()["done_reason"]) == (True, "load")


@pytest.mark.parametrize("stream", [False, True])
def test_calls(stream, monkeypatch):
    """They are objects, not text, and come before the end of a stream."""
    saying(monkeypatch, f"so {CALL}")
    body = {"messages": SAID, "tools": [TOOL], "options": {"num_predict": 200, "temperature": 0}, "stream": stream}
    (answer,) = ask((OLLAMA, body))
    text, calls, *_ = told(OLLAMA, answer)
    assert (text, calls) == ("so", [("f", {"x": 1})])
    parts = pieces(answer) if stream else [answer.json()]
    assert parts[-1]["done_reason"] == "stop"
    assert [part["done"] for part in parts if part["message"].get("tool_calls")] == [not stream]


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts(stream, monkeypatch):
    saying(monkeypatch, "hm</think>so")
    body = {"messages": SAID, "options": {"num_predict": 200}, "stream": stream, "think": True}
    thought, plain = ask((OLLAMA, body), (OLLAMA, {**body, "think": False}), llm=thinking_llm())
    assert told(OLLAMA, thought)[:3] == ("so", [], "hm")
    assert told(OLLAMA, plain)[3] == told(OLLAMA, thought)[3] - len("<think>")
    (shown,) = ask(("/api/show", {}), llm=thinking_llm())
    assert "thinking" in shown.json()["capabilities"]


def test_forms():
    schema = {"enum": ["ab", "cd"]}
    options = {"num_predict": 200, "temperature": 0}
    one, _ = ask(*((OLLAMA, {"messages": SAID, "format": form, "options": options}) for form in (schema, "")))
    assert told(OLLAMA, one)[0] in ('"ab"', '"cd"')


def test_log_probabilities():
    body = {**CHAT, "logprobs": True, "top_logprobs": 2}
    streamed, whole = ask((OLLAMA, body), (OLLAMA, {**body, "stream": False}))
    entries = whole.json()["logprobs"]
    assert [one for part in pieces(streamed) for one in part.get("logprobs", ())] == entries
    assert len(entries) == 12
    assert {len(one["top_logprobs"]) for one in entries} == {2}


REFUSED = {
    "an unknown option": ({"options": {"wat": 1}}, "options.wat"),
    "an option that changes answers": ({"options": {"mirostat": 2}}, "options.mirostat"),
    "a penalty of the last tokens": ({"options": {"repeat_last_n": 64}}, "options.repeat_last_n"),
    "more context than there is": ({"options": {"num_ctx": 4096}}, "at most 2048"),
    "a wrong type": ({"options": {"top_k": "1"}}, "options.top_k"),
    "too cold": ({"options": {"temperature": -1}}, "temperature"),
    "no thoughts": ({"think": True}, "does not support thinking"),
    "a wrong form": ({"format": "xml"}, "format"),
    "a bad schema": ({"format": {"type": "wat"}}, "wat"),
    "a role": ({"messages": [{"role": "wat", "content": ""}]}, "messages[0].role"),
    "arguments as text": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    "a picture": ({"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "image"),
    "a long chat": ({"messages": [{"role": "user", "content": "a" * 4000}]}, "fills the context"),
    "another model": ({"model": "other:latest"}, "does not exist"),
    "an unknown field": ({"wat": 1}, "wat"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(fields, words, stream):
    (answer,) = ask((OLLAMA, {**CHAT, "stream": stream, **fields}))
    assert answer.status_code == (404 if "model" in fields else 400)
    assert answer.json().keys() == {"error"}
    assert words in answer.json()["error"]


@pytest.mark.parametrize(
    "fields", [{"suffix": "b"}, {"template": "{{ .Prompt }}"}, {"context": [1]}, {"raw": True, "system": "a"}]
)
def test_what_is_refused_of_prompts(fields):
    (answer,) = ask(("/api/generate", {"prompt": "ab", **fields}))
    assert answer.status_code == 400
    assert [*fields][-1] in answer.json()["error"]


def test_what_clients_ask_about_the_model():
    shown, old = ask(("/api/show", {}), ("/api/show", {"model": None, "name": "tiny:latest"}))
    paths = ("/api/tags", "/api/ps", "/api/version", "/api/nothing")
    tags, running, version, nothing = get(*paths)
    assert version.json() == {"version": VERSION}
    (entry,) = tags.json()["models"]
    assert (entry["name"], entry["digest"]) == ("tiny", calling_llm().loaded.fingerprint)
    assert entry["size"] > 0
    assert running.json()["models"][0]["context_length"] == 2048
    assert shown.json()["model_info"]["llama.context_length"] == 2048
    assert shown.json()["capabilities"] == ["completion", "tools"]
    assert old.json()["details"] == entry["details"]
    assert (nothing.status_code, nothing.json()) == (404, {"error": "Not Found"})
    assert [one.status_code for one in get("/", "/api/tags", "/api/version", method="HEAD")] == [200] * 3


def test_embeddings():
    """Those of /v1/embeddings: normalised, and in the older endpoint as the model makes them."""
    texts = ["ab ab", "cd"]
    plain, raw, each, one, short, old = ask(
        ("/v1/embeddings", {"input": texts, "normalize": True}),
        ("/v1/embeddings", {"input": "cd", "normalize": False}),
        ("/api/embed", {"input": texts, "truncate": True}), ("/api/embed", {"input": "cd"}),
        ("/api/embed", {"input": "cd", "dimensions": 4}), ("/api/embeddings", {"prompt": "cd"}),
    )  # fmt: skip
    assert each.json()["embeddings"] == [entry["embedding"] for entry in plain.json()["data"]]
    assert each.json()["prompt_eval_count"] == plain.json()["usage"]["prompt_tokens"]
    assert one.json()["embeddings"] == each.json()["embeddings"][1:]
    assert len(short.json()["embeddings"][0]) == 4
    assert old.json()["embedding"] == raw.json()["data"][0]["embedding"] != one.json()["embeddings"][0]
    for path, body in (("/api/embed", {"input": []}), ("/api/embed", {"input": "a" * 4000}), ("/api/embeddings", {})):
        (refused,) = ask((path, body))
        assert (refused.status_code, refused.json().keys()) == (400, {"error"})


def test_keys():
    path = "/api/tags"
    (none,), (one,) = get(path, api_keys=["k"]), get(path, api_keys=["k"], headers={"Authorization": "Bearer k"})
    assert (none.status_code, one.status_code) == (401, 200)
    assert "No API key" in none.json()["error"]
