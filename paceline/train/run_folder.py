"""The folder of a run: locked by one process, refused for other settings, with errors for damaged files."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from safetensors.torch import save
from torch import Tensor

from ..errors import ConfigError, PacelineError
from ..schema import brief, validate
from ..system.files import claimed, read_json

_T = TypeVar("_T")


def need(name: str, feature: str, fix: str = "pip install 'paceline[train]'") -> ModuleType:
    """The library of this name, which `feature` needs. Raises `ConfigError` where it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(f"{feature} needs {name}", got=str(error), fix=fix) from error


def is_main() -> bool:
    """Whether this process writes and reports for all processes of a distributed run."""
    return os.environ.get("RANK", "0") == "0"


def local_device() -> str | None:
    """The device that `accelerate launch` gave this process; None without it."""
    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if rank is not None and torch.cuda.is_available() else None


@contextmanager
def main_first(device: torch.device) -> Iterator[None]:
    """The main process runs the block first, the others after it."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield
        return
    from accelerate import PartialState

    with PartialState(cpu=device.type == "cpu").main_process_first():
        yield


def leave_group() -> None:
    """Leave the processes of a distributed run. Without it gloo's threads can abort a process while it exits."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@contextmanager
def only_run(out: Path, name: str) -> Iterator[None]:
    """Hold the lock `name` of a run's folder, only in the main process; the system releases it when its holder dies.

    Raises `ConfigError` at once where another process holds it, or the folder cannot be written.
    """
    if not is_main():
        yield
        return
    was_there = out.exists()
    try:
        with claimed(out / name):
            yield
    finally:
        if not was_there:
            with suppress(OSError):
                out.rmdir()  # where nothing was written into it


def check_same(subject: str, then: Mapping[str, Any], now: Mapping[str, Any], fix: str) -> None:
    """Raise `ConfigError` where `subject` was made with settings `then` that differ from those of `now`."""
    then, now = (json.loads(json.dumps(settings)) for settings in (then, now))
    changed = [key for key in {**then, **now} if then.get(key) != now.get(key)]
    if changed:
        was, wanted = (", ".join(f"{key}: {brief(values.get(key))}" for key in changed) for values in (then, now))
        raise ConfigError(f"{subject} was made with other settings", got=wanted, expected=was, fix=fix)


def read_if_there(kind: type[_T], path: Path, fix: str) -> _T | None:
    """The record in a JSON file; None where there is none. Raises `ConfigError` for a damaged one."""
    if not path.exists():
        return None
    record = f"the record {str(path)!r}"
    with understood(record, fix):
        return validate(kind, read_json(path, "the record"), record)


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors and their names."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return hashlib.sha256(save(plain)).hexdigest()


@contextmanager
def understood(subject: str, fix: str) -> Iterator[None]:
    """For reading files of a run: any error becomes a `ConfigError` with this fix."""
    try:
        yield
    except PacelineError as error:
        if error.fix is not None:
            raise
        raise type(error)(error.what, got=error.got, expected=error.expected, fix=fix) from error
    except Exception as error:  # pickle, zip, safetensors and torch each raise their own
        lines = str(error).strip().splitlines()
        raise ConfigError(
            f"{subject} is damaged, or of another version of Paceline",
            got=lines[0] if lines else type(error).__name__,
            fix=fix,
        ) from error
