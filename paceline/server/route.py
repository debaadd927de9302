"""A cascade of two servers: a small model answers alone where it is confident, a large one otherwise.

Calibration and drift alarm are those of `paceline.cascade`. Each model is behind a server of the OpenAI API that gives
log-probabilities, Paceline's or vLLM's. The small answer is not used as the large model's first draft.
"""

import logging
import random
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from ..cascade.audit import DriftAlarm
from ..cascade.calibration import Calibration, sampling_options
from ..cascade.cascade import Reason, decide
from ..core.request import TokenLogprob
from . import protocol
from .errors import ApiError, body_of, unknown_model
from .gate import Gated, GateSettings, gated_app
from .metrics import Metrics, Watch
from .streams import DONE, EventStream, connected, event
from .upstream import Upstream

logger = logging.getLogger("paceline.server")
DECIDED_BY = "x-paceline-decided-by"  # the header with the model that answered


@dataclass(frozen=True, kw_only=True)
class RouteSettings(GateSettings):
    """How a router behaves.

    max_disagreement: see `Calibration.choose`. audit_share: the share of requests that the large model checks.
    """

    max_disagreement: float | None = None
    audit_share: float = 0.05


@dataclass
class Decision:
    """Which model answers and why, and the answer: first the small model's, if it was asked, then the large one's."""

    reason: Reason
    confidence: float | None = None
    answer: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def decided_by(self) -> str:
        """The model that answers."""
        return "small" if self.reason is Reason.CONFIDENT else "large"


class Router(Gated):
    """A cascade of two servers. Raises `ConfigError` where the calibration cannot guarantee the bound."""

    def __init__(self, small: Upstream, large: Upstream, calibration: Calibration, settings: RouteSettings):
        if small.max_model_len is not None:
            calibration.check_room(small.max_model_len)
        self.small, self.large, self.calibration, self.settings = small, large, calibration, settings
        self.choice = calibration.choose(settings.max_disagreement)
        self.alarm = DriftAlarm(self.choice.max_disagreement)
        self.metrics, self.reasons = Metrics("paceline", settings.model), {reason.value: 0 for reason in Reason}
        params = calibration.params(calibration.short_limit)
        self._defaults = {name: getattr(params, name) for name in calibration.sampling}
        explicit = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # a server may have other defaults
        self._sampling = {**{name: getattr(params, name) for name in explicit}, **calibration.sampling}

    async def answer(self, request: Request, body: protocol.ChatRequest) -> Response:
        """Answer a chat, whole or as a stream. Raises `ApiError`."""
        if body.model != self.settings.model:
            raise unknown_model(body.model, [self.settings.model])
        log, watch, end_at = request.scope["log"], Watch(self.metrics), request.scope["end_at"]
        sent = {**self._sampling, **body.model_dump(mode="json", exclude_unset=True, by_alias=True)}
        if salt := body.salted(request.scope["tenant"]):
            sent["cache_salt"] = salt
        async with connected(request.receive, end_at):
            verdict = await self._decide(sent, body)
            if verdict.decided_by == "large" and not body.stream:
                verdict.answer = await self.large.ask(sent)
        log |= {"decided_by": verdict.decided_by, "reason": verdict.reason.value, "confidence": verdict.confidence}
        self.reasons[verdict.reason.value] += 1
        if body.stream:
            events = self._events(sent, body, verdict, watch)
            answer: Response = EventStream(events, end_at, log, lambda error: event(body_of(error)) + DONE)
        else:
            watch.end()
            whole = as_asked(verdict.answer, body) if verdict.decided_by == "small" else verdict.answer
            answer = JSONResponse({**whole, "cascade": self._told(verdict)})
        answer.headers[DECIDED_BY] = verdict.decided_by
        return answer

    async def _decide(self, sent: Mapping[str, Any], body: protocol.ChatRequest) -> Decision:
        """Ask the small model, unless its answer could not be used, and decide which model answers."""
        params = body.params(self._defaults, body.num_logprobs)
        if params.n != 1 or body.tools or sampling_options(params) != self.calibration.sampling:
            return Decision(Reason.OTHER_SAMPLING)
        if self.alarm.raised:
            return Decision(Reason.ALARM)
        is_drawn = (
            random.random() < self.settings.audit_share
        )  # before the models answer, so that the draw is independent
        short = self._short(sent, body)
        try:
            answer = await self.small.ask(short)
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            verdict = Decision(Reason.NO_ROOM)
        else:
            logprobs, finish_reason = read_logprobs(answer, self.small.url), answer["choices"][0]["finish_reason"]
            verdict = Decision(*decide(finish_reason, logprobs, self.choice, True, True), answer)
        if is_drawn:
            await self._audit(short, verdict)
        return verdict

    async def _audit(self, short: Mapping[str, Any], verdict: Decision) -> None:
        """Count an audited request; compare the small model's answer, if it was given, with the large model's."""
        differs = False
        if verdict.reason is Reason.CONFIDENT:
            own = await self.large.ask(short)
            both = [(verdict.answer, self.small.url), (own, self.large.url)]
            tokens = [[entry["token"] for entry in tokens_of(answer, url)] for answer, url in both]
            differs = tokens[0] != tokens[1] or own["choices"][0]["finish_reason"] != "stop"
        was_raised = self.alarm.raised
        if self.alarm.see(differs) and not was_raised:
            logger.warning(
                "drift: more answers differ from the large model's than the calibration allows; from now on the large "
                "model answers everything. Calibrate again on such prompts.",
                extra={"fields": {"audited": self.alarm.seen, "differed": self.alarm.differed}},
            )

    def _short(self, sent: Mapping[str, Any], body: protocol.ChatRequest) -> dict[str, Any]:
        """The request for an answer within `short_limit`, with the log-probabilities for the confidence."""
        limits = [self.calibration.short_limit, body.max_tokens, body.max_completion_tokens]
        kept = {name: sent[name] for name in sent if name not in ("stream", "stream_options", "max_completion_tokens")}
        asked = {"logprobs": True, "top_logprobs": max(2, body.top_logprobs or 0)}
        return {**kept, **asked, "max_tokens": min(limit for limit in limits if limit is not None)}

    async def _events(
        self, sent: Mapping[str, Any], body: protocol.ChatRequest, verdict: Decision, watch: Watch
    ) -> AsyncGenerator[str]:
        """The chunks of an answer: of the small model's complete one, or of the large one's stream."""
        told = {"cascade": self._told(verdict)}
        try:
            if verdict.decided_by == "small":
                for piece in pieces_of(as_asked(verdict.answer, body), body):
                    yield event({**piece, **told})
            else:
                async with aclosing(self.large.stream(sent)) as pieces:
                    async for piece in pieces:
                        yield event({**piece, **told})
            yield DONE
        finally:
            watch.end()

    def _told(self, verdict: Decision) -> dict[str, Any]:
        """The field `cascade` of an answer. lossless: whether it is guaranteed to be the large model's."""
        choice = self.choice
        return {
            "decided_by": verdict.decided_by,
            "reason": verdict.reason.value,
            "lossless": verdict.decided_by == "large",
            "signal": choice.signal.value,
            "confidence": verdict.confidence,
            "threshold": choice.threshold,
            "max_disagreement": choice.max_disagreement,
        }

    def metrics_page(self) -> str:
        """Requests by model and reason, and the results of the audits."""
        alone, alarm = self.reasons[Reason.CONFIDENT.value], self.alarm
        models = {"small": alone, "large": sum(self.reasons.values()) - alone}
        lines = [
            *self.metrics.lines("route_requests_total", "Chats by the model that answered.", models, "decided_by"),
            *self.metrics.lines("route_reasons_total", "Chats by why that model answered.", self.reasons, "reason"),
            *self.metrics.lines("route_audits_total", "Chats drawn for an audit.", alarm.seen),
            *self.metrics.lines("route_audits_differed_total", "Audited answers that differ.", alarm.differed),
            *self.metrics.lines("route_alarm", "Whether the drift alarm is raised.", int(alarm.raised)),
            *self.metrics.histogram_lines("e2e_request_latency_seconds"),
        ]
        return "\n".join(lines) + "\n"


