"""The application: the endpoints of the OpenAI API and of others, the chat page, and what all requests share."""

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from .adapters import add_adapters
from .dialects.anthropic import add_anthropic
from .dialects.llama_cpp import add_llama_cpp
from .dialects.ollama import add_ollama
from .embeddings import add_embeddings
from .gate import gated_app
from .models import Models
from .openai import add_openai
from .page import chat_page


def make_app(models: Models) -> FastAPI:
    """The application; `app.state.service` are its models."""
    settings = models.settings
    cors = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"], "expose_headers": ["x-request-id"]}
    outer = [Middleware(CORSMiddleware, allow_origins=list(settings.allow_origins), **cors)]  # type: ignore[arg-type]
    app = gated_app(models, lambda: models.is_alive, models.metrics_page, outer if settings.allow_origins else ())
    page, page_headers = chat_page()
    add_openai(app, models.pick, models)
    add_adapters(app, models)
    add_embeddings(app, models.pick)
    add_ollama(app, models.pick, models.about, lambda: models.listed)
    add_anthropic(app, models.pick)
    add_llama_cpp(app, models.pick, models.about)

    @app.get("/")
    async def root() -> Response:
        return HTMLResponse(page, headers=page_headers)

    return app
