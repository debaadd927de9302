"""Embeddings as of the OpenAI API, scores as of vLLM, and reranking as of Jina and Cohere.

A request has many texts, a few of which are with the engine at a time, so that others get slots between them.
"""

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from ..engine.embeddings import EmbeddingOutput, PoolingParams
from ..engine.scores import Method, ScoringOutput, pairs_of
from .errors import ApiError
from .metrics import Watch
from .openai import Pick
from .protocol import Count, Fields
from .service import Service
from .streams import connected

MAX_TEXTS, MAX_TOKENS = 2048, 300_000  # of a request, as in the OpenAI API
_T = TypeVar("_T")
_Out = TypeVar("_Out")
_Text: TypeAlias = Annotated[str, Field(min_length=1)]
_Texts: TypeAlias = Annotated[list[_Text], Field(min_length=1, max_length=MAX_TEXTS)]


class _Asked(Fields):
    """Fields of all these endpoints. user has no effect."""

    model: str | None = None
    user: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    def extra_args(self, service: Service, tenant: str) -> dict[str, Any]:
        """See `SamplingParams.extra_args`: whose request it is, and the adapter that its model's name chooses."""
        salt = ":".join(filter(None, [tenant, self.cache_salt]))
        whose = {name: value for name, value in (("cache_salt", salt), ("account", tenant)) if value}
        return {**service.defaults.get("extra_args", {}), **whose}


class EmbeddingsRequest(_Asked):
    """The body of /v1/embeddings. pooling, normalize: Paceline's; missing ones are as the model's files say."""

    input: str | list[int] | list[str] | list[list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Count, Field(ge=1)] | None = None
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None

    def texts(self) -> list[str | list[int]]:
        """Each of the inputs. Raises `ApiError` for none, an empty one, and too many."""
        is_one = isinstance(self.input, str) or (len(self.input) > 0 and isinstance(self.input[0], int))
        texts: list[str | list[int]] = [self.input] if is_one else list(self.input)  # type: ignore[list-item, arg-type]
        if not texts or not all(texts):
            raise ApiError(400, "The input is empty. Expected: at least one token.", "invalid_value", "input")
        if len(texts) > MAX_TEXTS:
            message = f"Too many inputs: {len(texts)}. Expected: at most {MAX_TEXTS}."
            raise ApiError(400, message, "invalid_value", "input")
        return texts


class _Scored(_Asked):
    """Fields about scores, which are Paceline's: see `LLM.score`."""

    method: Method | None = None
    instruction: str | None = None


class ScoreRequest(_Scored):
    """The body of /score."""

    text_1: _Text | _Texts
    text_2: _Text | _Texts


class Document(Fields):
    """A document of /rerank in an object."""

    text: _Text


class RerankRequest(_Scored):
    """The body of /rerank. max_tokens_per_doc is not supported: a document is read whole."""

    query: _Text
    documents: Annotated[list[_Text | Document], Field(min_length=1, max_length=MAX_TEXTS)]
    top_n: Annotated[Count, Field(ge=1)] | None = None
    return_documents: bool = True
    max_tokens_per_doc: None = None

    @property
    def texts(self) -> list[str]:
        """The documents."""
        return [one.text if isinstance(one, Document) else one for one in self.documents]


async def embed(service: Service, body: EmbeddingsRequest, request: Request) -> list[EmbeddingOutput]:
    """Each of the embeddings. Raises `ApiError`, and what `AsyncLLM.embed` raises."""
    service.check_texts(texts := body.texts())
    params = PoolingParams(
        body.pooling, body.normalize, body.dimensions, body.extra_args(service, request.scope["tenant"])
    )
    async with connected(request.receive, request.scope["end_at"]):
        ids = [await service.engine.encode(text) for text in texts]
        _check_number(sum(map(len, ids)))
        return await _each(service, request, ids, lambda one: service.engine.embed(one, params))


