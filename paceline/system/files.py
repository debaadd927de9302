"""Files that users name: read up to a size limit, written atomically, replaced only if the same command wrote them."""

import errno
import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_jsonable_python

from ..errors import ConfigError

Progress = Callable[[str, int, int | None], None]
"""progress(stage, done, total): stage is wait, download, extract, convert or hash; total is None when unknown."""


def silent(stage: str, done: int, total: int | None) -> None:
    """Ignore the progress."""


MAX_BYTES = 1 << 30
"""The largest file that is read; more is a mistake, such as an endless device."""
_KERNEL = 1 << 20  # bytes to read of a file with size 0, as files of the kernel have
_FULL = 1 << 16  # bytes that are left on a full disk, at most
_HEAD = 1 << 16  # characters, enough to see which command wrote a file


def exists(path: Path) -> bool:
    """Whether there is such a file or folder; False also for an impossible name."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def read_bytes(path: Path | str, subject: str = "the file", max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a regular file. Raises `ConfigError`, also for pipes and devices, which may never end."""
    place = Path(path)
    try:
        if place.exists() and not place.is_file():
            raise ConfigError(f"{subject} {str(path)!r} is not a regular file", fix="copy its content to a file")
        with place.open("rb") as file:
            content = file.read(min(place.stat().st_size or _KERNEL, max_bytes) + 1)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        got = getattr(error, "strerror", None) or error
        raise ConfigError(f"{subject} {str(path)!r} cannot be read", got=got) from error
    if len(content) > max_bytes:
        raise ConfigError(f"{subject} {str(path)!r} is too large", expected=f"at most {max_bytes:,} bytes")
    return content


def read_text(path: Path | str, subject: str = "the file", max_bytes: int = MAX_BYTES) -> str:
    """The UTF-8 text of a regular file, without a byte order mark. Raises `ConfigError`."""
    return as_text(read_bytes(path, subject, max_bytes), f"{subject} {str(path)!r}")


def read_stdin(subject: str, max_bytes: int = MAX_BYTES) -> str:
    """The UTF-8 text of the standard input. Raises `ConfigError`."""
    if sys.stdin is None:  # closed by the parent process
        raise ConfigError(f"{subject} cannot be read", got="no standard input")
    content = sys.stdin.buffer.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ConfigError(f"{subject} is too large", expected=f"at most {max_bytes:,} bytes")
    return as_text(content, subject)


def as_text(content: bytes, name: str) -> str:
    """UTF-8 as text, without a byte order mark, with line feeds at the ends of lines. Raises `ConfigError`."""
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not text", got=error, expected="UTF-8") from error


def parse_json(text: str | bytes, subject: str) -> Any:
    """The value of a JSON text. Raises `ConfigError`, also for nesting below 200 levels and for lone surrogates."""
    try:
        return from_json(text, allow_inf_nan=True)
    except (ValueError, TypeError) as error:  # TypeError: text that is no UTF-8
        raise ConfigError(f"{subject} is not valid JSON", got=error) from error


def read_json(path: Path | str, subject: str = "the file") -> Any:
    """The value in a JSON file. Raises `ConfigError`."""
    return parse_json(read_text(path, subject), f"{subject} {str(path)!r}")


def read_object(path: Path | str, fix: str | None = None) -> dict[str, Any]:
    """The object in a JSON file. Raises `ConfigError`, also for a key that has two values."""
    text = read_text(path)
    value = parse_json(text, f"the file {str(path)!r}")
    if not isinstance(value, dict):
        raise ConfigError(f"{str(path)!r} is not a JSON object", got=type(value).__name__, fix=fix)
    try:
        json.loads(text, object_pairs_hook=_single)  # what it nests is limited by now
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} contradicts itself", got=error, expected="each key once", fix=fix) from error
    return value


