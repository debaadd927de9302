"""From the body of a request to Anthropic's API to a chat."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from ..chats import thinking
from ..errors import ApiError
from ..protocol import (
    MAX_MESSAGES,
    CalledFunction,
    ChatRequest,
    Count,
    Fields,
    Function,
    HistoryFields,
    Image,
    ImageURL,
    JsonSchema,
    Message,
    ResponseFormat,
    Text,
    Tool,
    ToolCall,
    Word,
)

_BILLING = "x-anthropic-billing-header:"
"""Begins a block of Claude Code's system prompt that is for Anthropic, and differs in each request."""


class TextBlock(HistoryFields):
    """Text."""

    type: Literal["text"]
    text: str


class Base64Source(Fields):
    """The bytes of an image."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(Fields):
    """An image of an allowed host."""

    type: Literal["url"]
    url: str


class ImageBlock(HistoryFields):
    """An image."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]

    def as_chat(self) -> Image:
        """The same as a part of a message of OpenAI's chats."""
        source = self.source
        url = source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"
        return Image(type="image_url", image_url=ImageURL(url=url))


class ResultBlock(HistoryFields):
    """What a tool returned. is_error has no effect: templates read the text alone."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]] = ""
    is_error: bool | None = None


class UseBlock(HistoryFields):
    """A call that an earlier answer made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None  # without effect


class ThinkingBlock(HistoryFields):
    """Thoughts of an earlier answer. The signature has no effect."""

    type: Literal["thinking"]
    thinking: str = ""
    signature: str | None = None


Block: TypeAlias = TextBlock | ImageBlock | ResultBlock | UseBlock | ThinkingBlock


class Turn(HistoryFields):
    """One message. An answer can be sent back unchanged."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Annotated[Block, Field(discriminator="type")]]

    @property
    def blocks(self) -> Sequence[Block]:
        """Its content."""
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class AnthropicTool(HistoryFields):
    """A tool that the model may call."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    # without effect on answers
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None


class ToolChoice(Fields):
    """Whether a tool is called. name: which one, for type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Fields):
    """Whether the model thinks first, if its template can say so. budget_tokens and display have no effect."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class SchemaOutput(Fields):
    """The schema that the answer follows."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    """The form of the answer. effort: for templates that read `reasoning_effort`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: SchemaOutput | None = None


class Metadata(Fields):
    """Has no effect."""

    user_id: str | None = None


class Edit(Fields):
    """What would be left out of a long context: only thoughts, of which the chat template decides."""

    type: Literal["clear_thinking_20251015"]
    keep: Any = None


class ContextManagement(Fields):
    """See `Edit`."""

    edits: list[Edit] | None = None


class CountRequest(Fields):
    """The body of /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaOutput | None = None
    # without effect on answers
    cache_control: Any = None
    context_management: ContextManagement | None = None
    # known, but not supported
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None
    container: None = None

    def as_chat(self, template: str, **sampling: Any) -> ChatRequest:
        """The same as a request to /v1/chat/completions. Raises `ApiError`.

        template: of chats. sampling: further fields.
        """
        config = self.output_config or OutputConfig()
        form = config.format or self.output_format
        schema = form and JsonSchema(name="answer", schema=form.schema_)
        wanted = None if self.thinking is None else self.thinking.type != "disabled"
        tools = [
            Tool(type="function", function=Function(name=one.name, description=one.description,
                                                    parameters=one.input_schema, strict=one.strict))
            for one in self.tools or ()
        ]  # fmt: skip
        said = _chat(self.messages)
        is_begun = len(said) > 0 and said[-1].role == "assistant"
        return ChatRequest(
            model=self.model,
            messages=[*self._system(), *said] if said else [],
            tools=tools or None,
            **self._choice(),
            response_format=schema and ResponseFormat(type="json_schema", json_schema=schema),
            chat_template_kwargs=thinking(template, wanted, config.effort),
            add_generation_prompt=not is_begun,
            continue_final_message=is_begun,
            **sampling,
        )

    def _system(self) -> Iterator[Message]:
        said = self.system if isinstance(self.system, str) else [block.text for block in self.system or ()]
        texts = [said] if isinstance(said, str) else [text for text in said if not text.startswith(_BILLING)]
        if any(texts):
            yield Message(role="system", content="\n".join(texts))

    def _choice(self) -> dict[str, Any]:
        choice = self.tool_choice
        if choice is None:
            return {}
        if choice.type == "tool" and choice.name is None:
            raise ApiError(400, "tool_choice names no tool.", "invalid_value", "tool_choice.name")
        named = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
        one = Tool(type="function", function=Function(name=choice.name or ""))
        only = False if choice.disable_parallel_tool_use else None
        return {"tool_choice": named or one, "parallel_tool_calls": only}


class MessagesRequest(CountRequest):
    """The body of /v1/messages."""

    max_tokens: Annotated[Count, Field(ge=1)]
    stream: bool | None = None
    stop_sequences: Annotated[list[Word], Field(max_length=64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: Count | None = None
    # without effect on answers
    metadata: Metadata | None = None
    diagnostics: dict[str, Any] | None = None
    speed: Literal["standard", "fast"] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: str | None = None

    def sampling(self) -> dict[str, Any]:
        """The fields of a chat that say how it is sampled."""
        same = {"max_tokens", "stream", "temperature", "top_p", "top_k"}
        return {**self.model_dump(include=same), "stop": self.stop_sequences}


def _chat(turns: Sequence[Turn]) -> list[Message]:
    """The messages of a chat. As in Anthropic's API, messages of one role that follow each other are one."""
    groups, names = list[tuple[Any, list[Block]]](), dict[str, str]()
    for turn in turns:
        for block in turn.blocks:
            role = "tool" if isinstance(block, ResultBlock) else turn.role
            if role == "tool" or not groups or groups[-1][0] != role:
                groups.append((role, []))
            groups[-1][1].append(block)
            names |= {block.id: block.name} if isinstance(block, UseBlock) else {}
    return [_result(only, names) if role == "tool" else _message(role, [only, *more]) for role, (only, *more) in groups]


def _result(block: Block, names: Mapping[str, str]) -> Message:
    assert isinstance(block, ResultBlock)
    content = block.content if isinstance(block.content, str) else _joined(block.content)
    return Message(role="tool", content=content, tool_call_id=block.tool_use_id, name=names.get(block.tool_use_id))


def _message(role: Any, blocks: Sequence[Block]) -> Message:
    thoughts = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    calls = [
        ToolCall(id=block.id, function=CalledFunction(name=block.name, arguments=json.dumps(block.input)))
        for block in blocks
        if isinstance(block, UseBlock)
    ]
    content = _joined([block for block in blocks if isinstance(block, TextBlock | ImageBlock)])
    return Message(role=role, content=content, reasoning_content=thoughts or None, tool_calls=calls or None)


def _joined(blocks: Sequence[TextBlock | ImageBlock]) -> str | list[Text | Image]:
    """Texts alone as one, which every chat template supports, a block a line."""
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    if len(texts) == len(blocks):
        return "\n".join(texts)
    return [one.as_chat() if isinstance(one, ImageBlock) else Text(type="text", text=one.text) for one in blocks]
