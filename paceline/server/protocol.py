"""The bodies of requests: the fields of the OpenAI API, and vLLM's further sampling fields.

As in the OpenAI API, an unknown field is an error. So is a known field that is not supported, unless it cannot change
an answer. In messages, clients also send back whatever an answer had: see `HistoryFields`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator

from ..core.request import RequestOutputKind, SamplingParams
from ..errors import ConfigError

MAX_CHOICES, MAX_MESSAGES = 128, 2048
Count = Annotated[int, Field(le=2**63 - 1)]  # larger numbers of JSON do not fit tensors and metrics
TokenId = Annotated[int, Strict(False)]  # keys of JSON objects are texts
Bias = Annotated[float, Field(ge=-100, le=100)]  # added to the logit of a token
Word = Annotated[str, Field(max_length=256)]  # looked for after every token
_WITHOUT_EFFECT = frozenset(
    {"id", "index", "status", "phase", "annotations", "logprobs", "parsed", "parsed_arguments", "provenance"}
    | {"cache_control", "extra_content", "provider_specific_fields"}  # of other servers
)


class Fields(BaseModel):
    """Strict: no unknown keys, and "1" is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class HistoryFields(Fields):
    """An object that clients send back: fields that are null, unknown and empty, or without effect are left out."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        nothing = {name for name in values if name in _WITHOUT_EFFECT or values[name] in ("", [], {})}
        nothing -= cls.model_fields.keys()
        return {name: value for name, value in values.items() if name not in nothing and value is not None}


class Text(HistoryFields):
    """Text of a message."""

    type: Literal["text"]
    text: str


class ImageURL(HistoryFields):
    """A data URI, or a URL of an allowed host. detail has no effect."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class Image(HistoryFields):
    """An image of a message."""

    type: Literal["image_url"]
    image_url: ImageURL


class CalledFunction(HistoryFields):
    """A function call of the model. arguments: JSON, or its beginning where the answer was cut."""

    name: str
    arguments: str = ""


class ToolCall(HistoryFields):
    """A call that an earlier answer made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


Part: TypeAlias = Annotated[Text | Image, Field(discriminator="type")]


class Message(HistoryFields):
    """One message of a chat. An answer of this server can be sent back unchanged."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # for templates that read it, under two names
    reasoning: str | None = None
    reasoning_content: str | None = None
    # known, but not supported
    refusal: None = None
    audio: None = None
    function_call: None = None


