"""The application: the endpoints of the OpenAI API and of others, the chat page, and what all requests share."""

import hashlib
from base64 import b64encode
from functools import partial
from importlib import resources

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from ..async_llm import AsyncLLM
from .dialects.anthropic import add_anthropic
from .dialects.llama_cpp import add_llama_cpp
from .dialects.ollama import add_ollama
from .embeddings import add_embeddings
from .gate import gated_app
from .openai import add_openai
from .service import Service, Settings


def make_app(engine: AsyncLLM, settings: Settings) -> FastAPI:
    """The application; `app.state.service` is its `Service`."""
    cors = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"], "expose_headers": ["x-request-id"]}
    outer = [Middleware(CORSMiddleware, allow_origins=list(settings.allow_origins), **cors)]  # type: ignore[arg-type]
    service = Service(engine, settings)
    metrics = partial(service.metrics.text, engine)
    app = gated_app(service, lambda: engine.is_alive, metrics, outer if settings.allow_origins else ())
    page, page_headers = _page()

    async def pick(request: Request, name: str | None) -> Service:
        service.check_model(name)
        return service

    add_openai(app, pick, lambda: [service])
    add_ollama(app, pick, lambda: {service.settings.model: service})
    add_anthropic(app, pick)
    add_llama_cpp(app, pick)
    add_embeddings(app, pick)

    @app.get("/")
    async def chat_page() -> Response:
        return HTMLResponse(page, headers=page_headers)

    return app


def _page() -> tuple[str, dict[str, str]]:
    """The page, and headers that allow only its own script."""
    ours, shared = resources.files("paceline.server"), resources.files("paceline.measure")
    text = (ours / "page.html").read_text(encoding="utf-8")
    text = text.replace("{{colours}}", (shared / "colours.css").read_text(encoding="utf-8"))
    script = text.partition("<script>")[2].partition("</script>")[0]
    fingerprint = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{fingerprint}'; connect-src 'self'"
    return text, {"Content-Security-Policy": f"{rules}; img-src data:; frame-ancestors 'none'"}
