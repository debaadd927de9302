"""An engine with the settings of a server, and the answering of one request."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from .. import __version__
from ..async_llm import AsyncLLM
from ..core.figures import tokens_per_pass
from ..core.outputs import Timings
from ..core.request import SamplingParams
from ..drafters import PredictedOutput
from ..errors import ConfigError, PacelineError
from ..hf.images import ImageLimits
from ..hf.prompts import Prompt
from ..llm import LLM
from ..outputs import RequestOutput
from ..sampling.detokenize import Detokenizer
from ..schema import brief
from . import protocol
from .answers import ChatForm, Choice, CompletionForm, Delta, choice_of, figures_of, usage_of
from .chats import LIMITS
from .errors import ApiError, body_of, unsupported
from .metrics import Metrics, Watch
from .streams import DONE, EventStream, connected, event, merged
from .tools import ToolReader
from .tracing import Tracer

_MAX_CHARS = 64
"""Characters for each token of the context; a longer prompt is refused unread, since reading takes long."""
_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a server behaves.

    model: its name in requests. api_keys: none: no key is asked for. allowed_hosts: names by which it may be called;
    none: any. allow_origins: pages of other hosts that may call it from a browser. request_timeout_s: for an answer,
    its wait for a slot included. return_metrics: with every answer, how it was decoded. return_provenance: for
    requests that do not say. tracer: gets a span of each answered request.
    """

    model: str
    api_keys: Sequence[str] = ()
    allowed_hosts: Sequence[str] = ()
    allow_origins: Sequence[str] = ()
    images: ImageLimits = LIMITS
    max_body_bytes: int = 32 << 20
    request_timeout_s: float = 600.0
    metric_prefix: str = "paceline"
    return_metrics: bool = False
    tracer: Tracer | None = None
    return_provenance: bool = False


