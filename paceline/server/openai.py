"""The endpoints of the OpenAI API, and vLLM's for tokens."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from ..errors import ConfigError
from ..target.prompts import TemplatedChat
from . import protocol
from .answers import Answering, respond
from .chats import chat_prompt, read_messages
from .completions import CompletionAnswering
from .errors import ApiError, unsupported
from .responses import ResponseAnswering, ResponsesRequest
from .service import Service, Settings
from .streams import connected
from .tools import forced_form

Pick: TypeAlias = Callable[[Request, str | None], Awaitable[Service]]
"""The service of the model that a request names, which is held until the request has ended. Raises `ApiError`."""


async def answer_chat(
    service: Service, body: protocol.ChatRequest, request: Request, kind: Callable[..., Answering] = Answering
) -> Response:
    """Answer a chat, whole or as a stream. kind: makes the answer's format. Raises `ApiError` and `ConfigError`."""
    service.check(body)
    service.check_texts(["".join(protocol.text_of(message.content) for message in body.messages)])
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "max_tokens and max_completion_tokens are the same.", "invalid_value", "max_tokens")
    most = {"max_tokens": body.max_completion_tokens}
    tenant = request.scope["tenant"]
    params = body.params({**service.defaults, **most}, body.num_logprobs, forced_form(body), tenant)
    body.chat_template_kwargs = {**service.settings.chat_template_kwargs, **(body.chat_template_kwargs or {})}
    prompt = chat_prompt(body, service.settings.images, service.template)
    return await respond(service, request, body, kind, [prompt], params)


def add_openai(app: FastAPI, pick: Pick, services: Callable[[], Sequence[Service]]) -> None:
    """Add the endpoints. services: of all models."""

    @app.post("/v1/chat/completions")
    async def chat_completions(body: protocol.ChatRequest, request: Request) -> Response:
        return await answer_chat(await pick(request, body.model), body, request)

    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        body.check()
        kind = partial(ResponseAnswering, asked=body)
        return await answer_chat(await pick(request, body.model), body.as_chat(), request, kind)

    @app.post("/v1/completions")
    async def completions(body: protocol.CompletionRequest, request: Request) -> Response:
        service = await pick(request, body.model)
        service.check(body)
        service.check_texts(body.prompts)
        body.check_echo()
        defaults = {**service.defaults, "max_tokens": 16}
        params = body.params(defaults, body.logprobs, tenant=request.scope["tenant"])
        if body.best_of not in (None, params.n):
            raise unsupported("best_of")
        shown = body.prompts if body.echo else ()
        echo = [text for prompt in shown for text in [await run_in_threadpool(service.text_of, prompt)] * params.n]
        return await respond(service, request, body, partial(CompletionAnswering, echo=echo), body.prompts, params)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_entry(service) for service in services()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> dict[str, Any]:
        return _model_entry(await pick(request, name))

    @app.post("/tokenize")
    async def tokenize(body: protocol.TokenizeRequest, request: Request) -> dict[str, Any]:
        service = await pick(request, body.model)
        service.check_texts([body.prompt or "", *(protocol.text_of(turn.content) for turn in body.messages or ())])
        async with connected(request.receive, request.scope["end_at"]):
            ids = await service.engine.encode(_prompt(body, service.settings))
        llm = service.llm
        texts = {"token_strs": llm.tokenizer.convert_ids_to_tokens(ids)} if body.return_token_strs else {}
        return {"count": len(ids), "max_model_len": llm.runner.max_length, "tokens": ids, **texts}

    @app.post("/detokenize")
    async def detokenize(body: protocol.DetokenizeRequest, request: Request) -> dict[str, Any]:
        service = await pick(request, body.model)
        service.check_texts([body.tokens])
        return {"prompt": await run_in_threadpool(service.text_of, body.tokens)}


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
