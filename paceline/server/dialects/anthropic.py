"""Anthropic's API: /v1/messages, and how many tokens one has."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ..answers import Answering, Choice, Delta, Outputs
from ..chats import read_object
from ..errors import ApiError
from ..openai import Pick, answer_chat, prompt_of
from ..protocol import StreamOptions
from ..streams import connected, event
from .anthropic_chats import CountRequest, MessagesRequest


@dataclass
class AnthropicAnswering(Answering):
    """One request to /v1/messages in progress.

    blocks: of the answer so far, the input of calls as text. told: the events of the last delta.
    """

    blocks: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    told: list[str] = field(default_factory=list[str])
    id_prefix, whole_name = "msg_", "message"

    async def deltas(self, outputs: Outputs) -> AsyncGenerator[tuple[Choice, Delta]]:
        """The same, which `blocks` takes."""
        async with aclosing(super().deltas(outputs)) as deltas:
            async for choice, delta in deltas:
                self.told = [*self._taken(delta)]
                yield choice, delta

    async def events(self, outputs: Outputs, options: StreamOptions) -> AsyncGenerator[str]:
        """The API's events. The first are sent with the first tokens, so that an earlier error has its own status."""
        is_begun = False
        async with aclosing(self.deltas(outputs)) as deltas:
            async for _ in deltas:
                if not is_begun:
                    yield _event("message_start", message=self._message([]))
                    yield _event("ping")
                is_begun = True
                for told in self.told:
                    yield told
        if self.blocks:
            yield self._of_block("stop")
        yield _event("message_delta", delta=self._end(), usage=self._usage())
        yield _event("message_stop")

    def _taken(self, delta: Delta) -> Iterator[str]:
        for kind, text in (("thinking", delta.reasoning), ("text", delta.text)):
            if text:
                if not self.blocks or self.blocks[-1]["type"] != kind:
                    signed = {"signature": ""} if kind == "thinking" else {}
                    yield from self._opened({"type": kind, kind: "", **signed}, {})
                yield self._grown(kind, kind, text)
        for call in delta.calls:
            function = call["function"]
            if "id" in call:
                block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": ""}
                yield from self._opened(block, {"input": {}})
            if arguments := function.get("arguments"):
                yield self._grown("input_json", "input", arguments, "partial_json")

    def _opened(self, block: dict[str, Any], shown: dict[str, Any]) -> Iterator[str]:
        if self.blocks:
            yield self._of_block("stop")
        self.blocks.append(block)
        yield self._of_block("start", content_block={**block, **shown})

    def _grown(self, kind: str, name: str, text: str, shown: str = "") -> str:
        self.blocks[-1][name] += text
        return self._of_block("delta", delta={"type": f"{kind}_delta", shown or name: text})

    def _of_block(self, kind: str, **content: Any) -> str:
        return _event(f"content_block_{kind}", index=len(self.blocks) - 1, **content)

    def failed(self, error: ApiError) -> str:
        return event(_error(error), "error")

    def whole(self) -> dict[str, Any]:
        blocks = [{**one, "input": read_object(one["input"]) or {}} if "input" in one else one for one in self.blocks]
        return {**self._message(blocks), **self._end()}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        """The answer before its end."""
        named = {"id": self.head["id"], "type": "message", "role": "assistant", "model": self.head["model"]}
        return {**named, "content": content, "stop_reason": None, "stop_sequence": None, "usage": self._usage()}

    def _end(self) -> dict[str, Any]:
        """Why the answer ended."""
        (choice,), most = self.choices, self.params.max_tokens or 0
        if choice.finish_reason == "stop" and isinstance(choice.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
        full = "max_tokens" if len(choice.token_ids) >= most else "model_context_window_exceeded"
        reasons = {"stop": "end_turn", "length": full, "tool_calls": "tool_use"}
        return {"stop_reason": reasons.get(choice.finish_reason or ""), "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        """The numbers of tokens. What the prefix cache had is apart from other tokens of the prompt."""
        usage = self.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        read = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
        return {"input_tokens": usage["prompt_tokens"] - cached, **read, "output_tokens": usage["completion_tokens"]}


def add_anthropic(app: FastAPI, pick: Pick) -> None:
    """Add the endpoints."""
    app.state.error_forms["/v1/messages"] = _error

    @app.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        service = await pick(request, body.model)
        chat = body.as_chat(service.template, **body.sampling())
        return await answer_chat(service, chat, request, AnthropicAnswering)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountRequest, request: Request) -> dict[str, int]:
        service = await pick(request, body.model)
        prompt = prompt_of(service, body.as_chat(service.template))
        async with connected(request.receive, request.scope["end_at"]):
            return {"input_tokens": len(await service.engine.encode(prompt))}


def _event(kind: str, **content: Any) -> str:
    return event({"type": kind, **content}, kind)


def _error(error: ApiError) -> dict[str, Any]:
    kinds = {401: "authentication", 403: "permission", 404: "not_found", 429: "rate_limit", 503: "overloaded"}
    kinds |= {504: "timeout"}
    kind = kinds.get(error.status_code, "invalid_request" if error.status_code < 500 else "api")
    told = {"type": "request_too_large" if error.status_code == 413 else f"{kind}_error", "message": error.detail}
    return {"type": "error", "error": told}
