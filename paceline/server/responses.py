"""/v1/responses: the answers of a chat in the newer format of the OpenAI API. Nothing is stored."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_validator

from .answers import Answering, Choice, Outputs
from .errors import ApiError, unsupported
from .protocol import (
    MAX_MESSAGES,
    ChatRequest,
    Count,
    Fields,
    HistoryFields,
    Image,
    ImageURL,
    JsonSchema,
    Message,
    ResponseFormat,
    Sampling,
    StreamOptions,
    Text,
    text_of,
)
from .streams import event

_LOGPROBS = "message.output_text.logprobs"


class InputText(HistoryFields):
    """Text of a message, or of an earlier answer of this endpoint."""

    type: Literal["input_text", "output_text"]
    text: str


class InputImage(HistoryFields):
    """An image of a message."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high"] | None = None
    file_id: None = None


class InputMessage(HistoryFields):
    """One message. An answer of this endpoint can be sent back unchanged."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Annotated[InputText | InputImage, Field(discriminator="type")]]

    @field_validator("type", mode="before")
    @classmethod
    def _check_kept(cls, kind: object) -> object:
        if kind == "item_reference":
            raise ValueError("nothing is kept here. Fix: send the message itself, as clients do with store=false")
        return kind

    def as_chat(self) -> Message:
        """The same as a message of a chat. Text parts become one text, which every chat template supports."""
        if isinstance(self.content, str):
            return Message(role=self.role, content=self.content)
        parts = [
            Text(type="text", text=part.text)
            if isinstance(part, InputText)
            else Image(type="image_url", image_url=ImageURL(url=part.image_url, detail=part.detail))
            for part in self.content
        ]
        is_text = parts and not any(isinstance(part, Image) for part in parts)
        return Message(role=self.role, content=text_of(parts) if is_text else parts)


class PlainFormat(Fields):
    """Text as it comes, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(JsonSchema):
    """JSON of a schema."""

    type: Literal["json_schema"]


Format: TypeAlias = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]


class TextOptions(Fields):
    """The form of the answer."""

    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesStreamOptions(Fields):
    """include_obfuscation has no effect."""

    include_obfuscation: bool | None = None


class ResponsesRequest(Sampling):
    """The body of /v1/responses."""

    input: str | Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Annotated[Count, Field(ge=1)] | None = None
    text: TextOptions | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream_options: ResponsesStreamOptions | None = None
    # known, but only supported with these values or without effect
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: None = None
    reasoning: None = None
    truncation: Literal["disabled"] | None = None

    def check(self) -> None:
        """Raise `ApiError` for fields that need stored requests, and for tools."""
        whole = "send the earlier messages in input"
        fixes = {
            "store": "send store=false; nothing is kept here",
            "previous_response_id": whole,
            "conversation": whole,
            "prompt": "send its text in input",
            "background": "send background=false",
            "tools": "use /v1/chat/completions",
        }
        for name, fix in fixes.items():
            if getattr(self, name):
                raise unsupported(name, fix)
        if self.top_logprobs and _LOGPROBS not in (self.include or ()):
            raise ApiError(400, f"top_logprobs needs {_LOGPROBS} in include.", "invalid_value", "top_logprobs")

    def as_chat(self) -> ChatRequest:
        """The same request to /v1/chat/completions."""
        messages = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        said = [message.as_chat() for message in messages]
        if self.instructions is not None:
            said.insert(0, Message(role="system", content=self.instructions))
        wanted, has_logprobs = None if self.text is None else self.text.format, _LOGPROBS in (self.include or ())
        schema = wanted if isinstance(wanted, SchemaFormat) else None
        return ChatRequest(
            **{name: getattr(self, name) for name in Sampling.model_fields},
            messages=said,
            store=self.store,
            max_completion_tokens=self.max_output_tokens,
            response_format=None if wanted is None else ResponseFormat(type=wanted.type, json_schema=schema),
            logprobs=has_logprobs,
            top_logprobs=self.top_logprobs if has_logprobs else None,
        )


@dataclass(kw_only=True)
class ResponseAnswering(Answering):
    """One request to /v1/responses. asked: the body of the request."""

    asked: ResponsesRequest
    id_prefix, whole_name = "resp_", "response"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._numbers = count()
        self._item_id = self.head["id"].replace("resp_", "msg_", 1)

    async def events(self, outputs: Outputs, options: StreamOptions) -> AsyncGenerator[str]:
        """The API's events. The first are sent with the first tokens, so that an earlier error has its own status."""
        (choice,), begun = self.choices, self._response("in_progress")
        empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        beginning = [
            self._event("created", response=begun),
            self._event("in_progress", response=begun),
            self._event("output_item.added", output_index=0, item=self._item("in_progress", [])),
            self._of_part("content_part.added", part=empty),
        ]
        async with aclosing(self.deltas(outputs)) as deltas:
            async for _, delta in deltas:
                for opening in beginning:
                    yield opening
                beginning = []
                if delta.text or delta.logprobs or delta.provenance:
                    more = {"provenance": delta.provenance} if choice.pieces is not None else {}
                    yield self._of_part("output_text.delta", delta=delta.text, logprobs=self.entries(delta), **more)
        part, whole = self._part(choice), self.whole()
        yield self._of_part("output_text.done", text=choice.text, logprobs=part["logprobs"])
        yield self._of_part("content_part.done", part=part)
        yield self._event("output_item.done", output_index=0, item=whole["output"][0])
        yield self._event(whole["status"], response=whole)

    def failed(self, error: ApiError) -> str:
        told = {"code": error.code, "message": error.detail, "param": error.param}
        return event({"type": "error", "sequence_number": next(self._numbers), **told}, "error")

    def whole(self) -> dict[str, Any]:
        (choice,) = self.choices
        status = "completed" if choice.finish_reason == "stop" else "incomplete"
        ending = self.ending()
        used = ending.pop("usage")
        usage = {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cache_write_tokens": 0, **used["prompt_tokens_details"]},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0, **used.get("completion_tokens_details", {})},
            "total_tokens": used["total_tokens"],
        }
        item = self._item(status, [self._part(choice)])
        why = {"reason": "max_output_tokens"} if choice.finish_reason == "length" else None
        body = {"output": [item], "usage": usage, "incomplete_details": why}
        return {**self._response(status), **body, **ending}

    def _part(self, choice: Choice) -> dict[str, Any]:
        part = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": self.entries(choice)}
        return part | ({"provenance": choice.provenance} if choice.pieces is not None else {})

    def _event(self, kind: str, **content: Any) -> str:
        kind = f"response.{kind}"
        return event({"type": kind, "sequence_number": next(self._numbers), **content}, kind)

    def _of_part(self, kind: str, **content: Any) -> str:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **content)

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _response(self, status: str) -> dict[str, Any]:
        """A response object with the fields of the request, and no output."""
        body = self.asked
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
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": None,
            "store": body.store,
            "text": {"format": {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True)},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "usage": None,
        }
