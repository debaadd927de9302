"""vLLM's endpoints that add and remove LoRA adapters, of folders below the one that is opened to them."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field

from ..schema import brief
from .errors import ApiError
from .models import Models
from .protocol import Fields
from .streams import connected

_Name = Annotated[str, Field(min_length=1, max_length=256)]


class LoadAdapter(Fields):
    """The body of /v1/load_lora_adapter. base_model_name: its model, where the server has several."""

    lora_name: _Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False
    base_model_name: str | None = None


class UnloadAdapter(Fields):
    """The body of /v1/unload_lora_adapter. lora_int_id: is not read."""

    lora_name: _Name
    lora_int_id: int | None = None


def add_adapters(app: FastAPI, models: Models) -> None:
    """Add the endpoints."""
    opened, one_at_a_time = models.settings.adapter_dir, asyncio.Lock()

    @app.post("/v1/load_lora_adapter")
    async def load(body: LoadAdapter, request: Request) -> Response:
        folder, name, base = _folder(opened, body.lora_path), body.lora_name, body.base_model_name
        if base is None and len(models.models) > 1:
            raise ApiError(400, "This server has several models.", "missing_required_parameter", "base_model_name")
        model, other = models.find(base)
        if other:
            raise ApiError(400, f"{brief(other)} is an adapter.", "invalid_value", "base_model_name")
        async with connected(request.receive, request.scope["end_at"]), one_at_a_time:
            if name in models.names and not (body.load_inplace and name in model.adapters):
                message = f"The lora adapter {brief(name)} has already been loaded."
                raise ApiError(400, message, "invalid_value", "lora_name")
            await models.add_adapter(request, model, name, str(folder))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @app.post("/v1/unload_lora_adapter")
    async def unload(body: UnloadAdapter, request: Request) -> Response:
        _check_open(opened)
        name = body.lora_name
        async with connected(request.receive, request.scope["end_at"]), one_at_a_time:
            if name not in models.names or not models.find(name)[1]:
                raise ApiError(404, f"The lora adapter {brief(name)} cannot be found.", "model_not_found", "lora_name")
            await models.remove_adapter(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _check_open(opened: Path | None) -> Path:
    if opened is None:
        message = "Adapters cannot be changed. Fix: start the server with --adapter-dir DIR, which has their folders."
        raise ApiError(403, message, "adapters_not_allowed")
    return opened


def _folder(opened: Path | None, path: str) -> Path:
    """The folder of an adapter, relative to the opened one or absolute, but within it."""
    top = _check_open(opened).resolve()
    with suppress(OSError, ValueError):  # too long, or with a null byte
        folder = (top / path).resolve()
        if folder.is_relative_to(top) and folder.is_dir():
            return folder
    raise ApiError(404, f"No adapter found for {brief(path)} below --adapter-dir.", "not_found", "lora_path")
