"""Requests to every dialect, and their answers in one form."""

import asyncio
import copy
import json
from dataclasses import replace
from functools import cache

from paceline import LLM, StructuredOutputsParams
from paceline.server import protocol
from tests.server.helpers import calling_llm, server

OPENAI, OLLAMA, ANTHROPIC, LLAMA = "/v1/chat/completions", "/api/chat", "/v1/messages", "/completion"
SAID = [{"role": "user", "content": "ab ab"}]


def ask(*requests, llm=None, headers=None, **settings):
    """The answers to (path, body), one after another."""

    async def all_of_them():
        async with server(llm or calling_llm(), headers, **settings) as client:
            sent = [(path, json.dumps({"model": "tiny", **body})) for path, body in requests]
            kind = {"Content-Type": "application/json"}
            return [await client.post(path, content=body, headers=kind) for path, body in sent]

    return asyncio.run(all_of_them())


def get(*paths, method="GET", headers=None, **settings):
    """The answers to requests without a body."""

    async def all_of_them():
        async with server(calling_llm(), headers, **settings) as client:
            return [await client.request(method, path) for path in paths]

    return asyncio.run(all_of_them())


@cache
def thinking_llm():
    """The model of `calling_llm` with a template that opens thoughts where they are wanted."""
    tokenizer = copy.deepcopy(calling_llm().tokenizer)
    tokenizer.chat_template += "{% if enable_thinking %}<think>{% endif %}"
    return LLM(calling_llm().loaded.model, tokenizer=tokenizer, max_num_seqs=2)


def saying(monkeypatch, text):
    """Every answer is this text."""
    params, form = protocol.Request.params, {"structured_outputs": StructuredOutputsParams(choice=[text])}
    monkeypatch.setattr(protocol.Request, "params", lambda *given: replace(params(*given), **form))


def pieces(answer):
    """The objects of a stream: lines of JSON, or server-sent events."""
    if "ndjson" in answer.headers["content-type"]:
        assert answer.text.endswith("\n")
        return [json.loads(line) for line in answer.text.splitlines()]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def told(path, answer):
    """Text, tool calls, thoughts, number of tokens of the prompt and of the answer, and whether it was cut."""
    assert answer.status_code == 200, answer.text
    is_whole = answer.headers["content-type"] == "application/json"
    return TOLD[path]([answer.json()] if is_whole else pieces(answer), is_whole)


def _openai(parts, is_whole):
    choices = [choice for part in parts for choice in part["choices"]]
    said, usage = [one["message" if is_whole else "delta"] for one in choices], parts[-1]["usage"]
    calls = [call["function"] for one in said for call in one.get("tool_calls") or ()]
    text, thoughts = ("".join(one.get(name) or "" for one in said) for name in ("content", "reasoning_content"))
    made = [(call["name"], json.loads(call["arguments"])) for call in calls]
    counts = usage["prompt_tokens"], usage["completion_tokens"]
    return text, made, thoughts, *counts, choices[-1]["finish_reason"] == "length"


def _ollama(parts, is_whole):
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    said = [part.get("message") or {"content": part["response"], **part} for part in parts]
    calls = [call["function"] for one in said for call in one.get("tool_calls", ())]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    text, thoughts = ("".join(one.get(name, "") for one in said) for name in ("content", "thinking"))
    last = parts[-1]
    assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"] > 0
    made = [(call["name"], call["arguments"]) for call in calls]
    return text, made, thoughts, last["prompt_eval_count"], last["eval_count"], last["done_reason"] == "length"


def message_of(parts):
    """The message that the events of a stream of Anthropic's API make."""
    kinds = [part["type"] for part in parts]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    made, opened = parts[0]["message"], None
    for part in parts[2:-2]:
        if part["type"] == "content_block_start":
            assert opened is None
            opened = part["index"]
            assert opened == len(made["content"])
            made["content"].append({**part["content_block"], "json": ""})
        assert part["index"] == opened
        block = made["content"][-1]
        if part["type"] == "content_block_delta":
            change = part["delta"]
            name = {"input_json_delta": "partial_json"}.get(change["type"], change["type"].removesuffix("_delta"))
            assert change["type"].startswith("input_json" if block["type"] == "tool_use" else block["type"])
            block["json" if name == "partial_json" else name] += change[name]
        elif part["type"] == "content_block_stop":
            opened, text = None, block.pop("json")
            block |= {"input": json.loads(text)} if block["type"] == "tool_use" else {}
    assert opened is None
    return {**made, **parts[-2]["delta"], "usage": parts[-2]["usage"]}


def _anthropic(parts, is_whole):
    made = parts[0] if is_whole else message_of(parts)
    text, thoughts = ("".join(one.get(kind, "") for one in made["content"]) for kind in ("text", "thinking"))
    calls = [(one["name"], one["input"]) for one in made["content"] if one["type"] == "tool_use"]
    usage = made["usage"]
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return text, calls, thoughts, num_prompt, usage["output_tokens"], made["stop_reason"] == "max_tokens"


def _llama(parts, is_whole):
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    text, last = "".join(part["content"] for part in parts), parts[-1]
    counts = last["tokens_evaluated"], last["tokens_predicted"]
    assert is_whole or sum(len(part["tokens"]) for part in parts) == counts[1]
    return text, [], "", *counts, last["stop_type"] == "limit"


def _completion(parts, is_whole):
    name = "message" if is_whole else "delta"
    choices = [[{**one, name: {"content": one["text"]}} for one in part["choices"]] for part in parts]
    return _openai([{**part, "choices": each} for part, each in zip(parts, choices, strict=True)], is_whole)


TOLD = {
    OPENAI: _openai,
    "/v1/completions": _completion,
    OLLAMA: _ollama,
    "/api/generate": _ollama,
    ANTHROPIC: _anthropic,
    LLAMA: _llama,
}
