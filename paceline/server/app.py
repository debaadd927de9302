"""The endpoints."""

import hashlib
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from ..async_llm import AsyncLLM
from ..errors import ConfigError
from ..target.prompts import TemplatedChat
from . import protocol
from .answers import Answering, CompletionAnswering, respond
from .chats import chat_prompt, read_messages
from .errors import ApiError, unsupported
from .gate import gated_app
from .responses import ResponseAnswering, ResponsesRequest
from .service import Service, Settings
from .streams import connected
from .tools import forced_form


def make_app(engine: AsyncLLM, settings: Settings) -> FastAPI:
    """The application; `app.state.service` is its `Service`."""
    cors = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"], "expose_headers": ["x-request-id"]}
    outer = [Middleware(CORSMiddleware, allow_origins=list(settings.allow_origins), **cors)]  # type: ignore[arg-type]
    service, llm = Service(engine, settings), engine.llm
    metrics = partial(service.metrics.text, engine)
    app = gated_app(service, lambda: engine.is_alive, metrics, outer if settings.allow_origins else ())
    page, page_headers = _page()

    async def answer_chat(body: protocol.ChatRequest, request: Request, kind: Callable[..., Answering]) -> Response:
        service.check(body)
        service.check_texts(["".join(protocol.text_of(message.content) for message in body.messages)])
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise ApiError(400, "max_tokens and max_completion_tokens are the same.", "invalid_value", "max_tokens")
        most = {"max_tokens": body.max_completion_tokens}
        tenant = request.scope["tenant"]
        params = body.params({**service.defaults, **most}, body.num_logprobs, forced_form(body), tenant)
        body.chat_template_kwargs = {**settings.chat_template_kwargs, **(body.chat_template_kwargs or {})}
        prompt = chat_prompt(body, settings.images, service.template)
        return await respond(service, request, body, kind, [prompt], params)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: protocol.ChatRequest, request: Request) -> Response:
        return await answer_chat(body, request, Answering)

    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        body.check()
        return await answer_chat(body.as_chat(), request, partial(ResponseAnswering, asked=body))

    @app.post("/v1/completions")
    async def completions(body: protocol.CompletionRequest, request: Request) -> Response:
        service.check(body)
        service.check_texts(body.prompts)
        defaults = {**service.defaults, "max_tokens": 16}
        params = body.params(defaults, body.logprobs, tenant=request.scope["tenant"])
        if body.best_of not in (None, params.n):
            raise unsupported("best_of")
        if body.echo and body.logprobs is not None:
            raise unsupported("echo with logprobs")
        shown = body.prompts if body.echo else ()
        echo = [text for prompt in shown for text in [await run_in_threadpool(service.text_of, prompt)] * params.n]
        return await respond(service, request, body, partial(CompletionAnswering, echo=echo), body.prompts, params)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_entry(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model_entry(service)

    @app.post("/tokenize")
    async def tokenize(body: protocol.TokenizeRequest, request: Request) -> dict[str, Any]:
        service.check_model(body.model)
        service.check_texts([body.prompt or "", *(protocol.text_of(turn.content) for turn in body.messages or ())])
        async with connected(request.receive, request.scope["end_at"]):
            ids = await engine.encode(_prompt(body, settings))
        texts = {"token_strs": llm.tokenizer.convert_ids_to_tokens(ids)} if body.return_token_strs else {}
        return {"count": len(ids), "max_model_len": llm.runner.max_length, "tokens": ids, **texts}

    @app.post("/detokenize")
    async def detokenize(body: protocol.DetokenizeRequest) -> dict[str, Any]:
        service.check_model(body.model)
        service.check_texts([body.tokens])
        return {"prompt": await run_in_threadpool(service.text_of, body.tokens)}

    @app.get("/")
    async def chat_page() -> Response:
        return HTMLResponse(page, headers=page_headers)

    return app


def _model_entry(service: Service) -> dict[str, Any]:
    name, length = service.settings.model, service.llm.runner.max_length
    return {"id": name, "object": "model", "created": service.begin, "owned_by": "paceline", "max_model_len": length}


def _prompt(body: protocol.TokenizeRequest, settings: Settings) -> str | TemplatedChat:
    """A text or a chat. Raises `ConfigError`."""
    if (body.prompt is None) == (body.messages is None):
        raise ConfigError("tokenize needs a text or a chat", expected="either prompt or messages")
    if body.prompt is not None:
        return body.prompt
    options = {**settings.chat_template_kwargs, "add_generation_prompt": body.add_generation_prompt}
    return TemplatedChat(read_messages(body.messages or []), options, settings.images)


def _page() -> tuple[str, dict[str, str]]:
    """The page, and headers that allow only its own script."""
    ours, shared = resources.files("paceline.server"), resources.files("paceline.measure")
    text = (ours / "page.html").read_text(encoding="utf-8")
    text = text.replace("{{colours}}", (shared / "colours.css").read_text(encoding="utf-8"))
    script = text.partition("<script>")[2].partition("</script>")[0]
    fingerprint = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{fingerprint}'; connect-src 'self'"
    return text, {"Content-Security-Policy": f"{rules}; img-src data:; frame-ancestors 'none'"}
