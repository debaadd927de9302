"""Tools in a request: the form that forces a call, and how a template without tools is told of them."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ConfigError
from ..protocol import ChatRequest, Tool
from .families import Asked, Format

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def called(body: ChatRequest) -> list[Tool]:
    """The tools that an answer to this request may call."""
    return [] if body.tool_choice == "none" else body.tools or []


def asked_by(body: ChatRequest) -> Asked:
    """What a request says of its answer. Raises `ConfigError`."""
    form = body.structured_outputs
    return Asked(
        tools={tool.function.name: tool.function.parameters or {} for tool in called(body)},
        most=1 if body.parallel_tool_calls is False else sys.maxsize,
        is_forced=_is_forced(body),
        is_strict=_is_strict(body),
        is_formed=body.response_form is not None or (form is not None and "grammar" not in form),
        shows_special=body.skip_special_tokens is False,
    )


def _is_forced(body: ChatRequest) -> bool:
    return body.tool_choice not in (None, "auto", "none")


def _is_strict(body: ChatRequest) -> bool:
    """Whether calls have the schemas of strict tools; not where the request sets the form of the whole answer."""
    has_form = body.structured_outputs is not None or body.response_form is not None or _is_forced(body)
    return not has_form and any(tool.function.strict for tool in called(body))


def forced_form(body: ChatRequest) -> dict[str, Any] | None:
    """The structured outputs that force one call, if tool_choice requires it. Raises `ConfigError`.

    Arguments are those of the tool's schema alone unless it says otherwise: small models can write more of them until
    they run out of tokens.
    """
    choice, tools = body.tool_choice, body.tools or []
    if choice in (None, "auto", "none"):
        return None
    if isinstance(choice, Tool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    if not tools:
        raise ConfigError("tool_choice names no tool of this request", fix="list it under tools")
    schema = json.dumps({"anyOf": [_schema(tool) for tool in tools]})
    return {"json": schema, "disable_additional_properties": True}


def strict_form(body: ChatRequest, form: Format) -> dict[str, Any] | None:
    """The structured outputs under which a call that the model begins has the schema of its tool, if one is strict.

    Text is free, and so are the arguments of tools that are not strict. Raises `ConfigError` for a format whose
    arguments are no JSON.
    """
    tools = called(body)
    if not _is_strict(body):
        return None
    if form.written is None:
        got = "none" if form.calls is None else form.calls.__name__
        raise ConfigError(
            "strict tools need a format of calls whose arguments are JSON", got=got,
            fix='leave strict out, or demand a call by tool_choice "required", which always keeps the schema',
        )  # fmt: skip
    mark, before, behind = form.written
    calls = [_call_in_lark(form, before, tool, behind) for tool in tools]
    begin, free = form.as_lark(mark), "".join(f" | TEXT {form.as_lark(text)}" for text in form.free)
    lazy = "[lazy]" if begin.startswith('"') else ""
    start = f"start: (head ({' | '.join(calls)}){free})* rest"
    return {"grammar": f"%llguidance {{}}\n{start}\nhead{lazy}: TEXT {begin}\nrest: TEXT\nTEXT: /(.|\\n)*/\n"}


def _call_in_lark(form: Format, before: str, tool: Tool, behind: str) -> str:
    """What is behind the mark of a call."""
    schema = dict(tool.function.parameters or {}) if tool.function.strict else {}
    if tool.function.strict:
        schema.setdefault("additionalProperties", False)
    text = json.dumps({"type": "object", **schema, "x-guidance": {"whitespace_pattern": " ?"}})
    return f"{form.as_lark(before.replace('NAME', tool.function.name))} %json {text} {form.as_lark(behind)}"


def spell_out(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[Mapping[str, Any]]:
    """The chat for a template without tools: tools and calls become text, in Hermes' format.

    Tools are appended to the system message, calls have the format that `Hermes` reads, and results of tools
    become user messages.
    """
    told = [_spelled(message) for message in messages]
    if not tools:
        return told
    functions = [tool.function.model_dump(exclude_none=True) for tool in tools]
    listed = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    form = f'{_OPEN}\n{{"name": NAME, "arguments": OBJECT}}\n{_CLOSE}'
    said = f"You can call these functions:\n{listed}\nTo call one, answer with its name and arguments:\n{form}"
    if told[0]["role"] == "system":
        return [_with_text(told[0], f"\n\n{said}"), *told[1:]]
    return [{"role": "system", "content": said}, *told]


def _spelled(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message["role"] == "tool":
        content = message.get("content") or ""
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    return _with_text(plain, "\n".join(f"{_OPEN}\n{call}\n{_CLOSE}" for call in calls)) if calls else plain


def _with_text(message: Mapping[str, Any], text: str) -> Mapping[str, Any]:
    content = message.get("content") or ""
    more = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return {**message, "content": more}


def _schema(tool: Tool) -> dict[str, Any]:
    arguments = tool.function.parameters or {"type": "object"}
    properties = {"name": {"const": tool.function.name}, "arguments": arguments}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