def make_router_app(router: Router) -> FastAPI:
    """The application; `app.state.service` is its `Router`."""
    settings = router.settings
    app = gated_app(router, lambda: True, router.metrics_page)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: protocol.ChatRequest, request: Request) -> Response:
        return await router.answer(request, body)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": settings.model, "object": "model", "owned_by": "paceline"}
        return {"object": "list", "data": [{**entry, "small": router.small.model, "large": router.large.model}]}

    return app


def tokens_of(answer: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """An answer's tokens with their log-probabilities, its end included.

    Raises `ApiError` where a server does not give them for every token, since the confidence needs them.
    """
    entries = ((answer["choices"][0].get("logprobs") or {}).get("content")) or []
    count = answer["usage"]["completion_tokens"]
    if len(entries) != count or any("top_logprobs" not in entry for entry in entries):
        message = f"{where} gave log-probabilities for {len(entries)} of {count} tokens. A router needs them for all."
        raise ApiError(502, message, "bad_upstream")
    return entries


def read_logprobs(answer: Mapping[str, Any], where: str) -> list[TokenLogprob]:
    """The log-probabilities as `TokenLogprob`. The API gives no ids: the token has id 0, others their rank."""
    logprobs = list[TokenLogprob]()
    for entry in tokens_of(answer, where):
        top = dict[int, float]()
        for place, other in enumerate(entry["top_logprobs"], start=1):
            is_itself = 0 not in top and (other["token"], other["logprob"]) == (entry["token"], entry["logprob"])
            top[0 if is_itself else place] = other["logprob"]
        logprobs.append(TokenLogprob(0, entry["logprob"], top))
    return logprobs


def as_asked(answer: Mapping[str, Any], body: protocol.ChatRequest) -> dict[str, Any]:
    """The answer with the log-probabilities that the client requested, or none."""
    choice = dict(answer["choices"][0])
    if not body.logprobs:
        choice["logprobs"] = None
    else:
        most = body.top_logprobs or 0
        content = [{**entry, "top_logprobs": entry["top_logprobs"][:most]} for entry in choice["logprobs"]["content"]]
        choice["logprobs"] = {"content": content}
    return {**answer, "choices": [choice]}


def pieces_of(answer: Mapping[str, Any], body: protocol.ChatRequest) -> list[dict[str, Any]]:
    """A complete answer as the chunks of a stream."""
    choice = answer["choices"][0]
    kept = {name: answer[name] for name in ("id", "created", "model", "system_fingerprint") if name in answer}
    head = {**kept, "object": "chat.completion.chunk"}
    delta = {"role": "assistant", "content": choice["message"].get("content") or ""}
    ends = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
    told = [{"index": 0, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}, ends]
    pieces = [{**head, "choices": [part]} for part in told]
    if body.stream_options is not None and body.stream_options.include_usage:
        pieces.append({**head, "choices": [], "usage": answer["usage"]})
    return pieces
