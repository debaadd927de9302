"""llama.cpp's own API: /completion and /props."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field, Strict

from ... import __version__
from ...core.request import SamplingParams, TokenLogprob
from ..answers import Answering, Choice, Delta, Outputs
from ..errors import ApiError
from ..openai import Pick, Tell, answer_completion
from ..protocol import Bias, CompletionRequest, Count, Fields, StreamOptions, TokenId, Word
from ..streams import event
from . import closed

Pair: TypeAlias = Annotated[tuple[int, Bias], Strict(False)]
"""A token and what is added to its logit."""


class LlamaCompletion(Fields):
    """The body of /completion. Missing fields have the server's defaults, not llama.cpp's."""

    prompt: str | Annotated[list[int], Field(min_length=1)]
    model: str | None = None
    stream: bool | None = None
    n_predict: Annotated[Count, Field(ge=-2)] | None = None  # below 0: as many as fit
    temperature: float | None = None
    top_k: Annotated[Count, Field(ge=-1)] | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None  # -1: drawn at random
    stop: Annotated[list[Word], Field(max_length=64)] | None = None
    repeat_penalty: float | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    ignore_eos: bool | None = None
    logit_bias: list[Pair] | dict[TokenId, Bias] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    n_probs: Annotated[Count, Field(ge=0, le=20)] | None = None  # 0: none
    return_tokens: bool = False
    # known, but only supported with these values
    repeat_last_n: Literal[-1] | None = None  # the penalty is over prompt and answer
    n_cmpl: Literal[1] | None = None
    typical_p: Annotated[float, Field(ge=1, le=1)] | None = None
    dynatemp_range: Annotated[float, Field(ge=0, le=0)] | None = None
    dry_multiplier: Annotated[float, Field(ge=0, le=0)] | None = None
    xtc_probability: Annotated[float, Field(ge=0, le=0)] | None = None
    mirostat: Literal[0] | None = None
    min_keep: Literal[0] | None = None
    n_indent: Literal[0] | None = None
    t_max_predict_ms: Literal[0] | None = None
    post_sampling_probs: Literal[False] | None = None
    timings_per_token: Literal[False] | None = None
    # without effect on answers
    cache_prompt: bool | None = None
    n_keep: int | None = None
    id_slot: int | None = None

    def as_completion(self, model: str) -> CompletionRequest:
        """The same as a request to /v1/completions."""
        same = {"prompt", "stream", "temperature", "top_k", "top_p", "min_p", "stop", "ignore_eos"}
        same |= {"presence_penalty", "frequency_penalty"}
        form = {} if self.json_schema is None else closed(self.json_schema)
        form |= {"grammar": self.grammar} if self.grammar else {}
        return CompletionRequest(
            **self.model_dump(include=same),
            model=model,
            max_tokens=None if (self.n_predict or 0) < 0 else self.n_predict,
            seed=None if self.seed == -1 else self.seed,
            repetition_penalty=self.repeat_penalty,
            logit_bias=dict(self.logit_bias) if self.logit_bias else None,
            structured_outputs=form or None,
            logprobs=self.n_probs or None,
        )


@dataclass(kw_only=True)
class LlamaAnswering(Answering):
    """One request to /completion in progress. asked: the body of the request."""

    asked: LlamaCompletion
    echo: Sequence[str] = ()

    async def events(self, outputs: Outputs, options: StreamOptions) -> AsyncGenerator[str]:
        """An event for each delta, and a last one that tells of the whole answer."""
        (choice,) = self.choices
        async with aclosing(self.deltas(outputs)) as deltas:
            async for _, delta in deltas:
                if delta.token_ids or delta.text:
                    more = {"tokens": delta.token_ids, "stop": False, "id_slot": 0, **self._usage()}
                    yield event({**self._content(delta), **more})
        yield event({**self._content(Delta()), "tokens": [], **self._end(choice)})

    def failed(self, error: ApiError) -> str:
        return event(_error(error))

    def whole(self) -> dict[str, Any]:
        (choice,) = self.choices
        tokens = choice.token_ids if self.asked.return_tokens else []
        return {**self._content(choice), "tokens": tokens, **self._end(choice)}

    def _content(self, delta: Delta) -> dict[str, Any]:
        more = {"completion_probabilities": [self._probabilities(entry) for entry in delta.logprobs]}
        return {"index": 0, "content": delta.text} | (more if delta.logprobs else {})

    def _probabilities(self, entry: TokenLogprob) -> dict[str, Any]:
        own, *top = ({"id": token, **self._token(entry, token)} for token in (entry.token_id, *entry.top))
        return {**own, "top_logprobs": top}

    def _usage(self) -> dict[str, int]:
        usage = self.usage()
        return {"tokens_predicted": usage["completion_tokens"], "tokens_evaluated": usage["prompt_tokens"]}

    def _end(self, choice: Choice) -> dict[str, Any]:
        """The fields of the whole answer but its text."""
        is_word, output = isinstance(choice.stop_reason, str), self.last[0]
        kinds = {"stop": "word" if is_word else "eos", "length": "limit"}
        prompt = output.prompt if output.prompt is not None else self.service.text_of(output.prompt_token_ids)
        usage = self._usage()
        return {
            "stop": True,
            "id_slot": 0,
            "model": self.head["model"],
            **usage,
            "generation_settings": {**_settings(self.params), "seed": output.outputs[0].seed},
            "prompt": prompt,
            "has_new_line": "\n" in choice.text,
            "truncated": False,
            "stop_type": kinds.get(choice.finish_reason or "", "none"),
            "stopping_word": choice.stop_reason if is_word else "",
            "tokens_cached": sum(usage.values()),
            "timings": self._timings(),
        }

    def _timings(self) -> dict[str, Any]:
        usage, timings, figures = self.usage(), self.last[0].metrics, self.figures()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        drafted = {"draft_n": figures["num_draft_tokens"], "draft_n_accepted": figures["num_accepted_draft_tokens"]}
        return {
            "cache_n": cached,
            **_rates("prompt", usage["prompt_tokens"] - cached, timings.vision + timings.prefill),
            **_rates("predicted", usage["completion_tokens"], timings.decode),
            **(drafted if drafted["draft_n"] else {}),
        }


def add_llama_cpp(app: FastAPI, pick: Pick, tell: Tell) -> None:
    """Add the endpoints."""
    for path in ("/completion", "/props"):
        app.state.error_forms[path] = _error

    @app.post("/completion")
    async def completion(body: LlamaCompletion, request: Request) -> Response:
        service = await pick(request, body.model)
        asked = body.as_completion(service.settings.model)
        return await answer_completion(service, asked, request, partial(LlamaAnswering, asked=body))

    @app.get("/props")
    async def props(request: Request, model: str | None = None) -> dict[str, Any]:
        name, about = await tell(request, model)
        params = _settings(SamplingParams(**about.defaults, max_tokens=None))
        tokens = {one: getattr(about.files.tokenizer, one, None) or "" for one in ("bos_token", "eos_token")}
        return {
            "default_generation_settings": {"id": 0, "n_ctx": about.context_length, "params": params},
            "total_slots": about.num_slots,
            "model_alias": name,
            "model_path": name,
            "modalities": {"vision": about.sees, "audio": False},
            "chat_template": about.template,
            **tokens,
            "build_info": f"paceline-{__version__}",
        }


def _settings(params: SamplingParams) -> dict[str, Any]:
    """Sampling options with llama.cpp's names."""
    same = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "ignore_eos")
    return {
        **{name: getattr(params, name) for name in same},
        "seed": -1 if params.seed is None else params.seed,
        "repeat_penalty": params.repetition_penalty,
        "repeat_last_n": -1,
        "n_predict": -1 if params.max_tokens is None else params.max_tokens,
        "stop": list(params.stop or ()),
        "n_probs": params.logprobs or 0,
    }


def _rates(name: str, count: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": count,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / count if count else 0.0,
        f"{name}_per_second": count / seconds if seconds else 0.0,
    }


def _error(error: ApiError) -> dict[str, Any]:
    kinds = {401: "authentication", 403: "permission", 404: "not_found", 503: "unavailable"}
    kind = kinds.get(error.status_code, "invalid_request" if error.status_code < 500 else "server")
    if error.code == "context_length_exceeded":
        kind = "exceed_context_size"
    return {"error": {"code": error.status_code, "message": error.detail, "type": f"{kind}_error"}}
