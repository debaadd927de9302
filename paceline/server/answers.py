"""From the engine's outputs to the answer of an endpoint, as a whole or as a stream.

Both use the same deltas, so the joined chunks of a stream are the whole answer.
"""

import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from .. import __version__
from ..core.request import SamplingParams, TokenLogprob
from ..core.round import Round, tokens_per_pass
from ..engine.output import Completion, RequestOutput
from ..errors import PacelineError
from ..methods.prediction import PredictedOutput
from ..sampling.detokenize import Detokenizer
from ..target.prompts import Prompt
from . import protocol
from .errors import ApiError, body_of
from .metrics import Watch
from .protocol import StreamOptions
from .service import Service
from .streams import DONE, EventStream, connected, event, merged
from .tools.reader import Piece, Reader

Outputs: TypeAlias = AsyncGenerator[tuple[int, RequestOutput]]
"""Outputs of the engine, each with the index of its prompt."""


@dataclass
class Delta(Piece):
    """The part of a choice that an output of the engine adds, as clients see it."""

    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    provenance: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    token_ids: list[int] = field(default_factory=list[int])


@dataclass(kw_only=True)
class Choice(Delta):
    """One answer so far; its calls are whole.

    reader: finds calls and thoughts in its text. pieces: the text of each token, for provenance.
    thought_end: the token that ends thoughts, if it is one. num_thought: tokens up to it.
    measure: where only some calls are read, the text of each token; ends: where these end.
    """

    index: int
    reader: Reader | None = None
    pieces: Detokenizer | None = None
    thought_end: int | None = None
    num_thought: int = 0
    measure: Detokenizer | None = None
    ends: list[int] = field(default_factory=list[int])
    rounds: list[Round] = field(default_factory=list[Round])
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def take(self, part: Completion) -> Delta:
        """Add a part of the answer; returns what clients see of it."""
        self.finish_reason, self.stop_reason = part.finish_reason, part.stop_reason
        found = Piece(part.text)
        if self.reader is not None:
            found = self.reader.feed(part.text, is_end=part.finish_reason is not None)
            if self.measure is not None:
                part = self._measured(part, self.measure, self.reader)
            if self.reader.is_over or (self.reader.num_calls and part.finish_reason == "stop"):
                self.finish_reason = "tool_calls"
        shown = found.text, found.reasoning, found.calls
        delta = Delta(*shown, part.logprobs or [], self._provenance(part), part.token_ids)
        self._count_thoughts(part.token_ids)
        for call in found.calls:
            if "id" in call:
                kept = {name: call[name] for name in ("id", "type")}
                self.calls.append({**kept, "function": dict(call["function"])})
            else:
                self.calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.reasoning += delta.reasoning
        self.logprobs += delta.logprobs
        self.provenance += delta.provenance
        self.rounds += part.rounds
        return delta

    def _measured(self, part: Completion, measure: Detokenizer, reader: Reader) -> Completion:
        """The part, without tokens behind the last call that is read: how many come with it depends on the rounds."""
        for text in measure.pieces(part.token_ids, part.finish_reason is not None):
            self.ends.append((self.ends or [0])[-1] + len(text))
        if not reader.is_over:
            return part
        left = num = max(0, bisect_left(self.ends, reader.num_read) + 1 - len(self.token_ids))
        rounds = list[Round]()
        for record in part.rounds:
            rounds.append(replace(record, num_emitted=min(left, record.num_emitted)))
            left -= rounds[-1].num_emitted
        cut = {name: getattr(part, name)[:num] for name in ("token_ids", "origins", "sources")}
        return replace(part, **cut, logprobs=part.logprobs and part.logprobs[:num], rounds=rounds)

    def _count_thoughts(self, token_ids: Sequence[int]) -> None:
        if self.thought_end in token_ids:
            token_ids, self.thought_end = token_ids[: token_ids.index(self.thought_end) + 1], None
        elif self.thought_end is None:
            return
        self.num_thought += len(token_ids)

    def _provenance(self, part: Completion) -> list[dict[str, object]]:
        if self.pieces is None:
            return []
        texts = self.pieces.pieces(part.token_ids, part.finish_reason is not None)
        rows = zip(part.token_ids, texts, part.origins, part.sources, strict=True)
        return [dict(zip(("id", "text", "origin", "source"), row, strict=True)) for row in rows]


