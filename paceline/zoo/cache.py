"""Models of the zoo in the user's cache: each is pulled atomically, and once for processes that pull it together."""

import difflib
import errno
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..errors import ConfigError, DownloadError, PacelineError
from ..schema import checked, validate
from ..system.files import Progress, exists, folder_bytes, silent, to_json, unlock, write_text
from ..system.provenance import provenance, sha256_of
from . import registry
from .entry import ZooEntry

MANIFEST = "paceline-manifest.json"
FORMAT = 1  # increase it when the conversion changes, so that old folders are pulled again


@checked
class FileRecord:
    """One file of a pulled folder."""

    bytes: int
    sha256: str


@checked
class Manifest:
    """The files of a complete folder, and their source; written last, so that a folder with one was complete once."""

    format: int
    name: str
    source: str
    source_sha256: str
    licence: str
    files: Mapping[str, FileRecord]
    provenance: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True)
class Installed:
    """One line of `paceline models`.

    pulled: it is complete, and of the expected version. size_bytes: on disk; 0 when absent. folder: where it is, or
    would be. problem: why an existing folder does not count as pulled.
    """

    name: str
    description: str
    licence: str
    pulled: bool
    size_bytes: int
    folder: Path
    problem: str | None


def models_dir(cache_dir: Path | str | None = None) -> Path:
    """The folder of pulled models: under `cache_dir`, else under $PACELINE_CACHE, else in the user's cache."""
    import platformdirs

    root = cache_dir or os.environ.get("PACELINE_CACHE") or platformdirs.user_cache_dir("paceline")
    return Path(root).expanduser().absolute() / "models"


def resolve(name_or_path: str | Path, cache_dir: Path | str | None = None, progress: Progress = silent) -> str:
    """The folder of a zoo name, pulled if absent; a local folder, which takes precedence, or a hub id unchanged.

    Raises as `pull` does, and ConfigError for a misspelt zoo name, which would fail later as an unknown hub id.
    """
    name = str(name_or_path)
    if isinstance(name_or_path, Path) or exists(Path(name) / "config.json"):
        return name
    if name in registry.ZOO:
        return str(pull(name, cache_dir, progress))
    is_bare = not any(mark in name for mark in "/\\") and not exists(Path(name))
    if is_bare and difflib.get_close_matches(name.lower(), list(registry.ZOO), cutoff=0.8):
        registry.lookup(name)  # raises, with the name that was meant
    return name


def installed(cache_dir: Path | str | None = None) -> list[Installed]:
    """Every model of the zoo, pulled or not, with its size on disk in bytes; reads sizes, not contents."""
    rows: list[Installed] = []
    for model in registry.ZOO.values():
        folder = models_dir(cache_dir) / model.name
        problem = _problem_of(folder, model)
        size, shown = folder_bytes(folder), problem if folder.exists() else None
        rows.append(Installed(model.name, model.description, model.licence, problem is None, size, folder, shown))
    return rows


def pull(name: str, cache_dir: Path | str | None = None, progress: Progress = silent, force: bool = False) -> Path:
    """Fetch, verify and convert a zoo model, unless it is in the cache, and return its Hugging Face folder.

    The base of a packaged model is pulled first. A damaged or outdated folder is replaced; `force` replaces a good one.
    Raises ConfigError for an unknown name, DownloadError when the model could not be fetched: then nothing half-written
    remains, and an earlier copy is kept.

    `progress(stage, done, total)` counts bytes when it downloads and extracts, tensors when it converts, files when it
    hashes; stage `wait` means that another process is pulling the same model.
    """
    model = registry.lookup(name)
    folder = models_dir(cache_dir) / model.name
    if not force and _problem_of(folder, model) is None:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        base = None if model.base is None else pull(model.base, cache_dir, progress)
        with _locked(folder, progress):
            if force or _problem_of(folder, model) is not None:  # else another process pulled it while we waited
                _replace(folder, model, base, progress)
    except (OSError, SafetensorError) as error:
        raise DownloadError(
            f"{model.name} could not be written to {folder.parent}",
            got=error,
            expected=f"a folder that can be written, with {model.needed_bytes:,} bytes free",
            fix="choose another with --cache-dir or PACELINE_CACHE; nothing half-written was left",
        ) from error
    return folder


