"""An engine with its settings, and the common steps of all requests to it."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..async_llm import AsyncLLM
from ..core.request import SamplingParams
from ..errors import ConfigError
from ..hf.images import ImageLimits
from ..hf.model_files import ModelFiles
from ..methods.prediction import PredictedOutput
from ..sampling.detokenize import Detokenizer
from ..schema import brief
from . import protocol
from .chats import LIMITS
from .errors import ApiError, unsupported
from .gate import GateSettings
from .metrics import Metrics
from .tools.families import Format, format_of
from .tools.forms import asked_by, called
from .tracing import Tracer

_MAX_CHARS = 64  # per token of the context; longer prompts are refused before they are tokenized, which takes long
_END = 16  # tokens of a prompt
DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True)
class Settings(GateSettings):
    """How a server behaves.

    allow_origins: origins whose pages may call it from a browser. return_metrics: report with every answer how it was
    decoded. return_provenance: the default for requests. tracer: gets a span of each answered request.
    takes_model_defaults: whether sampling options of the model's generation_config.json are the defaults of requests.
    defaults: of requests, before those. chat_template_kwargs: variables of the template that requests may replace.
    adapter_dir: the folder below which clients may name LoRA adapters.
    tool_call_parser, reasoning_parser: names of `tools.families`; by default the template tells.
    """

    adapter_dir: Path | None = None
    allow_origins: Sequence[str] = ()
    images: ImageLimits = LIMITS
    metric_prefix: str = "paceline"
    return_metrics: bool = False
    tracer: Tracer | None = None
    return_provenance: bool = False
    takes_model_defaults: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None


@dataclass(frozen=True)
class About:
    """What clients ask about a model, which need not be loaded for it."""

    files: ModelFiles
    settings: Settings
    context_length: int
    num_slots: int

    @property
    def architecture(self) -> str:
        """As transformers names it."""
        return self.files.config.get_text_config().model_type

    @property
    def dtype(self) -> str:
        """That of its passes."""
        return str(self.files.dtype).removeprefix("torch.")

    @property
    def sees(self) -> bool:
        """Whether it takes images."""
        return self.files.processor is not None

    @property
    def template(self) -> str:
        """Its chat template, or a word of which `chat_prompt` makes the same."""
        return self.files.template or "tools"

    @cached_property
    def format(self) -> Format:
        """How it writes calls and thoughts."""
        parsers = self.settings.tool_call_parser, self.settings.reasoning_parser
        return format_of(self.template, self.files.tokenizer, *parsers)

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The sampling options of requests that do not set them."""
        config = self.files.generation_config if self.settings.takes_model_defaults else None
        own = {name: getattr(config, name, None) for name in DEFAULTS}
        own = {name: value for name, value in own.items() if value is not None}
        return {"temperature": 1.0, **own, **self.settings.defaults}


class Service:
    """A loaded model with its settings. adapter: that of all its requests; "" for the model itself."""

    adapter = ""

    def __init__(self, engine: AsyncLLM, settings: Settings, metrics: Metrics):
        self.engine, self.llm, self.settings, self.metrics = engine, engine.llm, settings, metrics
        loaded, runner = self.llm.loaded, self.llm.runner
        config, processor = loaded.model.config, loaded.vision and loaded.vision.processor
        files = ModelFiles(config, loaded.model.generation_config, loaded.dtype, loaded.tokenizer, processor)
        self.about = About(files, settings, runner.max_length, runner.num_slots)
        self.template, self.format, self.defaults = self.about.template, self.about.format, self.about.defaults

    def check(self, body: protocol.Request) -> None:
        """Raise `ApiError` for unknown drafters and contradictory options."""
        drafters = self.llm.drafters
        if body.prediction is not None:
            if PredictedOutput.name not in drafters:
                raise unsupported("prediction", "leave it out; this server has no drafter for it")
            self.check_texts([protocol.text_of(body.prediction.content)])
        if body.speculative is not None and body.speculative.method not in (None, "none", *drafters):
            known = ", ".join(["none", *drafters])
            message = f"This server has no drafter {brief(body.speculative.method)}. It has: {known}."
            raise ApiError(400, message, "invalid_value", "speculative.method")
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream.", "invalid_value", "stream_options")
        if body.prompt_logprobs is not None and body.stream:
            raise unsupported("prompt_logprobs", "leave out stream")

    def check_texts(self, texts: Sequence[str | list[int]]) -> None:
        """Raise `ApiError` for texts or token ids that are much longer than the context."""
        length, most = max(map(len, texts), default=0), _MAX_CHARS * self.llm.runner.max_length
        if length > most:
            unit = "characters" if any(isinstance(prompt, str) for prompt in texts) else "tokens"
            message = f"A prompt is far longer than the context: {length} {unit}. Expected: at most {most}."
            raise ApiError(400, message, "context_length_exceeded")

    def text_of(self, prompt: str | list[int]) -> str:
        """A prompt as text. Raises `ConfigError` for an invalid token id."""
        if isinstance(prompt, str):
            return prompt
        vocab_size = self.llm.loaded.vocab_size
        if bad := [token for token in prompt if not 0 <= token < vocab_size]:
            raise ConfigError("there is no such token", got=brief(bad[0]), expected=f"0 to {vocab_size - 1}")
        return str(self.llm.tokenizer.decode(prompt))

    def end_of(self, prompt_token_ids: Sequence[int]) -> str:
        """The end of a prompt as text, which may open the thoughts of its answer."""
        return str(self.llm.tokenizer.decode(list(prompt_token_ids[-_END:])))

    def reading(self, body: protocol.Request, params: SamplingParams) -> dict[str, Any]:
        """Fields of a `Choice`: how calls and thoughts are found in an answer to this request."""
        if not isinstance(body, protocol.ChatRequest):
            return {}
        found = {"reader": self.format.reader(asked_by(body)), "thought_end": self.format.thought_end}
        if body.parallel_tool_calls is False and found["reader"] is not None:
            found["measure"] = self.detokenizer(params, params.shown_special_tokens)
        return found

    def shows(self, body: protocol.ChatRequest, params: SamplingParams) -> SamplingParams:
        """The same, with the special tokens that are needed to find calls and thoughts."""
        shown = self.format.shown(bool(called(body)))
        if not shown or not params.skip_special_tokens:
            return params
        return replace(params, extra_args={**(params.extra_args or {}), "shown_special_tokens": [*shown.values()]})

    def detokenizer(self, params: SamplingParams, shown: Sequence[int] = ()) -> Detokenizer:
        """The text of one answer, which no stop string cuts. shown: special tokens that are not skipped."""
        skips, spaces = params.skip_special_tokens, params.spaces_between_special_tokens
        return Detokenizer(self.llm.tokenizer, (), skips, spaces_between_special=spaces, shown=shown)

    def adapted(self, adapter: str) -> "Service":
        """The same for requests to an adapter, which they have from now on, though it be removed or replaced."""
        other = copy.copy(self)
        other.adapter, other.settings = adapter, replace(self.settings, model=adapter)
        other.defaults = {**self.defaults, "extra_args": {"adapter": self.llm.runner.adapters.get(adapter)}}
        return other
