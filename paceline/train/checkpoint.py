"""Checkpoints from which a run goes on bit for bit: weights, optimizer, random numbers, and how far it was.

A file appears under its name only when it is whole and on the disk; the last two are kept.
"""

import os
import random
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from .run_folder import understood

_NAME = re.compile(r"checkpoint-(\d{8})\.pt")
KEPT = 2


def save(folder: Path, step: int, state: Mapping[str, Any]) -> Path:
    """Write what the run is at `step`, then drop all but the last two."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"checkpoint-{step:08d}.pt"
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    _sync(folder)
    for old in _all(folder)[:-KEPT]:
        old.unlink()
    return path


def newest(folder: Path) -> dict[str, Any] | None:
    """The last whole checkpoint; None where there is none. Raises `ConfigError` for one that cannot be read."""
    found = _all(folder)
    if not found:
        return None
    with readable(folder):
        return torch.load(found[-1], map_location="cpu", weights_only=True)


def readable(folder: Path) -> AbstractContextManager[None]:
    """Reading the last checkpoint: `ConfigError` where it does not hold what was expected."""
    return understood(f"the checkpoint {str(_all(folder)[-1])!r}", "delete it, and the run goes on from the one before")


def random_state() -> dict[str, Any]:
    """The generators of this process."""
    version, words, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"python": (version, list(words), gauss), "torch": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put the generators back."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def _all(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("checkpoint-*.pt") if _NAME.fullmatch(path.name))


def _sync(folder: Path) -> None:
    """A new name is on the disk only when its folder is; systems that cannot open folders sync them by themselves."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
