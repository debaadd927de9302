"""Tool calls in an answer: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, or a forced call.

Hermes, Qwen and many other models use this format. What cannot be parsed as a call stays text; beside calls, the
white space before one and a call that was cut are no text.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError
from .protocol import ChatRequest, Request, Tool

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class ToolReader:
    """Separates tool calls from the text of one answer. is_forced: the whole answer is one call, see `forced_form`.

    calls: the calls so far, in the API's format.
    """

    def __init__(self, is_forced: bool = False):
        self.is_forced, self.calls = is_forced, list[dict[str, Any]]()
        self._held = ""

    def feed(self, text: str) -> str:
        """The text outside calls. What may belong to a call, white space before it included, is held back."""
        self._held += text
        shown = ""
        while not self.is_forced:
            before, tag, rest = self._held.partition(_OPEN)
            inner, end, after = rest.partition(_CLOSE)
            sure = (before if tag else before[: len(before) - _overlap(before, _OPEN)]).rstrip()
            if not end:
                self._held = self._held[len(sure) :]
                return shown + sure
            is_call = self._take(inner) or self._take(inner.rpartition(_OPEN)[2])  # behind one that was not finished
            shown += sure if is_call else before + tag + inner + end
            self._held = after
        return shown

    def finish(self) -> str:
        """The rest of the text at the end of the answer. A complete call without its whole closing tag counts."""
        held, self._held = self._held, ""
        inner = held if self.is_forced else held.partition(_OPEN)[2]
        self._take(inner[: len(inner) - _overlap(inner, _CLOSE)])
        return "" if self.calls else held

    def _take(self, text: str) -> bool:
        """Parse one call; returns whether it is one."""
        try:
            read = json.loads(text)
            name, arguments = read["name"], read.get("arguments", read.get("parameters", {}))
        except (ValueError, TypeError, KeyError, RecursionError):
            return False
        if not isinstance(name, str):
            return False
        arguments = {} if arguments in (None, "") else arguments
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        function = {"name": name, "arguments": written}
        self.calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
        return True


def reader_of(body: Request) -> ToolReader | None:
    """The reader for an answer to this request; None where no tool may be called."""
    if not isinstance(body, ChatRequest) or not body.tools or body.tool_choice == "none":
        return None
    return ToolReader(is_forced=body.tool_choice not in (None, "auto"))


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


def spell_out(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[Mapping[str, Any]]:
    """The chat for a template without tools: tools and calls become text, in Hermes' format.

    Tools are appended to the system message, calls have the format that `ToolReader` parses, and results of tools
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


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end may be the beginning of the tag."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-size:])), 0)
