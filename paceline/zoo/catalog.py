"""What the user may name and what is there: zoo names to folders, and the list of the models pulled so far."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..system.files import exists
from .fetch import Progress, silent
from .pull import DEFAULT_STEPS, PullSteps, models_dir, problem_of, pull
from .registry import ZOO, ZooEntry, lookup, nearest


@dataclass(frozen=True)
class Installed:
    """One line of `paceline models`."""

    name: str
    description: str
    licence: str
    pulled: bool  # whole and of the version this Paceline knows
    size_bytes: int  # on disk; 0 when absent
    folder: Path  # where it is, or would be
    problem: str | None  # why a folder that exists does not count as pulled


def resolve(
    name_or_path: str | Path,
    cache_dir: Path | str | None = None,
    progress: Progress = silent,
    *,
    registry: Mapping[str, ZooEntry] = ZOO,
    steps: PullSteps = DEFAULT_STEPS,
) -> str:
    """Turn a zoo name into its folder, pulling it when absent; a local model folder or a hub id comes back unchanged.

    A local folder wins over a zoo name, as it does over a hub id in transformers. Raises as `pull` does, and
    ConfigError for a misspelt zoo name, which would otherwise fail later as an unknown hub id.
    """
    name = str(name_or_path)
    if isinstance(name_or_path, Path) or exists(Path(name) / "config.json"):
        return name
    if name in registry:
        return str(pull(name, cache_dir, progress, registry=registry, steps=steps))
    is_bare = not any(mark in name for mark in "/\\") and not exists(Path(name))
    if is_bare and nearest(name, registry, cutoff=0.8) is not None:
        lookup(name, registry)  # raises, with the name that was meant
    return name


def installed(cache_dir: Path | str | None = None, *, registry: Mapping[str, ZooEntry] = ZOO) -> list[Installed]:
    """Every model of the zoo, pulled or not, with its size on disk in bytes; reads sizes, not contents."""
    rows: list[Installed] = []
    for model in registry.values():
        folder = models_dir(cache_dir) / model.name
        problem = problem_of(folder, model)
        files = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
        size = sum(path.stat().st_size for path in files)
        told = problem if folder.exists() else None
        rows.append(Installed(model.name, model.description, model.licence, problem is None, size, folder, told))
    return rows
