"""The application: the endpoints of the OpenAI API, the chat page, and what all requests share."""

from functools import partial

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from ..async_llm import AsyncLLM
from .gate import gated_app
from .openai import add_openai
from .page import chat_page
from .service import Service, Settings


def make_app(engine: AsyncLLM, settings: Settings) -> FastAPI:
    """The application; `app.state.service` is its `Service`."""
    cors = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"], "expose_headers": ["x-request-id"]}
    outer = [Middleware(CORSMiddleware, allow_origins=list(settings.allow_origins), **cors)]  # type: ignore[arg-type]
    service = Service(engine, settings)
    metrics = partial(service.metrics.text, engine)
    app = gated_app(service, lambda: engine.is_alive, metrics, outer if settings.allow_origins else ())
    page, page_headers = chat_page()

    async def pick(request: Request, name: str | None) -> Service:
        service.check_model(name)
        return service

    add_openai(app, pick, lambda: [service])

    @app.get("/")
    async def root() -> Response:
        return HTMLResponse(page, headers=page_headers)

    return app