def add_embeddings(app: FastAPI, pick: Pick) -> None:
    """Add the endpoints."""

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
        service = await pick(request, body.model)
        outputs = await embed(service, body, request)
        form = base64_of if body.encoding_format == "base64" else list[float]
        data = [
            {"object": "embedding", "index": index, "embedding": form(output.outputs.embedding)}
            for index, output in enumerate(outputs)
        ]
        whole = {"object": "list", "data": data, "model": service.settings.model, "usage": _usage(outputs)}
        return await run_in_threadpool(JSONResponse, whole)  # millions of digits may take a second

    @app.post("/v1/score")
    @app.post("/score")
    async def score(body: ScoreRequest, request: Request) -> dict[str, Any]:
        service = await pick(request, body.model)
        outputs = await _scores(service, request, body, pairs_of(body.text_1, body.text_2))
        data = [
            {"index": index, "object": "score", "score": output.outputs.score} for index, output in enumerate(outputs)
        ]
        head = {"id": _id("score", request), "object": "list", "created": int(time.time())}
        return {**head, "model": service.settings.model, "data": data, "usage": _usage(outputs)}

    @app.post("/v2/rerank")
    @app.post("/v1/rerank")
    @app.post("/rerank")
    async def rerank(body: RerankRequest, request: Request) -> dict[str, Any]:
        service, texts = await pick(request, body.model), body.texts
        outputs = await _scores(service, request, body, pairs_of(body.query, texts))
        numbers = [output.outputs.score for output in outputs]
        best = sorted(range(len(numbers)), key=lambda index: -numbers[index])[: body.top_n]
        results = [
            {"index": index, "relevance_score": numbers[index]}
            | ({"document": {"text": texts[index]}} if body.return_documents else {})
            for index in best
        ]
        head = {"id": _id("rerank", request), "model": service.settings.model}
        return {**head, "results": results, "usage": _usage(outputs)}


def base64_of(numbers: Sequence[float]) -> str:
    """An embedding as little-endian float32, in base64."""
    return base64.b64encode(np.asarray(numbers, "<f4").tobytes()).decode()


async def _scores(
    service: Service, request: Request, body: _Scored, pairs: Sequence[tuple[str, str]]
) -> list[ScoringOutput]:
    service.check_texts([text for pair in pairs for text in pair])
    most = sum(len(text) for pair in pairs for text in pair)  # a token has a character at least
    extra_args = body.extra_args(service, request.scope["tenant"])
    async with connected(request.receive, request.scope["end_at"]):
        if most > MAX_TOKENS:
            _check_number(sum([len(await service.engine.encode(text)) for pair in pairs for text in pair]))
        ask: Callable[[tuple[str, str]], Awaitable[ScoringOutput]] = lambda pair: service.engine.score(  # noqa: E731
            *pair, body.method, body.instruction, extra_args=extra_args
        )
        return await _each(service, request, pairs, ask)


async def _each(
    service: Service, request: Request, items: Sequence[_T], ask: Callable[[_T], Awaitable[_Out]]
) -> list[_Out]:
    """The outputs for all items, half as many at a time as there are slots. The first error ends the others."""
    watch, free = Watch(service.metrics), asyncio.Semaphore(max(1, service.llm.runner.num_slots // 2))

    async def one(item: _T) -> _Out:
        async with free:
            return await ask(item)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in items]
    except ExceptionGroup as group_error:
        raise group_error.exceptions[0] from None
    finally:
        watch.end()
    outputs = [task.result() for task in tasks]
    request.scope["log"]["prompt_tokens"] = _usage(outputs)["prompt_tokens"]
    return outputs


def _check_number(num_tokens: int) -> None:
    if num_tokens > MAX_TOKENS:
        message = f"Too many tokens in one request: {num_tokens}. Expected: at most {MAX_TOKENS}, over all inputs."
        raise ApiError(400, message, "max_tokens_per_request")


def _usage(outputs: Sequence[Any]) -> dict[str, int]:
    count = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": count, "total_tokens": count}


def _id(kind: str, request: Request) -> str:
    return f"{kind}-{request.scope['log']['request_id'].removeprefix('req_')}"
