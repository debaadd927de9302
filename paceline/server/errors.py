"""Errors in the form of the OpenAI API, {"error": {"message", "type", "param", "code"}}, or of another one."""

import re
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, TypeAlias

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException as RoutingError

from ..errors import CacheFull, ConfigError, EngineStopped, PacelineError, QueueFull
from ..schema import brief, cut

CLIENT_GONE = 499  # the status in logs if the client disconnected, as in nginx
_LONGEST = 1500  # characters of a message, since most repeat what was sent


class ApiError(HTTPException):
    """An error response. code: as in the OpenAI API. param: the wrong field. retry_after_s: when to try again.

    Message and param are cut to a bounded length.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, retry_after_s: int = 0
    ):
        self.code, self.param = code, None if param is None else cut(param)
        headers = {"Retry-After": str(retry_after_s)} if retry_after_s else None
        super().__init__(status, cut(message, _LONGEST), headers)


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


def unsupported(field: str, fix: str = "leave it out") -> ApiError:
    """The error for a field of the OpenAI API that this server does not support."""
    return ApiError(400, f"Unsupported parameter: '{field}'. Fix: {fix}.", "unsupported_parameter", field)


def unknown_model(name: object, known: Sequence[str]) -> ApiError:
    """The error for the name of no model of this server."""
    message = f"The model {brief(name)} does not exist. This server has {', '.join(map(repr, known))}."
    return ApiError(404, message, "model_not_found", "model")


def as_api_error(error: Exception) -> ApiError:
    """The response for any error; unexpected errors become a 500 without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _of_validation(error.errors())
    if isinstance(error, ValidationError):  # of a body that was translated from another API's
        return _of_validation([{**one, "loc": ("body", *one["loc"])} for one in error.errors()])
    if isinstance(error, CacheFull):
        return ApiError(400, str(error), "context_length_exceeded")
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), "rate_limit_exceeded", retry_after_s=error.retry_after_s)
    if isinstance(error, EngineStopped):
        return ApiError(503, str(error), "server_shutting_down", retry_after_s=5)
    if isinstance(error, ConfigError):
        named = re.search(r"SamplingParams\.(\w+)", str(error))
        return ApiError(400, str(error), "invalid_value", named and named[1])
    if isinstance(error, PacelineError):
        return ApiError(500, str(error))
    if isinstance(error, TimeoutError):
        return ApiError(504, "The answer took longer than this server allows.", "timeout")
    if isinstance(error, RoutingError):
        code = {404: "unknown_url", 405: "method_not_supported"}.get(error.status_code)
        return ApiError(error.status_code, str(error.detail), code)
    return ApiError(500, "The server had an error while processing your request.", "internal_error")


def body_of(error: ApiError) -> dict[str, Any]:
    """The body of the response."""
    kinds = {401: "authentication_error", 429: "requests"}
    kind = kinds.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "server_error")
    return {"error": {"message": error.detail, "type": kind, "param": error.param, "code": error.code}}


Forms: TypeAlias = dict[str, Callable[[ApiError], dict[str, Any]]]
"""The bodies of errors of other APIs than OpenAI's, by the beginning of their paths: `app.state.error_forms`."""


def answer_of(error: Exception, scope: MutableMapping[str, Any]) -> Response:
    """The response to a request that failed before anything was sent. scope: of the request."""
    if isinstance(error, ClientGone):
        return Response(status_code=CLIENT_GONE)
    forms: Forms = scope["app"].state.error_forms
    path = f"{scope['path']}/"
    form = next((form for start, form in forms.items() if path.startswith(f"{start}/")), body_of)
    known = as_api_error(error)
    return JSONResponse(form(known), known.status_code, known.headers)


async def _handle(request: Request, error: Exception) -> Response:
    return answer_of(error, request.scope)


HANDLERS: dict[Any, Any] = dict.fromkeys(
    (RoutingError, RequestValidationError, ValidationError, PacelineError, TimeoutError, ClientGone, Exception), _handle
)
"""Exception handlers for an application with errors in these formats."""


def _of_validation(errors: Sequence[Any]) -> ApiError:
    """The first error; for a union, the deepest one, or one that is more than a wrong type."""
    deepest = max(errors, key=lambda error: (len(error["loc"]), not error["type"].endswith("_type")))
    kind, words = deepest["type"], deepest["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        return ApiError(400, f"The body is not JSON: {deepest['ctx']['error']}.", "invalid_json")
    param = cut(_param(deepest["loc"]))
    if not param:
        return ApiError(400, "The body is not a JSON object with Content-Type: application/json.", "invalid_json")
    if kind == "extra_forbidden":
        return ApiError(400, f"Unknown parameter: {param!r}.", "unknown_parameter", param)
    if kind == "missing":
        return ApiError(400, f"Missing required parameter: {param!r}.", "missing_required_parameter", param)
    if kind == "none_required":
        return ApiError(400, f"Unsupported parameter: {param!r}. Fix: leave it out.", "unsupported_parameter", param)
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return ApiError(400, f"Invalid {param!r}: {cut(words, 500)}.", code, param)


def _param(loc: Sequence[str | int]) -> str:
    """The path in the body as in the OpenAI API, messages[0].content, without names of union members."""
    path = ""
    for step in loc[1:]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif (
            re.fullmatch(r"[a-z_0-9]+", step)
            and step not in ("str", "int", "text", "image_url", "input_text", "output_text", "input_image")
        ) or not path:
            path += f".{step}" if path else step
    return path