@dataclass
class Answering:
    """One request to /v1/chat/completions in progress; subclasses give answers the format of other endpoints.

    last: the last output of the engine for each prompt.
    """

    service: Service
    request: Request
    choices: list[Choice]
    params: SamplingParams
    last: dict[int, RequestOutput] = field(default_factory=dict[int, RequestOutput])
    id_prefix, whole_name, piece_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    media_type = "text/event-stream"

    def __post_init__(self) -> None:
        self.log: dict[str, Any] = self.request.scope["log"]
        self.watch = Watch(self.service.metrics)
        self.head: dict[str, Any] = {
            "id": self.id_prefix + self.log["request_id"].removeprefix("req_"),
            "object": self.whole_name,
            "created": int(time.time()),
            "model": self.service.settings.model,
            "system_fingerprint": f"paceline-{__version__}",
        }

    @property
    def has_metrics(self) -> bool:
        """Whether the answer reports how it was decoded."""
        return self.service.settings.return_metrics or self.choices[0].pieces is not None

    @property
    def rounds(self) -> list[Round]:
        """The rounds of all choices."""
        return [record for choice in self.choices for record in choice.rounds]

    async def deltas(self, outputs: Outputs) -> AsyncGenerator[tuple[Choice, Delta]]:
        """The deltas of all choices. Their end is logged, and counted in the metrics unless the request was refused."""
        is_refused, end = False, "abort"
        try:
            async with aclosing(outputs):
                async for place, output in outputs:
                    is_first = place not in self.last
                    self.last[place] = output
                    for part in output.outputs:
                        choice = self.choices[place * len(output.outputs) + part.index]
                        if is_first and choice.reader is not None and choice.reader.thoughts is not None:
                            choice.reader.begin(self.service.end_of(output.prompt_token_ids))
                        if choice.finish_reason is None:
                            self.watch.tokens(choice.index, len(part.token_ids))
                            yield choice, choice.take(part)
                    if all(choice.finish_reason is not None for choice in self.choices):
                        break  # none goes on behind its last call
        except Exception as error:
            is_refused, end = isinstance(error, PacelineError) and not self.last, "error"
            raise
        finally:
            reasons = [] if is_refused else [choice.finish_reason or end for choice in self.choices]
            self.watch.end(reasons)
            usage = self.usage()
            self.log |= {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
            self.log |= {"finish_reasons": reasons, "tokens_per_pass": round(tokens_per_pass(self.rounds), 3)}
            self._observe()
            if self.service.settings.tracer is not None and not is_refused:
                self.log["trace_id"] = self.service.settings.tracer.record(self, reasons)

    def _observe(self) -> None:
        """Count the request in the histograms, if its prompts were read."""
        metrics = self.watch.metrics
        for output in self.last.values():
            timings = output.metrics
            metrics.observe("request_prompt_tokens", len(output.prompt_token_ids))
            metrics.observe("request_queue_time_seconds", timings.queue)
            metrics.observe("request_prefill_time_seconds", timings.vision + timings.prefill)
            metrics.observe("request_decode_time_seconds", timings.decode)
        for choice in self.choices if self.last else ():
            metrics.observe("request_generation_tokens", _num_tokens(choice.rounds))
        if self.last and self.params.max_tokens is not None:
            metrics.observe("request_params_max_tokens", self.params.max_tokens)

    async def events(self, outputs: Outputs, options: StreamOptions) -> AsyncGenerator[str]:
        """The chunks as server-sent events."""
        head = {**self.head, "object": self.piece_name}
        opened = set[int]()
        async with aclosing(self.deltas(outputs)) as deltas:
            async for choice, delta in deltas:
                pieces = list[dict[str, Any]]()
                if choice.index not in opened and (opening := self._opening(choice)) is not None:
                    pieces.append(_choice(choice, opening, Delta(), False))
                opened.add(choice.index)
                is_last = choice.finish_reason is not None
                if delta.text or delta.reasoning or delta.calls or delta.logprobs or delta.provenance or is_last:
                    pieces.append(_choice(choice, self._piece(choice, delta), delta, is_last))
                so_far = self.usage() if options.continuous_usage_stats else None
                usage = {"usage": so_far} if options.include_usage else {}
                for piece in pieces:
                    yield event({**head, "choices": [piece], **usage})
        if options.include_usage or self.has_metrics:
            yield event({**head, "choices": [], **self.ending()})
        yield DONE

    def failed(self, error: ApiError) -> str:
        """The end of a stream with an error after the first chunk."""
        return event(body_of(error)) + DONE

    def whole(self) -> dict[str, Any]:
        """The complete answer."""
        choices = [_choice(choice, self._entire(choice), choice, is_last=True) for choice in self.choices]
        return {**self.head, "choices": choices, **self._of_prompt(), **self.ending()}

    def prompt_logprobs(self, place: int) -> dict[str, Any]:
        """The log-probabilities of a prompt in vLLM's format; nothing where they were not asked for."""
        listed = self.last[place].prompt_logprobs
        if listed is None:
            return {}
        return {"prompt_logprobs": [None if entry is None else _by_id(entry) for entry in listed]}

    def _of_prompt(self) -> dict[str, Any]:
        """Fields of the whole answer about its prompt."""
        return self.prompt_logprobs(0)

    def usage(self) -> dict[str, Any]:
        """The numbers of tokens. A prompt's tokens count once for all its choices.

        Rejected tokens of a prediction are not in the answer, so they are not completion tokens.
        """
        num_prompt = sum(len(output.prompt_token_ids) for output in self.last.values())
        num = _num_tokens(self.rounds)
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num,
            "total_tokens": num_prompt + num,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in self.last.values())},
        }
        details = dict[str, int]()
        if thoughts := [choice.num_thought for choice in self.choices if choice.reasoning and choice.num_thought]:
            details["reasoning_tokens"] = sum(thoughts)
        if self.params.prediction:
            rounds = [record for record in self.rounds if record.source == PredictedOutput.name]
            accepted = _num_accepted(rounds)
            rejected = sum(record.num_nodes for record in rounds) - accepted
            details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        return usage | ({"completion_tokens_details": details} if details else {})

    def figures(self) -> dict[str, Any]:
        """How the answer was decoded, with vLLM's names."""
        rounds = self.rounds
        drafted, accepted = sum(record.num_nodes for record in rounds), _num_accepted(rounds)
        places = range(max((record.num_drafted for record in rounds), default=0))
        return {
            "mean_acceptance_length": tokens_per_pass(rounds) if rounds else None,
            "draft_acceptance_rate": accepted / drafted if drafted else None,
            "num_spec_steps": sum(record.num_nodes > 0 for record in rounds),
            "num_draft_tokens": drafted,
            "num_accepted_draft_tokens": accepted,
            "num_accepted_tokens_per_pos": [sum(record.num_accepted > place for record in rounds) for place in places],
        }

    def ending(self) -> dict[str, Any]:
        """The last fields of an answer: usage and metrics."""
        usage = {"usage": self.usage()}
        if not self.has_metrics:
            return usage
        seconds = {"time_to_first_token_s": self.watch.first_s, "seconds": self.watch.seconds}
        return {**usage, "metrics": {"speculative_decoding": self.figures(), **seconds}}

    def _opening(self, choice: Choice) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def _piece(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        told = {**_thoughts(delta), "content": delta.text, "tool_calls": delta.calls}
        message = {name: value for name, value in told.items() if value}
        return {"delta": message, "logprobs": self._logprobs(delta)}

    def _entire(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None, **_thoughts(choice)}
        if choice.calls:
            message |= {"content": choice.text or None, "tool_calls": choice.calls}
        return {"message": message, "logprobs": self._logprobs(choice)}

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        return {"content": self.entries(delta)} if delta.logprobs else None

    def entries(self, delta: Delta) -> list[dict[str, Any]]:
        """The log-probabilities of its tokens in the format of chats and responses."""
        return [
            {**self._token(entry, entry.token_id), "top_logprobs": [self._token(entry, token) for token in entry.top]}
            for entry in delta.logprobs
        ]

    def _token(self, entry: TokenLogprob, token: int) -> dict[str, Any]:
        """A special token that the text leaves out has no bytes, so that the joined ones are the text."""
        pieces, data = self.service.llm.loaded.pieces, b""
        if pieces is not None and not (self.params.skip_special_tokens and token in pieces.special):
            data = pieces.data(token)
        return {"token": entry.texts.get(token, ""), "logprob": finite(entry[token].logprob), "bytes": list(data)}


def _choice(choice: Choice, content: dict[str, Any], delta: Delta, is_last: bool) -> dict[str, Any]:
    """A choice, or a chunk of one, with the fields that both APIs share."""
    answer = {"index": choice.index, **content, "finish_reason": None}
    if is_last:
        answer |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
    return answer | ({"provenance": delta.provenance} if choice.pieces is not None else {})


def _thoughts(piece: Piece) -> dict[str, str]:
    """Under the names of DeepSeek's API and of vLLM."""
    return {"reasoning_content": piece.reasoning, "reasoning": piece.reasoning} if piece.reasoning else {}


def _by_id(entry: TokenLogprob) -> dict[int, dict[str, Any]]:
    return {token: {**one._asdict(), "logprob": finite(one.logprob)} for token, one in entry.items()}


def _num_tokens(rounds: Iterable[Round]) -> int:
    return sum(record.num_emitted for record in rounds)


def _num_accepted(rounds: Iterable[Round]) -> int:
    """Drafted tokens in an answer, which may end inside a draft."""
    return sum(min(record.num_accepted, record.num_emitted) for record in rounds)


def finite(logprob: float) -> float:
    """JSON has no -inf."""
    return max(logprob, -9999.0)


async def respond(
    service: Service,
    request: Request,
    body: protocol.Request,
    kind: Callable[..., Answering],
    prompts: Sequence[Prompt],
    params: SamplingParams,
) -> Response:
    """Answer each prompt `params.n` times, as a whole or as a stream. kind: makes the answer's format."""
    is_painted = service.settings.return_provenance if body.return_provenance is None else body.return_provenance
    if (count := len(prompts) * params.n) > protocol.MAX_CHOICES:
        message = f"Too many choices: {count}. Expected: at most {protocol.MAX_CHOICES}."
        raise ApiError(400, message, "invalid_value", "n")
    pieces = [service.detokenizer(params) if is_painted else None for _ in range(count)]
    choices = [Choice(index=index, pieces=text, **service.reading(body, params)) for index, text in enumerate(pieces)]
    run = kind(service, request, choices, params)
    sources = [service.engine.generate(item, params, f"{run.head['id']}-{place}") for place, item in enumerate(prompts)]
    end_at = request.scope["end_at"]
    outputs = merged(sources)  # type: ignore[arg-type]
    if body.stream:
        options = body.stream_options or protocol.StreamOptions()
        return EventStream(run.events(outputs, options), end_at, run.log, run.failed, run.media_type)
    async with connected(request.receive, end_at), aclosing(run.deltas(outputs)) as deltas:
        async for _ in deltas:
            pass
    return JSONResponse(run.whole())
