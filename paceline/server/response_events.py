"""The answers of /v1/responses: items of thoughts, of text and of calls, whole or as the API's events."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from .answers import Answering, Choice, Delta, Outputs
from .errors import ApiError
from .protocol import StreamOptions
from .responses import FunctionChoice, ResponsesRequest
from .streams import event


@dataclass(kw_only=True)
class ResponseAnswering(Answering):
    """One request to /v1/responses.

    asked: the body of the request. items: of the answer so far: thoughts, text, calls. made: events of the last delta.
    """

    asked: ResponsesRequest
    items: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    made: list[str] = field(default_factory=list[str])
    has_begun: bool = False
    id_prefix, whole_name = "resp_", "response"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._numbers = count()

    async def deltas(self, outputs: Outputs) -> AsyncGenerator[tuple[Choice, Delta]]:
        """The deltas, of which items are made."""
        async with aclosing(super().deltas(outputs)) as deltas:
            async for choice, delta in deltas:
                self.made = list(self._grow(choice, delta))
                yield choice, delta

    async def events(self, outputs: Outputs, options: StreamOptions) -> AsyncGenerator[str]:
        """The API's events. The first are sent with the first tokens, so that an earlier error has its own status."""
        async with aclosing(self.deltas(outputs)) as deltas:
            async for _ in deltas:
                for one in self.made:
                    yield one
        whole = self.whole()
        yield self._event(whole["status"], response=whole)

    def failed(self, error: ApiError) -> str:
        told = {"code": error.code, "message": error.detail, "param": error.param}
        return event({"type": "error", "sequence_number": next(self._numbers), **told}, "error")

    def whole(self) -> dict[str, Any]:
        ending = self.ending()
        used = ending.pop("usage")
        usage = {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cache_write_tokens": 0, **used["prompt_tokens_details"]},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0, **used.get("completion_tokens_details", {})},
            "total_tokens": used["total_tokens"],
        }
        why = {"reason": "max_output_tokens"} if self.choices[0].finish_reason == "length" else None
        body = {"output": self.items, "usage": usage, "incomplete_details": why}
        return {**self._response(self._status), **body, **ending}

    @property
    def _status(self) -> str:
        return "completed" if self.choices[0].finish_reason in ("stop", "tool_calls") else "incomplete"

    def _grow(self, choice: Choice, delta: Delta) -> Iterator[str]:
        """Add to the items; yields the events that tell of it."""
        if not self.has_begun:
            self.has_begun = True
            begun = self._response("in_progress")
            yield self._event("created", response=begun)
            yield self._event("in_progress", response=begun)
        for call in delta.calls:
            if "id" not in call:  # of a call that is open
                yield self._argue(call)
        if delta.reasoning:
            yield from self._begin("reasoning", "rs", summary=[], content=[{"type": "reasoning_text", "text": ""}])
            self._item("reasoning")["content"][0]["text"] += delta.reasoning
            yield self._of_part("reasoning", "reasoning_text.delta", delta=delta.reasoning)
        if delta.text or delta.logprobs or delta.provenance:
            yield from self._begin_text()
            more = {"provenance": delta.provenance} if choice.pieces is not None else {}
            yield self._of_part("message", "output_text.delta", delta=delta.text, logprobs=self.entries(delta), **more)
        for call in delta.calls:
            if "id" in call:
                name = call["function"]["name"]
                yield from self._begin("function_call", "fc", call_id=call["id"], name=name, arguments="")
                if call["function"]["arguments"]:
                    yield self._argue(call)
        if choice.finish_reason is not None:
            if not self.items:
                yield from self._begin_text()
            yield from self._end(self._status, "reasoning", "message", "function_call")

    def _argue(self, call: dict[str, Any]) -> str:
        item, more = self._item("function_call"), call["function"]["arguments"]
        item["arguments"] += more
        return self._of(item, "function_call_arguments.delta", delta=more)

    def _item(self, kind: str) -> dict[str, Any]:
        """The last item of a kind."""
        return next(item for item in reversed(self.items) if item["type"] == kind)

    def _begin(self, kind: str, prefix: str, **content: Any) -> Iterator[str]:
        """Open an item, unless one of this kind is; other items end, apart from the text."""
        is_open = any(item["type"] == kind and item["status"] == "in_progress" for item in self.items)
        if is_open and kind != "function_call":
            return
        yield from self._end("completed", "reasoning", "function_call")
        own = self.head["id"].replace("resp", prefix, 1) + ("" if kind == "message" else f"_{len(self.items)}")
        self.items.append({"id": own, "type": kind, "status": "in_progress", **content})
        yield self._of(self.items[-1], "output_item.added", item=self.items[-1])

    def _begin_text(self) -> Iterator[str]:
        opened = list(self._begin("message", "msg", role="assistant", content=[]))
        yield from opened
        if opened:
            yield self._of_part("message", "content_part.added", part=self._part(Choice(index=0)))

    def _end(self, status: str, *kinds: str) -> Iterator[str]:
        """End the open items of these kinds."""
        for item in self.items:
            if item["type"] not in kinds or item["status"] != "in_progress":
                continue
            item["status"], kind = status, item["type"]
            if kind == "message":
                part = self._part(self.choices[0])
                item["content"] = [part]
                yield self._of_part(kind, "output_text.done", text=part["text"], logprobs=part["logprobs"])
                yield self._of_part(kind, "content_part.done", part=part)
            elif kind == "reasoning":
                yield self._of_part(kind, "reasoning_text.done", text=item["content"][0]["text"])
            else:
                yield self._of(item, "function_call_arguments.done", name=item["name"], arguments=item["arguments"])
            yield self._of(item, "output_item.done", item=item)

    def _part(self, choice: Choice) -> dict[str, Any]:
        part = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": self.entries(choice)}
        return part | ({"provenance": choice.provenance} if choice.pieces is not None else {})

    def _event(self, kind: str, **content: Any) -> str:
        kind = f"response.{kind}"
        return event({"type": kind, "sequence_number": next(self._numbers), **content}, kind)

    def _of(self, of: dict[str, Any], kind: str, **content: Any) -> str:
        known = {"output_index": self.items.index(of)} | ({} if "item" in content else {"item_id": of["id"]})
        return self._event(kind, **known, **content)

    def _of_part(self, of: str, kind: str, **content: Any) -> str:
        return self._of(self._item(of), kind, content_index=0, **content)

    def _response(self, status: str) -> dict[str, Any]:
        """A response object with the fields of the request, and no output."""
        body, choice = self.asked, self.asked.tool_choice
        wanted = body.text.format if body.text is not None else None
        said = {"instructions", "max_output_tokens", "model", "temperature", "top_p", "user"}
        return {
            **body.model_dump(include=said),
            "id": self.head["id"],
            "object": "response",
            "created_at": self.head["created"],
            "status": status,
            "error": None,
            "incomplete_details": None,
            "metadata": body.metadata or {},
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": body.reasoning and body.reasoning.model_dump(),
            "store": body.store,
            "text": {"format": {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True)},
            "tool_choice": choice.model_dump() if isinstance(choice, FunctionChoice) else choice or "auto",
            "tools": [{"strict": False, **tool.model_dump(exclude_none=True)} for tool in body.tools or ()],
            "truncation": "disabled",
            "usage": None,
        }
