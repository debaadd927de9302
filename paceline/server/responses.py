"""The body of /v1/responses, the newer format of the OpenAI API, as a request for a chat. Nothing is stored."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from ..schema import brief
from .errors import ApiError, unsupported
from .protocol import (
    MAX_MESSAGES,
    CalledFunction,
    ChatRequest,
    Count,
    Effort,
    Fields,
    Function,
    HistoryFields,
    Image,
    ImageURL,
    JsonSchema,
    Message,
    ResponseFormat,
    Sampling,
    Text,
    Tool,
    ToolCall,
    text_of,
)

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


class InputCall(HistoryFields):
    """A call of a function in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = ""


class InputResult(HistoryFields):
    """What the function gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]


class ReasoningText(HistoryFields):
    """A part of thoughts, or of their summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(HistoryFields):
    """The thoughts of an earlier answer."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: list[ReasoningText] | None = None
    encrypted_content: None = None


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, Mapping) else getattr(item, "type", None)
    return f"{kind} item" if kind in ("function_call", "function_call_output", "reasoning") else "message item"


Item: TypeAlias = Annotated[
    Annotated[InputMessage, Tag("message item")]
    | Annotated[InputCall, Tag("function_call item")]
    | Annotated[InputResult, Tag("function_call_output item")]
    | Annotated[InputReasoning, Tag("reasoning item")],
    Discriminator(_kind),
]


def read_items(items: list[Item]) -> list[Message]:
    """The messages of a chat: thoughts and calls belong to the message of the assistant that they stand beside."""
    said, thoughts, is_open = list[Message](), "", False
    for item in items:
        if isinstance(item, InputReasoning):
            thoughts, is_open = "".join(part.text for part in item.content or item.summary or ()), False
        elif isinstance(item, InputCall):
            if not is_open:
                said.append(Message(role="assistant", reasoning_content=thoughts or None))
            function = CalledFunction(name=item.name, arguments=item.arguments)
            said[-1].tool_calls = [*(said[-1].tool_calls or ()), ToolCall(id=item.call_id, function=function)]
            thoughts, is_open = "", True
        elif isinstance(item, InputResult):
            output = item.output if isinstance(item.output, str) else "".join(part.text for part in item.output)
            said.append(Message(role="tool", content=output, tool_call_id=item.call_id))
            is_open = False
        else:
            said.append(item.as_chat())
            is_open = item.role == "assistant"
            if is_open:
                said[-1].reasoning_content, thoughts = thoughts or None, ""
    return said


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _check_kind(cls, tool: Any) -> Any:
        if isinstance(tool, dict) and tool.get("type", "function") != "function":
            raise ValueError(f"there is no tool {brief(tool['type'])}. Expected: type function")
        return tool

    def as_chat(self) -> Tool:
        """The same for a chat."""
        return Tool(type="function", function=Function(**self.model_dump(exclude={"type"})))


class FunctionChoice(Fields):
    """The function that the model must call."""

    type: Literal["function"]
    name: str


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


class Reasoning(Fields):
    """How much to think. Summaries have no effect: thoughts are shown whole."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(Sampling):
    """The body of /v1/responses. include: thoughts are never encrypted, so asking for that has no effect."""

    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Annotated[Count, Field(ge=1)] | None = None
    text: TextOptions | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream_options: ResponsesStreamOptions | None = None
    reasoning: Reasoning | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's
    # known, but only supported with these values or without effect
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    max_tool_calls: None = None
    truncation: Literal["disabled"] | None = None

    def check(self) -> None:
        """Raise `ApiError` for fields that need stored requests."""
        whole = "send the earlier messages in input"
        fixes = {
            "store": "send store=false; nothing is kept here",
            "previous_response_id": whole,
            "conversation": whole,
            "prompt": "send its text in input",
            "background": "send background=false",
        }
        for name, fix in fixes.items():
            if getattr(self, name):
                raise unsupported(name, fix)
        if self.top_logprobs and _LOGPROBS not in (self.include or ()):
            raise ApiError(400, f"top_logprobs needs {_LOGPROBS} in include.", "invalid_value", "top_logprobs")

    def as_chat(self) -> ChatRequest:
        """The same request to /v1/chat/completions."""
        asked = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        said = read_items(cast("list[Item]", asked))
        if self.instructions is not None:
            said.insert(0, Message(role="system", content=self.instructions))
        wanted, has_logprobs = None if self.text is None else self.text.format, _LOGPROBS in (self.include or ())
        schema = wanted if isinstance(wanted, SchemaFormat) else None
        return ChatRequest(
            **{name: getattr(self, name) for name in Sampling.model_fields},
            messages=said,
            store=self.store,
            tools=None if self.tools is None else [tool.as_chat() for tool in self.tools],
            tool_choice=_named(choice) if isinstance(choice := self.tool_choice, FunctionChoice) else choice,
            parallel_tool_calls=self.parallel_tool_calls,
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=self.reasoning and self.reasoning.effort,
            max_completion_tokens=self.max_output_tokens,
            response_format=None if wanted is None else ResponseFormat(type=wanted.type, json_schema=schema),
            logprobs=has_logprobs,
            top_logprobs=self.top_logprobs if has_logprobs else None,
        )


def _named(choice: FunctionChoice) -> Tool:
    return Tool(type="function", function=Function(name=choice.name))
