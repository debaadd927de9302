"""The process of a server: its socket, its signals, its logs."""

import asyncio
import json
import logging
import socket
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, Literal, cast

import uvicorn
from fastapi import FastAPI

from ..errors import ConfigError
from .connections import Connection

LogFormat = Literal["text", "json"]


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket without listening, so that a used port is an error before the model is loaded.

    port 0: any free one. Raises `ConfigError`.
    """
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        return listener
    except OSError as error:
        if listener is not None:
            listener.close()
        fix = "choose another with --port; 0 takes a free one"
        raise ConfigError(f"port {port} of {host} cannot be served", got=error.strerror, fix=fix) from error


def set_up_logs(form: LogFormat) -> None:
    """Log this package and the errors of uvicorn to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines(form))
    for name, level in (("paceline.server", logging.INFO), ("uvicorn.error", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


class Server(uvicorn.Server):
    """Serves until SIGTERM or Ctrl-C; answers in progress are then completed within `drain_s` seconds.

    A second signal ends it at once. announce: called with the URL once the server listens.
    max_connections: open at once; further ones get status 503.
    """

    def __init__(self, app: FastAPI, drain_s: float, announce: Callable[[str], None], max_connections: int):
        super().__init__(
            uvicorn.Config(
                app,
                http=cast(Any, partial(Connection, max_connections=max_connections)),
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=5,
            )
        )
        self.service, self.drain_s, self.announce = app.state.service, drain_s, announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        host, port = (sockets or [])[0].getsockname()[:2]
        self.announce(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On the first signal: drain, then exit. On the second: exit at once."""
        if self.service.is_draining:
            self.should_exit = self.force_exit = True
        else:
            self.service.is_draining = True
            self._draining = asyncio.run_coroutine_threadsafe(self._drain(), self._loop)

    async def _drain(self) -> None:
        try:
            await self.service.drain(self.drain_s)
        finally:
            self.should_exit = True


class _Lines(logging.Formatter):
    """One line per request, as text or as a JSON object."""

    def __init__(self, form: LogFormat):
        super().__init__()
        self.form = form

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        fields = getattr(record, "fields", {})
        if record.exc_info:
            fields = {**fields, "exception": self.formatException(record.exc_info)}
        if self.form == "json":
            line = {"time": moment, "level": record.levelname.lower(), "message": record.getMessage(), **fields}
            return json.dumps(line, default=str)
        # as JSON, so that a path with a newline stays one line
        words = [
            f"{name}={value if isinstance(value, int | float) else json.dumps(value)}" for name, value in fields.items()
        ]
        return " ".join([moment, record.levelname.lower(), record.getMessage(), *words])