def _single(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values and values[key] != value:
            raise ValueError(f"the key {key!r} with two values")
        values[key] = value
    return values


def read_kind(path: Path | str, kind: str, version: int, fix: str) -> dict[str, Any]:
    """The object in a JSON file whose "kind" and "version" are these. Raises `ConfigError`, with `fix`."""
    content = read_json(path)
    if not isinstance(content, dict) or content.get("kind") != kind:
        raise ConfigError(f"{str(path)!r} is not a file of the kind {kind}", fix=fix)
    if content.get("version") != version:
        raise ConfigError(f"{str(path)!r} is of another version", got=content.get("version"), expected=version, fix=fix)
    return content


def to_json(value: object, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """The JSON text of a value, also of dataclasses and paths; NaN and infinities are null, since JSON has neither."""
    return json.dumps(to_jsonable_python(value, inf_nan_mode="null"), ensure_ascii=ensure_ascii, indent=indent)


def check_folder(path: Path | str) -> None:
    """Raise `ConfigError` where nothing could be written into this folder, which may be made first."""
    there = Path(os.path.realpath(path))
    while not exists(there):  # these will be made
        there = there.parent
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        got = "no permission for" if there.is_dir() else "a file in the place of"
        got, fix = f"{got} the folder {str(there)!r}", "name another folder"
        raise ConfigError(f"the folder {str(path)!r} cannot be written", got=got, fix=fix)


def check_out(path: Path | str, sign: str | None = None) -> None:
    """Raise `ConfigError` where `write_text` could not write; call it before long work.

    sign: a text near the beginning of all files of this command, which may be replaced; None: no file may be replaced.
    """
    place, fix = Path(os.path.realpath(path)), "name another file"
    if exists(place) and not place.is_file():
        got = "a folder" if place.is_dir() else "no regular file"
        raise ConfigError(f"{str(path)!r} cannot be replaced", got=got, expected="a file or a new name", fix=fix)
    check_folder(place.parent)
    if not exists(place):
        return
    with place.open("rb") as file:
        head = file.read(_HEAD).decode("utf-8", errors="replace")
    if head and (sign is None or sign not in head):
        raise ConfigError(f"{str(path)!r} exists, and this command did not write it", fix=f"{fix}, or remove the file")


@contextmanager
def claimed(path: Path | str, fix: str = "give another --out, or wait for it") -> Iterator[None]:
    """Lock this file or folder against other runs. Raises `ConfigError` where another run holds it."""
    from filelock import FileLock, Timeout

    place = Path(os.path.realpath(path))
    check_folder(place.parent)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(place.with_name(f".{place.name}.lock"))
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"another run is writing to {str(path)!r}", fix=fix) from None
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written", got=error.strerror, fix=fix) from error
    try:
        yield
    finally:
        with suppress(OSError):
            Path(lock.lock_file).unlink()
        lock.release()


def check_new(place: Path) -> None:
    """Raise `ConfigError` where there is something already, or no folder can be made; an empty one may be there."""
    check_folder(place.parent)
    if exists(place) and (not place.is_dir() or any(place.iterdir())):
        got, fix = "a folder" if place.is_dir() else "a file", "name another, or remove it"
        raise ConfigError(f"{str(place)!r} exists already", got=got, expected="a new folder", fix=fix)


@contextmanager
def _full_disk_named(place: Path) -> Iterator[None]:
    """While writing `place`: for a full disk libraries have errors of their own, and the system's names no file."""
    try:
        yield
    except Exception as error:
        full = os.strerror(errno.ENOSPC)
        if full in str(error) or shutil.disk_usage(place.parent).free < _FULL:
            raise OSError(errno.ENOSPC, full, str(place)) from error
        raise


@contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `place` at the end, or removed after an error.

    Raises `ConfigError` where `place` exists already.
    """
    check_new(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    folder = place.with_name(f".{place.name}-{uuid.uuid4().hex[:8]}")
    folder.mkdir()
    try:
        with _full_disk_named(place):
            yield folder
        unlock(folder)
        folder.rename(place)  # fails where something non-empty was made meanwhile
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def folder_bytes(folder: Path) -> int:
    """The bytes of its files, 0 for a missing folder."""
    return sum(path.stat().st_size for path in folder.glob("*") if path.is_file())


def unlock(folder: Path) -> None:
    """Give the files of a folder the default mode: safetensors makes its files readable by the owner only."""
    (probe := folder / ".mode").touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(mode)


@contextmanager
def replacing(path: Path | str, syncs: bool = True) -> Iterator[Path]:
    """A temporary file to write, which then replaces `path` atomically.

    A symlink is kept, and its target is replaced. Raises OSError; the half-written file is removed.
    syncs: wait for the disk; otherwise a power cut may leave half of it.
    """
    place = Path(os.path.realpath(path))
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        with _full_disk_named(place):
            yield part
        if syncs:
            with part.open("r+b") as file:
                os.fsync(file.fileno())
        part.replace(place)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    if not syncs:
        return
    with suppress(OSError):  # a new name is on the disk only when its folder is; some systems cannot open folders
        handle = os.open(place.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_bytes(path: Path | str, content: bytes) -> None:
    """Write a file atomically, see `replacing`."""
    with replacing(path) as part:
        part.write_bytes(content)


def write_text(path: Path | str, text: str) -> None:
    """`write_bytes` of UTF-8 text."""
    write_bytes(path, text.encode("utf-8"))
