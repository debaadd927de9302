"""From the body of a request to Ollama's API to a chat or a completion."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from ..chats import thinking
from ..errors import ApiError, unsupported
from ..protocol import (
    MAX_MESSAGES,
    CalledFunction,
    ChatRequest,
    CompletionRequest,
    Count,
    Fields,
    HistoryFields,
    Image,
    ImageURL,
    Message,
    Text,
    Tool,
    ToolCall,
    Word,
)
from ..service import Service
from . import closed

_One: TypeAlias = Annotated[float, Field(ge=1, le=1)]


class Options(Fields):
    """How to sample. Missing ones have the server's defaults, not Ollama's."""

    temperature: float | None = None
    top_k: Count | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None  # -1: drawn at random
    stop: Word | Annotated[list[Word], Field(max_length=64)] | None = None
    num_predict: Annotated[Count, Field(ge=-2)] | None = None  # 0 and below: as many as fit
    num_ctx: Count | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repeat_penalty: float | None = None
    # known, but only supported with these values
    repeat_last_n: Literal[-1] | None = None  # the penalty is over prompt and answer
    typical_p: _One | None = None
    tfs_z: _One | None = None
    mirostat: Literal[0] | None = None
    # without effect on answers
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """The same as fields of the OpenAI API and vLLM's."""
        same = {"temperature", "top_k", "top_p", "min_p", "stop", "presence_penalty", "frequency_penalty"}
        limit = self.num_predict or 0
        return {
            **self.model_dump(include=same),
            "seed": None if self.seed == -1 else self.seed,
            "max_tokens": limit if limit > 0 else None,
            "repetition_penalty": self.repeat_penalty,
        }


class CalledByModel(HistoryFields):
    """A function that an earlier answer called."""

    name: str
    arguments: dict[str, Any]


class Call(HistoryFields):
    """A call that an earlier answer made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledByModel


class ChatMessage(HistoryFields):
    """One message of a chat. images: in base64."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def as_chat(self) -> Message:
        """The same as a message of OpenAI's chats, images first, as Ollama puts them."""
        urls = [f"data:image/png;base64,{data}" for data in self.images or ()]  # whatever kind it is
        images = [Image(type="image_url", image_url=ImageURL(url=url)) for url in urls]
        texts = [Text(type="text", text=self.content)] if self.content else []
        calls = [
            ToolCall(id=call.id, function=CalledFunction(name=made.name, arguments=json.dumps(made.arguments)))
            for call in self.tool_calls or ()
            for made in [call.function]
        ]
        return Message(
            role=self.role,
            content=[*images, *texts] if images else self.content,
            reasoning_content=self.thinking,
            tool_calls=calls or None,
            name=self.tool_name,
            tool_call_id=self.tool_call_id,
        )


class Asked(Fields):
    """Fields of chats and prompts. stream: unless it is false. format: "json", or a JSON schema."""

    model: str
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # without effect on answers
    keep_alive: str | float | None = None
    truncate: bool | None = None  # what is too long is refused, whatever it says
    shift: bool | None = None

    def sampling(self, service: Service) -> dict[str, Any]:
        """The fields of a chat or completion that both have. Raises `ApiError` for a context that is not there."""
        options, most = self.options or Options(), service.llm.runner.max_length
        if options.num_ctx is not None and options.num_ctx > most:
            message = f"options.num_ctx is {options.num_ctx}. Expected: at most {most}, the context of this server."
            raise ApiError(400, message, "context_length_exceeded", "options.num_ctx")
        form = closed(self.format) if isinstance(self.format, dict) else {"json_object": True} if self.format else None
        shape = {"structured_outputs": form, "model": self.model, "stream": self.stream is not False}
        return {**options.sampling(), **shape}

    def chat(self, service: Service, messages: Sequence[ChatMessage], tools: list[Tool] | None = None) -> ChatRequest:
        """The same as a request to /v1/chat/completions. Raises `ApiError`."""
        if self.think and not service.format.thinks:
            message = f"{self.model!r} does not support thinking. Fix: leave it out."
            raise ApiError(400, message, "invalid_value", "think")
        wanted = None if self.think is None else bool(self.think)
        effort = self.think if isinstance(self.think, str) else None
        return ChatRequest(
            **self.sampling(service),
            messages=[message.as_chat() for message in messages],
            tools=tools,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs if self.logprobs else None,
            chat_template_kwargs=thinking(service.template, wanted, effort),
        )


class OllamaChat(Asked):
    """The body of /api/chat."""

    messages: Annotated[list[ChatMessage], Field(max_length=MAX_MESSAGES)] | None = None
    tools: list[Tool] | None = None


class OllamaPrompt(Asked):
    """The body of /api/generate. raw: the prompt is no chat."""

    prompt: str = ""
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None
    # known, but not supported
    suffix: Literal[""] | None = None
    template: Literal[""] | None = None
    context: Annotated[list[int], Field(max_length=0)] | None = None

    def as_chat(self, service: Service) -> ChatRequest:
        """The same as a chat with the prompt. Raises `ApiError`."""
        said = [ChatMessage(role="system", content=self.system)] if self.system else []
        return self.chat(service, [*said, ChatMessage(role="user", content=self.prompt, images=self.images)])

    def as_completion(self, service: Service) -> CompletionRequest:
        """The same as a request to /v1/completions. Raises `ApiError`."""
        for name in ("system", "images", "think"):
            if getattr(self, name):
                raise unsupported(name, "leave it out, or raw; a raw prompt is text alone")
        num_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return CompletionRequest(**self.sampling(service), prompt=self.prompt, logprobs=num_logprobs)


class OllamaEmbed(Fields):
    """The body of /api/embed. input: a text, or several."""

    model: str
    input: str | list[str]
    dimensions: Annotated[Count, Field(ge=1)] | None = None
    # without effect on answers
    truncate: bool | None = None  # what is too long is refused, whatever it says
    keep_alive: str | float | None = None
    options: Options | None = None


class OllamaEmbedding(Fields):
    """The body of /api/embeddings, the older form."""

    model: str
    prompt: str
    keep_alive: str | float | None = None
    options: Options | None = None


class ModelName(Fields):
    """The body of /api/show. name: the older field."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
