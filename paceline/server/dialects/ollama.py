"""Ollama's API: /api/chat, /api/generate, and what its clients ask about models."""

import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from ...measure.doctor import held_bytes
from ..answers import Answering, Choice, Delta, Outputs
from ..chats import read_object
from ..embeddings import EmbeddingsRequest, embed
from ..errors import ApiError
from ..openai import Pick, Tell, answer_chat, answer_completion
from ..protocol import StreamOptions
from ..service import DEFAULTS, About, Service
from .ollama_chats import ModelName, OllamaChat, OllamaEmbed, OllamaEmbedding, OllamaPrompt

VERSION = "0.13.0"
"""Of the API that this is. Clients ask for it to know what they may send."""


@dataclass(kw_only=True)
class OllamaAnswering(Answering):
    """One request to /api/chat or /api/generate in progress. A stream is lines of JSON.

    shown: the fields of a text, thoughts and calls.
    """

    shown: Callable[[str, str, list[dict[str, Any]]], dict[str, Any]]
    echo: Sequence[str] = ()
    media_type = "application/x-ndjson"

    async def events(self, outputs: Outputs, options: StreamOptions) -> AsyncGenerator[str]:
        """A line for each delta; calls are sent when the answer has ended, since their arguments are no text here."""
        (choice,) = self.choices
        async with aclosing(self.deltas(outputs)) as deltas:
            async for _, delta in deltas:
                if delta.text or delta.reasoning or delta.logprobs:
                    yield _line(self._piece_of(delta, []))
        if choice.calls:
            yield _line(self._piece_of(Delta(), _calls(choice)))
        yield _line({**self._piece_of(Delta(), []), **self._end(choice)})

    def failed(self, error: ApiError) -> str:
        return _line(_error(error))

    def whole(self) -> dict[str, Any]:
        (choice,) = self.choices
        return {**self._piece_of(choice, _calls(choice)), **self._end(choice)}

    def _piece_of(self, delta: Delta, calls: list[dict[str, Any]]) -> dict[str, Any]:
        told = {"model": self.head["model"], "created_at": _now(), **self.shown(delta.text, delta.reasoning, calls)}
        return {**told, "done": False} | ({"logprobs": self.entries(delta)} if delta.logprobs else {})

    def _end(self, choice: Choice) -> dict[str, Any]:
        usage, timings = self.usage(), self.last[0].metrics
        return {
            "done": True,
            "done_reason": "stop" if choice.finish_reason == "tool_calls" else choice.finish_reason,
            "total_duration": _ns(self.watch.seconds),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _ns(timings.vision + timings.prefill),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _ns(timings.decode),
        }