def _replace(folder: Path, model: ZooEntry, base: Path | None, progress: Progress) -> None:
    """Build the model beside `folder` and put it there; the caller holds the lock."""
    if folder.exists() and not (folder / MANIFEST).is_file():
        message = "the cache folder of this model exists, and Paceline did not write it"
        raise ConfigError(message, got=folder, fix="move it away, or choose another --cache-dir")
    # We hold the lock, so the processes that wrote these are dead.
    for leftover in folder.parent.glob(f".{model.name}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < model.needed_bytes:  # now, rather than minutes into the download
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {free:,} bytes free")
    work = folder.parent / f".{model.name}.partial-{uuid.uuid4().hex[:8]}"
    try:
        _build(model, base, work, progress)
        # A reader sees the old folder, briefly none, then the new one, never a mixture.
        if folder.exists():
            folder.rename(work / "replaced")
        (work / "model").rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def verify(folder: Path | str, *, hashes: bool = False) -> Manifest:
    """Check a pulled folder against its manifest and return it: sizes always, contents (slower) with `hashes`.

    Raises DownloadError at the first file that is missing or differs, or when there is no readable manifest.
    """
    folder = Path(folder)
    try:
        manifest = validate(Manifest, json.loads((folder / MANIFEST).read_bytes()), MANIFEST)
    except (OSError, ValueError) as error:
        got = f"no {MANIFEST}" if isinstance(error, OSError) else f"an unreadable {MANIFEST}"
        raise _damaged(folder, got, "the manifest that a finished pull writes") from error
    for name, record in manifest.files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != record.bytes:
            got = "no such file" if size is None else f"{size:,} bytes"
            raise _damaged(folder, f"{name}: {got}", f"{record.bytes:,} bytes")
        if hashes and (got := sha256_of(path)) != record.sha256:
            raise _damaged(folder, f"{name}: sha256 {got}", record.sha256)
    return manifest


def _damaged(folder: Path, got: str, expected: str) -> DownloadError:
    message = f"the model folder {folder} is not as it was pulled"
    return DownloadError(message, got=got, expected=expected, fix="pull it again with force (`paceline pull --force`)")


def _problem_of(folder: Path, model: ZooEntry) -> str | None:
    """Why `folder` is not a complete and current copy of `model`; None when it is."""
    try:
        manifest = verify(folder)
    except PacelineError as error:
        return str(error)
    is_current = (manifest.format, manifest.name, manifest.source_sha256) == (FORMAT, model.name, model.sha256)
    return None if is_current else "it was pulled by another version of Paceline; pull it again"


def _locked(folder: Path, progress: Progress) -> AbstractContextManager[Any]:
    """Hold the model's lock, which the system releases when its holder dies."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        progress("wait", 0, None)
        return lock.acquire()


def _build(model: ZooEntry, base: Path | None, work: Path, progress: Progress) -> None:
    """Make the finished folder `work/model`; everything else in `work` is deleted afterwards."""
    built = work / "model"
    built.mkdir(parents=True)
    model.build(base, built, progress)
    unlock(built)
    paths, files = sorted(built.iterdir()), dict[str, FileRecord]()
    for done, path in enumerate(paths, start=1):
        files[path.name] = FileRecord(path.stat().st_size, sha256_of(path))
        progress("hash", done, len(paths))
    manifest = Manifest(FORMAT, model.name, model.source, model.sha256, model.licence, files, provenance())
    write_text(built / MANIFEST, to_json(manifest, indent=2) + "\n")
