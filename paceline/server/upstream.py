"""A client for a server of the OpenAI API."""

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx

from ..errors import ConfigError
from .errors import ApiError

_TIMES = httpx.Timeout(None, connect=10.0)  # the deadline of a request is its router's


class Upstream:
    """One server with one model.

    url: with or without /v1. model: its name there. max_model_len: tokens of its context, if the server reports it.
    """

    def __init__(self, url: str, model: str, max_model_len: int | None = None, api_key: str | None = None):
        self.url, self.model, self.max_model_len = _base(url), model, max_model_len
        # without the proxies of the environment, since the server is the user's own
        self.http = httpx.AsyncClient(base_url=self.url, headers=_headers(api_key), timeout=_TIMES, trust_env=False)

    @classmethod
    def open(cls, url: str, api_key: str | None = None) -> "Upstream":
        """Ask a server for its model. Raises `ConfigError` where none answers."""
        try:
            response = httpx.get(f"{_base(url)}/models", headers=_headers(api_key), timeout=10.0, trust_env=False)
            entry = response.raise_for_status().json()["data"][0]
            return cls(url, entry["id"], entry.get("max_model_len"), api_key)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            message, fix = "no server of the OpenAI API answers", "start it, and give http://HOST:PORT"
            raise ConfigError(message, got=f"{url}: {error}", fix=fix) from error

    async def ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A complete answer to a chat. Raises `ApiError`: the server's own, or 502 if it does not answer."""
        try:
            reply = await self.http.post("/chat/completions", json={**body, "model": self.model})
        except httpx.HTTPError as error:
            raise self._silent(error) from error
        if reply.status_code != 200:
            raise _error_of(reply.status_code, reply.content)
        return reply.json()

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of an answer. Raises as `ask` does."""
        try:
            async with self.http.stream("POST", "/chat/completions", json={**body, "model": self.model}) as reply:
                if reply.status_code != 200:
                    raise _error_of(reply.status_code, await reply.aread())
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        piece = json.loads(line.removeprefix("data: "))
                        if "error" in piece:
                            raise _error_of(502, line.removeprefix("data: ").encode())
                        yield piece
        except httpx.HTTPError as error:
            raise self._silent(error) from error

    def _silent(self, error: Exception) -> ApiError:
        return ApiError(502, f"The server at {self.url} does not answer ({type(error).__name__}).", "bad_upstream")


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1") + "/v1"


def _headers(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def _error_of(status: int, content: bytes) -> ApiError:
    """The error of another server as `ApiError`. For a prompt that is too long, vLLM only has a message."""
    try:
        error = json.loads(content)["error"]
        message, code, param = str(error["message"]), error.get("code"), error.get("param")
    except (ValueError, LookupError, TypeError):
        message, code, param = f"status {status}", None, None
    if "context length" in message:
        code = "context_length_exceeded"
    if status == 401:  # the key is the router's, not the client's
        return ApiError(502, "The router's API key for a server behind it is wrong.", "bad_upstream")
    code, param = (value if isinstance(value, str) else None for value in (code, param))
    return ApiError(status, message, code, param)