def text_of(content: str | Sequence[Text | Image] | None) -> str:
    """The text of a message, without its images."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content if isinstance(part, Text))


class Function(Fields):
    """A function that the model may call. parameters: a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A tool that the model may call, or in tool_choice, by its name only, the one that it must call."""

    type: Literal["function"]
    function: Function


class JsonSchema(Fields):
    """A schema that the answer must follow, always strictly."""

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Fields):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StreamOptions(Fields):
    """What a stream has besides the answer. include_obfuscation has no effect.

    include_usage: a last chunk with the numbers of tokens.
    continuous_usage_stats: with it, every other chunk has the numbers so far (vLLM's field, which load generators set).
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None


class Prediction(Fields):
    """A text that the answer is likely to repeat."""

    type: Literal["content"]
    content: str | list[Text]


class Speculative(Fields):
    """How much is drafted for this request, and by which drafter of the server; "none": no drafts."""

    method: str | None = None
    num_speculative_tokens: Annotated[Count, Field(ge=0)] | None = None


class Sampling(Fields):
    """Fields of all endpoints; missing ones have the model's or the API's defaults."""

    model: str
    stream: bool | None = None
    # the OpenAI API's sampling fields
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    prediction: Prediction | None = None
    # vLLM's
    top_k: Count | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=256)] | None = None
    bad_words: Annotated[list[Word], Field(max_length=256)] | None = None
    allowed_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None  # lower ones are answered first
    # Paceline's
    no_repeat_ngram_size: Count | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None  # vLLM's: whose request it is
    speculative: Speculative | None = None
    return_provenance: bool | None = None  # where each token came from, and metrics
    # without effect on answers
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class Request(Sampling):
    """Fields of chats and completions."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Word | Annotated[list[Word], Field(max_length=64)] | None = None
    max_tokens: Count | None = None
    response_format: ResponseFormat | None = None
    store: bool | None = None  # false: drafters keep nothing of it
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None  # vLLM's

    def params(
        self, defaults: Mapping[str, Any], num_logprobs: int | None, form: Any = None, tenant: str = ""
    ) -> SamplingParams:
        """The sampling parameters. Raises `ConfigError` for values out of range.

        defaults: for fields that the request does not have. num_logprobs: number of top tokens, None for no
        log-probabilities. form: structured outputs for a forced tool call. tenant: see `salted`.
        """
        shared = {field.name for field in fields(SamplingParams)} & {*type(self).model_fields} - {"logprobs"}
        values = {name: value for name in shared if (value := getattr(self, name)) is not None}
        wanted = [value for value in (self.structured_outputs, self.response_form, form) if value is not None]
        if len(wanted) > 1:
            message = "structured_outputs, response_format and tool_choice each set the format of the answer"
            raise ConfigError(message, fix="give one of them")
        values["structured_outputs"] = wanted[0] if wanted else None
        drafts = dict[str, Any](defaults.get("extra_args", {}))
        if self.speculative is not None:
            drafts |= self.speculative.model_dump(exclude_none=True)
        if self.prediction is not None:
            drafts["prediction"] = text_of(self.prediction.content)
        if salt := self.salted(tenant):
            drafts["cache_salt"] = salt
        if tenant:
            drafts["account"] = tenant
        if self.priority:
            drafts["priority"] = self.priority
        if self.store is False:
            drafts["store"] = False
        values |= {"extra_args": drafts} if drafts else {}
        return SamplingParams(**{**defaults, **values}, logprobs=num_logprobs, output_kind=RequestOutputKind.DELTA)

    def salted(self, tenant: str) -> str:
        """Whose request it is: a tenant, whom `cache_salt` divides further."""
        return ":".join(filter(None, [tenant, self.cache_salt]))

    @property
    def response_form(self) -> dict[str, Any] | None:
        """The structured outputs of response_format. Raises `ConfigError`."""
        if self.response_format is None or self.response_format.type == "text":
            return None
        if self.response_format.type == "json_object":
            return {"json_object": True}
        if self.response_format.json_schema is None:
            raise ConfigError("response_format has no json_schema", expected='{"name": ..., "schema": {...}}')
        return {"json": json.dumps(self.response_format.json_schema.schema_)}


Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(Request):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    # vLLM's
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    # known, but only supported with these values
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    web_search_options: None = None
    functions: None = None
    function_call: None = None
    verbosity: Literal["medium"] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """See `Request.params`. Raises `ConfigError` for top_logprobs without logprobs."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ConfigError("top_logprobs needs logprobs", fix="set logprobs to true")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Request):
    """The body of /v1/completions. prompt: a text, token ids, or several of either, answered in their order."""

    prompt: str | list[int] | Annotated[list[str] | list[list[int]], Field(min_length=1, max_length=MAX_CHOICES)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    # known, but only supported with these values
    suffix: None = None
    best_of: int | None = None

    def check_echo(self) -> None:
        """Ask for the log-probabilities of an echoed prompt; max_tokens 0 asks for nothing else.

        Raises `ConfigError` where an echo would show two numbers of top tokens.
        """
        if not self.echo or (self.logprobs is None and self.max_tokens != 0):
            return
        if None not in (self.logprobs, self.prompt_logprobs) and self.logprobs != self.prompt_logprobs:
            raise ConfigError("logprobs and prompt_logprobs differ, and an echo has both", fix="leave one of them out")
        self.prompt_logprobs = self.logprobs or 0

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each of them."""
        is_one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else list(self.prompt)  # type: ignore[list-item, arg-type]


class TokenizeRequest(Fields):
    """The body of /tokenize: a prompt, the messages of a chat, or content, llama.cpp's name for a text in a prompt."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    add_special: bool = False  # of content
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: Literal[True] = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Fields):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[int]
