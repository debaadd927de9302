"""Middleware for every request: request id, log line, checks of the Host header and API key, limits of bodies."""

import asyncio
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from ..schema import brief
from .errors import CLIENT_GONE, HANDLERS, ApiError, ClientGone, Forms, answer_of

logger = logging.getLogger("paceline.server")
_OPEN_PATHS = ("/", "/health", "/ready", "/metrics")
_PROBES = ("/health", "/ready")
_QUIET_PATHS = (*_PROBES, "/metrics")
HELD_BODIES = 8  # times max_body_bytes is the limit of the bodies of all requests in progress


@dataclass(frozen=True, kw_only=True)
class GateSettings:
    """Requirements for all requests of a server.

    model: its name in requests.
    api_keys: one of them must be sent for every path that uses the model; empty: none is required.
    allowed_hosts: Host headers that are accepted, in lower case, without a port; empty: any.
    max_body_bytes: of a body; those of all requests in progress together may have `HELD_BODIES` times as many.
    request_timeout_s: from the first byte of a request to the last of its answer; receiving it, reading its images and
        waiting for a slot included.
    """

    model: str
    api_keys: Sequence[str] = ()
    allowed_hosts: Sequence[str] = ()
    max_body_bytes: int = 32 << 20
    request_timeout_s: float = 600.0


class Gated:
    """A service behind a `Gate`, which counts the requests in progress and refuses new ones while draining."""

    settings: Any
    num_running = 0
    is_draining = False

    async def drain(self, timeout: float) -> None:
        """Refuse new requests, and wait until none is in progress, for at most `timeout` seconds."""
        self.is_draining, end_at = True, time.monotonic() + timeout
        while self.num_running and time.monotonic() < end_at:
            await asyncio.sleep(0.02)


class Gate:
    """ASGI middleware. `scope["log"]` is the request's log line, to which endpoints add fields.

    `scope["end_at"]` is when its time is over, in the time of the event loop. `scope["tenant"]` is a random name for
    its API key; empty where none is required. `scope["held"]` is an `AsyncExitStack` of what is held until the whole
    answer was sent.
    """

    def __init__(self, app: ASGIApp, service: Gated):
        self.app, self.service, self.held_bytes = app, service, 0
        self.settings: GateSettings = service.settings
        self.keys = [key.encode() for key in self.settings.api_keys]
        self._tenants = {key: secrets.token_hex(16) for key in self.keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, status = time.perf_counter(), CLIENT_GONE
        log: dict[str, Any] = {"request_id": f"req_{secrets.token_hex(12)}"}
        scope["log"], scope["tenant"], scope["held_bytes"], state = log, "", 0, scope.get("state", {})
        is_refused = state.get("is_refused", False)
        first_byte_at = state.get("first_byte_at", asyncio.get_running_loop().time())
        scope["end_at"] = first_byte_at + self.settings.request_timeout_s

        async def put(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = [(b"x-request-id", log["request_id"].encode())]
                added += [(b"connection", b"close")] if is_refused else []
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        try:
            try:
                if is_refused and scope["path"] not in _PROBES:
                    message = "This server has too many connections."
                    raise ApiError(503, message, "too_many_connections", retry_after_s=1)
                self._check_host(scope)
                self._check_key(scope)
                if self.service.is_draining and scope["path"] not in _QUIET_PATHS:
                    raise ApiError(503, "The server is shutting down.", "server_shutting_down", retry_after_s=5)
                whole = await self._with_body(scope, receive)
                self.service.num_running += 1
                try:
                    async with AsyncExitStack() as scope["held"]:
                        await self.app(scope, whole, put)
                finally:
                    self.service.num_running -= 1
            except (ApiError, ClientGone, TimeoutError) as error:
                await answer_of(error, scope)(scope, receive, put)
        except Exception:
            status = 500  # answered further out
            raise
        finally:
            self.held_bytes -= scope["held_bytes"]
            if scope["path"] not in _QUIET_PATHS:
                seconds = round(time.perf_counter() - begin, 4)
                line = {"method": scope["method"], "path": scope["path"], "status": status, "seconds": seconds}
                logger.info("request", extra={"fields": {**line, **log}})

    def _check_host(self, scope: Scope) -> None:
        """Check the Host header, against DNS rebinding."""
        if not self.settings.allowed_hosts or scope["path"] in _PROBES:
            return
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1").lower()
        if re.sub(r":\d*$", "", host) not in self.settings.allowed_hosts:
            message = f"The Host header {brief(host)} is not allowed. Fix: start the server with --allowed-hosts NAME."
            raise ApiError(403, message, "host_not_allowed")

    def _check_key(self, scope: Scope) -> None:
        if not self.keys or scope["path"] in _OPEN_PATHS:
            return
        headers = dict(scope["headers"])
        named = headers.get(b"x-api-key")  # Anthropic's
        header = headers.get(b"authorization", b"" if named is None else b"Bearer " + named)
        scheme, _, key = header.partition(b" ")
        # every key is compared, so that the time reveals nothing
        fits = [hmac.compare_digest(key.strip(), known) for known in self.keys]
        if scheme.lower() != b"bearer" or not any(fits):
            error = "Incorrect API key provided." if header else "No API key provided. Send: Authorization: Bearer KEY."
            raise ApiError(401, error, "invalid_api_key")
        scope["tenant"] = self._tenants[self.keys[fits.index(True)]]

    async def _with_body(self, scope: Scope, receive: Receive) -> Receive:
        """Read the body within the limits; returns a `receive` that replays it."""
        pieces, is_whole, most = list[bytes](), False, self.settings.max_body_bytes
        length = dict(scope["headers"]).get(b"content-length", b"0")
        too_large = ApiError(413, f"The body is larger than {most} bytes.", "request_too_large")
        if length.isdigit() and int(length) > most:
            raise too_large
        async with asyncio.timeout_at(scope["end_at"]):
            while not is_whole:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                pieces.append(message.get("body", b""))
                scope["held_bytes"] += len(pieces[-1])
                self.held_bytes += len(pieces[-1])
                if scope["held_bytes"] > most:
                    raise too_large
                if self.held_bytes > HELD_BODIES * most:
                    refusal = "The requests in progress are too large together."
                    raise ApiError(429, refusal, "rate_limit_exceeded", retry_after_s=1)
                is_whole = not message.get("more_body", False)
        body: list[Message] = [{"type": "http.request", "body": b"".join(pieces), "more_body": False}]

        async def replay() -> Message:
            return body.pop() if body else await receive()

        return replay


def gated_app(
    service: Gated, is_alive: Callable[[], bool], metrics: Callable[[], str], outer: Sequence[Middleware] = ()
) -> FastAPI:
    """An application behind a `Gate`, with /health, /ready, /version and /metrics; `app.state.service` is the service.

    outer: middleware before the gate.
    """
    # no documentation pages: FastAPI's load scripts from other hosts
    middleware = [*outer, Middleware(Gate, service=service)]
    app = FastAPI(title="Paceline", docs_url=None, redoc_url=None, middleware=middleware, exception_handlers=HANDLERS)
    app.state.service, app.state.error_forms = service, Forms()

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"}) if is_alive() else JSONResponse({"status": "failed"}, 503)

    @app.get("/ready")
    async def ready() -> Response:
        return Response(status_code=200 if is_alive() and not service.is_draining else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics_page() -> Response:
        return PlainTextResponse(metrics(), media_type="text/plain; version=0.0.4")

    return app