class Service:
    """An engine with its settings, and the answering of one request."""

    def __init__(self, engine: AsyncLLM, llm: LLM, settings: Settings):
        self.engine, self.llm, self.settings = engine, llm, settings
        self.metrics = Metrics(settings.metric_prefix, settings.model)
        self.is_draining, self.begin = False, int(time.time())
        vision, config = llm.loaded.vision, llm.loaded.model.generation_config
        templates = [getattr(one, "chat_template", None) for one in (vision and vision.processor, llm.loaded.tokenizer)]
        self.template = next((str(one) for one in templates if one), "tools")
        given = {name: getattr(config, name, None) for name in _DEFAULTS}
        self.defaults = {"temperature": 1.0, **{name: value for name, value in given.items() if value is not None}}

    def check(self, body: protocol.Request) -> None:
        """Raise `ApiError` for what this server does not have."""
        self.check_model(body.model)
        if self.is_draining:
            raise ApiError(503, "The server is shutting down.", "server_shutting_down", retry_after_s=5)
        drafters = self.llm.drafters
        if body.prediction is not None:
            if PredictedOutput.name not in drafters:
                raise unsupported("prediction", "leave it out; this server has no drafter for it")
            self.check_texts([body.prediction.text])
        if body.speculative is not None and body.speculative.method not in (None, "none", *drafters):
            known = ", ".join(["none", *drafters])
            message = f"This server has no drafter {brief(body.speculative.method)}. It has: {known}."
            raise ApiError(400, message, "invalid_value", "speculative.method")
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream.", "invalid_value", "stream_options")

    def check_texts(self, texts: Sequence[str | list[int]]) -> None:
        """Raise `ApiError` for what is much longer than the context. texts: or token ids."""
        length, most = max(map(len, texts), default=0), _MAX_CHARS * self.llm.runner.max_length
        if length > most:
            unit = "characters" if any(isinstance(one, str) for one in texts) else "tokens"
            message = f"A prompt is far longer than the context: {length} {unit}. Expected: at most {most}."
            raise ApiError(400, message, "context_length_exceeded")

    def text_of(self, prompt: str | list[int]) -> str:
        """A prompt as text. Raises `ConfigError` for an id that is no token's."""
        if isinstance(prompt, str):
            return prompt
        vocab_size = self.llm.loaded.vocab_size
        if bad := [one for one in prompt if not 0 <= one < vocab_size]:
            raise ConfigError("there is no such token", got=bad[0], expected=f"0 to {vocab_size - 1}")
        return str(self.llm.tokenizer.decode(prompt))

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` for the name of another model."""
        if name not in (None, self.settings.model):
            message = f"The model {brief(name)} does not exist. This server has {self.settings.model!r}."
            raise ApiError(404, message, "model_not_found", "model")

    async def answer(
        self,
        request: Request,
        body: protocol.Request,
        form: ChatForm | CompletionForm,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        make_reader: Callable[[], ToolReader | None] = lambda: None,
        kind: "type[Answering] | None" = None,
    ) -> Response:
        """Answer `params.n` times to each prompt, whole or as a stream. kind: what writes the answer."""
        log = request.scope["log"]
        answer_id = f"{form.id_prefix}{log['request_id'].removeprefix('req_')}"
        is_painted = self.settings.return_provenance if body.return_provenance is None else body.return_provenance
        if (count := len(prompts) * params.n) > protocol.MAX_CHOICES:
            what = f"Too many choices: {count}. Expected: at most {protocol.MAX_CHOICES}."
            raise ApiError(400, what, "invalid_value", "n")
        choices = [
            Choice(index, make_reader(), Detokenizer(self.llm.tokenizer) if is_painted else None)
            for index in range(count)
        ]
        head = {"id": answer_id, "object": form.whole, "created": int(time.time()), "model": body.model}
        head["system_fingerprint"] = f"paceline-{__version__}"
        kind = kind or Answering
        run = kind(self, form, choices, params, Watch(self.metrics), log, head, request.headers.raw)
        sources = [self.engine.generate(one, params, f"{answer_id}-{place}") for place, one in enumerate(prompts)]
        end_at = asyncio.get_running_loop().time() + self.settings.request_timeout_s
        outputs = merged(sources)  # type: ignore[arg-type]
        if body.stream:
            options = body.stream_options or protocol.StreamOptions()
            return EventStream(run.events(outputs, options.include_usage), end_at, log, run.failed, run.end_of_stream)
        async with connected(request.receive, end_at), aclosing(run.deltas(outputs)) as deltas:
            async for _ in deltas:
                pass
        return JSONResponse(run.whole())


@dataclass
class Answering:
    """One request that is being answered."""

    service: Service
    form: ChatForm | CompletionForm
    choices: list[Choice]
    params: SamplingParams
    watch: Watch
    log: dict[str, Any]
    head: dict[str, Any]
    headers: Sequence[tuple[bytes, bytes]]
    prompt_tokens: dict[int, int] = field(default_factory=dict[int, int])
    cached_tokens: dict[int, int] = field(default_factory=dict[int, int])
    timings: dict[int, Timings] = field(default_factory=dict[int, Timings])
    seconds: float = 0.0
    end_of_stream: ClassVar[str] = DONE

    @property
    def has_metrics(self) -> bool:
        """Whether the answer says how it was decoded."""
        return self.service.settings.return_metrics or self.choices[0].pieces is not None

    async def deltas(self, outputs: AsyncGenerator[tuple[int, RequestOutput]]) -> AsyncGenerator[tuple[Choice, Delta]]:
        """What comes, choice by choice. However it ends the log learns of it, and the metrics unless it was refused."""
        is_refused, end = False, "abort"
        try:
            async with aclosing(outputs):
                async for place, output in outputs:
                    self.prompt_tokens[place], self.timings[place] = len(output.prompt_token_ids), output.metrics
                    self.cached_tokens[place] = output.num_cached_tokens
                    for part in output.outputs:
                        choice = self.choices[place * len(output.outputs) + part.index]
                        if choice.finish_reason is None:
                            self.watch.tokens(choice.index, len(part.token_ids))
                            yield choice, choice.take(part)
        except Exception as error:
            is_refused, end = isinstance(error, PacelineError) and not self.prompt_tokens, "error"
            raise
        finally:
            reasons = [] if is_refused else [one.finish_reason or end for one in self.choices]
            self.seconds = self.watch.end(reasons)
            passes = tokens_per_pass(one for choice in self.choices for one in choice.rounds)
            usage = self.usage()
            self.log |= {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
            self.log |= {"finish_reasons": reasons, "tokens_per_pass": round(passes, 3)}
            self._observe()
            if self.service.settings.tracer is not None and not is_refused:
                self.log["trace_id"] = self.service.settings.tracer.record(self, reasons)

    def _observe(self) -> None:
        """Count the request, whose prompts were read, in the histograms."""
        metrics = self.watch.metrics
        for place, timings in self.timings.items():
            metrics.observe("request_prompt_tokens", self.prompt_tokens[place])
            metrics.observe("request_queue_time_seconds", timings.queue)
            metrics.observe("request_prefill_time_seconds", timings.vision + timings.prefill)
            metrics.observe("request_decode_time_seconds", timings.decode)
        for choice in self.choices if self.timings else ():
            metrics.observe("request_generation_tokens", choice.num_tokens)
        if self.timings and self.params.max_tokens is not None:
            metrics.observe("request_params_max_tokens", self.params.max_tokens)

    async def events(
        self, outputs: AsyncGenerator[tuple[int, RequestOutput]], include_usage: bool
    ) -> AsyncGenerator[str]:
        """The pieces as server-sent events."""
        head = {**self.head, "object": self.form.chunk}
        no_usage = {"usage": None} if include_usage else {}
        opened = set[int]()
        async with aclosing(self.deltas(outputs)) as deltas:
            async for choice, delta in deltas:
                pieces = list[dict[str, Any]]()
                if choice.index not in opened and (opening := self.form.opening(choice)) is not None:
                    pieces.append(choice_of(choice, opening, False, ()))
                opened.add(choice.index)
                is_last = choice.finish_reason is not None
                if delta.text or delta.logprobs or delta.provenance or is_last:
                    pieces.append(choice_of(choice, self.form.piece(choice, delta), is_last, delta.provenance))
                for piece in pieces:
                    yield event({**head, "choices": [piece], **no_usage})
        if include_usage or self.has_metrics:
            yield event({**head, "choices": [], **self.ending()})

    def failed(self, error: ApiError) -> str:
        """The event of an error behind the first piece."""
        return event(body_of(error))

    def whole(self) -> dict[str, Any]:
        """The answer at once."""
        made = [choice_of(one, self.form.entire(one), True, one.provenance) for one in self.choices]
        return {**self.head, "choices": made, **self.ending()}

    def usage(self) -> dict[str, Any]:
        """The numbers of tokens."""
        counts = sum(self.prompt_tokens.values()), sum(self.cached_tokens.values())
        return usage_of(*counts, self.choices, bool(self.params.prediction))

    def ending(self) -> dict[str, Any]:
        """What an answer ends with."""
        usage = {"usage": self.usage()}
        if not self.has_metrics:
            return usage
        return {**usage, "metrics": figures_of(self.choices, self.watch.first_s, self.seconds)}
