"""The endpoints of the OpenAI API, and vLLM's for tokens."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from ..errors import ConfigError
from ..hf.image_prompts import writable
from ..target.prompts import TemplatedChat
from . import protocol
from .answers import Answering, respond
from .chats import chat_prompt, read_messages, thinking
from .completions import CompletionAnswering
from .errors import ApiError, unsupported
from .models import Models
from .response_events import ResponseAnswering
from .responses import ResponsesRequest
from .service import About, Service, Settings
from .streams import connected
from .tools.forms import forced_form, strict_form

Pick: TypeAlias = Callable[[Request, str | None], Awaitable[Service]]
"""The service of the model that a request names, which is held until the request has ended. Raises `ApiError`."""
Tell: TypeAlias = Callable[[Request, str | None], Awaitable[tuple[str, About]]]
"""The name of a model, and what is told of it. Raises `ApiError`."""


async def answer_chat(
    service: Service, body: protocol.ChatRequest, request: Request, kind: Callable[..., Answering] = Answering
) -> Response:
    """Answer a chat, whole or as a stream. kind: makes the answer's format. Raises `ApiError` and `ConfigError`."""
    service.check(body)
    prompt = prompt_of(service, body)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "max_tokens and max_completion_tokens are the same.", "invalid_value", "max_tokens")
    most = {"max_tokens": body.max_completion_tokens}
    tenant = request.scope["tenant"]
    form = forced_form(body) or strict_form(body, service.format)
    params = body.params({**service.defaults, **most}, body.num_logprobs, form, tenant)
    params = service.shows(body, params)
    return await respond(service, request, body, kind, [prompt], params)


def prompt_of(service: Service, body: protocol.ChatRequest) -> TemplatedChat:
    """The prompt of a chat. Raises `ApiError` and `ConfigError`."""
    service.check_texts(["".join(protocol.text_of(message.content) for message in body.messages)])
    told, effort = dict[str, Any](), body.reasoning_effort
    if effort is not None:
        told = thinking(service.template, effort != "none", effort)
        if not told and (effort != "none" or service.format.thinks):
            raise unsupported("reasoning_effort", "leave it out; the chat template cannot say that")
    defaults = service.settings.chat_template_kwargs
    body.chat_template_kwargs = {**defaults, **told, **(body.chat_template_kwargs or {})}
    return chat_prompt(body, service.settings.images, service.template)


async def answer_completion(
    service: Service,
    body: protocol.CompletionRequest,
    request: Request,
    kind: Callable[..., Answering] = CompletionAnswering,
    max_tokens: int | None = None,
) -> Response:
    """Continue prompts, as `answer_chat` answers a chat. max_tokens: the default; None: as many as fit."""
    service.check(body)
    service.check_texts(body.prompts)
    body.check_echo()
    defaults = {**service.defaults, "max_tokens": max_tokens}
    params = body.params(defaults, body.logprobs, tenant=request.scope["tenant"])
    if body.best_of not in (None, params.n):
        raise unsupported("best_of")
    shown = body.prompts if body.echo else ()
    echo = [text for prompt in shown for text in [await run_in_threadpool(service.text_of, prompt)] * params.n]
    return await respond(service, request, body, partial(kind, echo=echo), body.prompts, params)


def add_openai(app: FastAPI, pick: Pick, models: Models) -> None:
    """Add the endpoints."""

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
        return await answer_completion(await pick(request, body.model), body, request, max_tokens=16)

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": models.entries()}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return models.entry(name)

    @app.post("/tokenize")
    async def tokenize(body: protocol.TokenizeRequest, request: Request) -> dict[str, Any]:
        service = await pick(request, body.model)
        service.check_texts(
            [body.prompt or body.content or "", *(protocol.text_of(turn.content) for turn in body.messages or ())]
        )
        async with connected(request.receive, request.scope["end_at"]):
            prompt = _prompt(body, service.settings)
            if body.content is None or body.add_special:
                ids = await service.engine.encode(prompt)
            else:
                inner = partial(service.llm.tokenizer.encode, writable(body.content), add_special_tokens=False)
                ids = await run_in_threadpool(inner)
        llm = service.llm
        texts = {"token_strs": llm.tokenizer.convert_ids_to_tokens(ids)} if body.return_token_strs else {}
        return {"count": len(ids), "max_model_len": llm.runner.max_length, "tokens": ids, **texts}

    @app.post("/detokenize")
    async def detokenize(body: protocol.DetokenizeRequest, request: Request) -> dict[str, Any]:
        service = await pick(request, body.model)
        service.check_texts([body.tokens])
        text = await run_in_threadpool(service.text_of, body.tokens)
        return {"prompt": text, "content": text}  # llama.cpp's name


def _prompt(body: protocol.TokenizeRequest, settings: Settings) -> str | TemplatedChat:
    """A text or a chat. Raises `ConfigError`."""
    given = [item for item in (body.prompt, body.content, body.messages) if item is not None]
    if len(given) != 1:
        raise ConfigError("tokenize needs a text or a chat", expected="one of prompt, content and messages")
    if isinstance(given[0], str):
        return given[0]
    options = {**settings.chat_template_kwargs, "add_generation_prompt": body.add_generation_prompt}
    return TemplatedChat(read_messages(body.messages or []), options, settings.images)
