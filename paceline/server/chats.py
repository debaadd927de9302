"""From the messages of a request to a prompt of the engine, which opens images under the server's limits."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..errors import ConfigError
from ..hf.images import ImageLimits
from ..schema import brief
from ..target.prompts import TemplatedChat
from .protocol import ChatRequest, Image, Message, ToolCall
from .tools.forms import spell_out

LIMITS = ImageLimits(  # data URIs are always allowed
    max_bytes=20 << 20, timeout_s=10.0, hosts=(), max_images=16, max_total_pixels=100_000_000
)


def chat_prompt(body: ChatRequest, limits: ImageLimits, template: str = "tools") -> TemplatedChat:
    """The prompt for the engine. Raises `ConfigError`.

    template: the model's; if it does not use tools, they are written into the chat.
    """
    options: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if "chat_template" in options:  # a template is a program
        raise ConfigError("chat_template_kwargs.chat_template is not taken from requests", fix="leave it out")
    options["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message:
        options["continue_final_message"] = True
    messages, tools = read_messages(body.messages), [] if body.tool_choice == "none" else body.tools or []
    if "tools" not in template:
        messages = spell_out(messages, tools)
    elif tools:
        options["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
    return TemplatedChat(messages, options, limits)


def thinking(template: str, wanted: bool | None, effort: str | None = None) -> dict[str, Any]:
    """Variables of a template that say whether and how much to think: those that it may read. None: its default.

    effort: templates know `low`, `medium` and `high`; what is below or above is the lowest or highest of them.
    """
    effort = {"none": None, "minimal": "low", "xhigh": "high", "max": "high"}.get(effort or "none", effort)
    told = {"enable_thinking": wanted, "thinking": wanted, "reasoning_effort": effort}
    return {name: value for name, value in told.items() if value is not None and name in template}


def read_messages(messages: Sequence[Message]) -> list[Mapping[str, object]]:
    """The messages as `LLM.generate` takes them. Raises `ConfigError`."""
    return [_read(message) for message in messages]


def _read(message: Message) -> Mapping[str, object]:
    read: dict[str, object] = message.model_dump(exclude_none=True, exclude={"tool_calls"})
    if message.role == "developer":  # the newer name, which templates do not know
        read["role"] = "system"
    if isinstance(message.content, list):
        read["content"] = [
            {"type": "image", "url": _url(part)} if isinstance(part, Image) else part.model_dump()
            for part in message.content
        ]
    if not message.content and message.role in ("assistant", "tool"):
        read["content"] = ""
    if thoughts := message.reasoning_content or message.reasoning:
        read |= {"reasoning": thoughts, "reasoning_content": thoughts}
    if message.tool_calls:
        read["tool_calls"] = [_call(call) for call in message.tool_calls]
    return read


def _call(call: ToolCall) -> dict[str, object]:
    """Templates write the arguments as JSON themselves; what is none, since a call was cut, they get as text."""
    arguments: object = call.function.arguments
    with suppress(ValueError, RecursionError):
        arguments = json.loads(call.function.arguments or "{}")
    function = {"name": call.function.name, "arguments": {} if arguments is None else arguments}
    return {**call.model_dump(exclude_none=True), "function": function}


def read_object(arguments: str) -> dict[str, Any] | None:
    """The arguments of a call that an answer made; None where it was cut."""
    with suppress(ValueError, RecursionError):
        if isinstance(read := json.loads(arguments or "{}"), dict):
            return read
    return None


def _url(part: Image) -> str:
    """The URL of an image, never a file of this machine."""
    url = part.image_url.url
    if not url.lower().startswith(("data:", "http://", "https://")):
        expected = "a data: URI such as data:image/png;base64,..., or an http(s) URL of a host that the server allows"
        raise ConfigError("this image_url is not accepted", got=brief(url), expected=expected)
    return url