def add_ollama(app: FastAPI, pick: Pick, tell: Tell, listed: Callable[[], Mapping[str, Service | None]]) -> None:
    """Add the endpoints. listed: all models by name, None for one that is not loaded."""
    app.state.error_forms["/api"], begin = _error, _now()

    async def service_of(request: Request, name: str) -> Service:
        return await pick(request, name.removesuffix(":latest"))

    @app.post("/api/chat")
    async def chat(body: OllamaChat, request: Request) -> Response:
        service = await service_of(request, body.model)
        if not body.messages:
            return _loaded(service, _as_message)
        asked = body.chat(service, body.messages, body.tools)
        return await answer_chat(service, asked, request, partial(OllamaAnswering, shown=_as_message))

    @app.post("/api/generate")
    async def generate(body: OllamaPrompt, request: Request) -> Response:
        service, kind = await service_of(request, body.model), partial(OllamaAnswering, shown=_as_response)
        if not body.prompt and not body.images:
            return _loaded(service, _as_response)
        if body.raw:
            return await answer_completion(service, body.as_completion(service), request, kind)
        return await answer_chat(service, body.as_chat(service), request, kind)

    @app.post("/api/embed")
    async def embed_each(body: OllamaEmbed, request: Request) -> Response:
        service, begin_s = await service_of(request, body.model), time.perf_counter()
        asked = EmbeddingsRequest(input=body.input, dimensions=body.dimensions, normalize=True)
        outputs = await embed(service, asked, request)
        count, spent = sum(len(one.prompt_token_ids) for one in outputs), _ns(time.perf_counter() - begin_s)
        told = {"model": service.settings.model, "embeddings": [one.outputs.embedding for one in outputs]}
        whole = {**told, "total_duration": spent, "load_duration": 0, "prompt_eval_count": count}
        return await run_in_threadpool(JSONResponse, whole)

    @app.post("/api/embeddings")
    async def embed_one(body: OllamaEmbedding, request: Request) -> dict[str, Any]:
        service = await service_of(request, body.model)
        (output,) = await embed(service, EmbeddingsRequest(input=body.prompt, normalize=False), request)
        return {"embedding": output.outputs.embedding}

    @app.api_route("/api/tags", methods=["GET", "HEAD"])
    async def tags() -> dict[str, Any]:
        return {"models": [{**_entry(name, one), "modified_at": begin} for name, one in listed().items()]}

    @app.get("/api/ps")
    async def running() -> dict[str, Any]:
        loaded = {name: service for name, service in listed().items() if service is not None}
        more = {"expires_at": "2318-01-01T00:00:00Z", "size_vram": 0}
        entries = [{**_entry(*one), **more, "context_length": one[1].llm.runner.max_length} for one in loaded.items()]
        return {"models": entries}

    @app.api_route("/api/version", methods=["GET", "HEAD"])
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @app.post("/api/show")
    async def show(body: ModelName, request: Request) -> dict[str, Any]:
        _, about = await tell(request, (body.model or body.name or "").removesuffix(":latest"))
        return {**_described(about), "modified_at": begin}

    @app.head("/")
    async def is_running() -> Response:
        return Response()


def _as_message(text: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    more = {name: value for name, value in (("thinking", reasoning), ("tool_calls", calls)) if value}
    return {"message": {"role": "assistant", "content": text, **more}}


def _as_response(text: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {"response": text, **({"thinking": reasoning} if reasoning else {})}


def _calls(choice: Choice) -> list[dict[str, Any]]:
    """The calls of an answer. One whose arguments were cut is none."""
    calls = list[dict[str, Any]]()
    for call in choice.calls:
        if (arguments := read_object(call["function"]["arguments"])) is not None:
            function = {"index": len(calls), "name": call["function"]["name"], "arguments": arguments}
            calls.append({"id": call["id"], "function": function})
    return calls


def _loaded(service: Service, shown: Callable[..., dict[str, Any]]) -> Response:
    """The answer to nothing, by which clients load a model."""
    told = {"model": service.settings.model, "created_at": _now(), **shown("", "", [])}
    return JSONResponse({**told, "done": True, "done_reason": "load"})


def _entry(name: str, service: Service | None) -> dict[str, Any]:
    """A row of a list of models."""
    loaded = service and service.llm.loaded
    size, digest = (held_bytes(loaded.model), loaded.fingerprint) if loaded else (0, "")
    details = _details(service and service.about)
    return {"name": name, "model": name, "size": size, "digest": digest, "details": details}


def _details(about: About | None) -> dict[str, Any]:
    kind, dtype = (about.architecture, about.dtype) if about else ("", "")
    families = {"parent_model": "", "format": "", "family": kind, "families": [kind]}
    return {**families, "parameter_size": "", "quantization_level": dtype}


def _described(about: About) -> dict[str, Any]:
    kind, config = about.architecture, about.files.config.get_text_config()
    able = ["completion", "tools", *(["vision"] if about.sees else []), *(["thinking"] if about.format.thinks else [])]
    sizes = {"embedding_length": config.hidden_size, "block_count": config.num_hidden_layers}
    sizes["context_length"] = about.context_length
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in about.defaults.items() if name in DEFAULTS),
        "template": about.template,
        "details": _details(about),
        "model_info": {"general.architecture": kind, **{f"{kind}.{name}": sizes[name] for name in sizes}},
        "capabilities": able,
    }


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"


def _error(error: ApiError) -> dict[str, Any]:
    return {"error": error.detail}
