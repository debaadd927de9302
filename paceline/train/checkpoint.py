"""Checkpoints from which a run continues bit for bit: weights, optimizer, random numbers, and how far it was.

A file appears under its name only when it is whole and on the disk; the last two are kept.
"""

import os
import random
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch

from .run_folder import understood

KEPT = 2


def path_of(folder: Path, step: int) -> Path:
    """The file of a step's checkpoint."""
    return folder / f"checkpoint-{step:08d}.pt"


def save(folder: Path, step: int, state: Mapping[str, Any]) -> Path:
    """Write the state of the run at `step`, then drop all but the last two."""
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, step)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    with suppress(OSError):  # a new name is on the disk only when its folder is; some systems cannot open folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
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
    """While reading the last checkpoint: `ConfigError` where it does not hold what was expected."""
    return understood(f"the checkpoint {str(_all(folder)[-1])!r}", "delete it, and the run goes on from the one before")


def random_state() -> dict[str, Any]:
    """The state of this process's random generators."""
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
    return sorted(folder.glob("checkpoint-" + "[0-9]" * 8 + ".pt"))
