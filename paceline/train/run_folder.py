"""The folder of a run: one process at a time writes it, and what was damaged in it is told."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import ConfigError, PacelineError


def is_main() -> bool:
    """Whether this process writes and speaks for all that train together."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def only_run(out: Path, name: str) -> Iterator[None]:
    """Hold the lock `name` of a run's folder, which the system drops when its holder dies; the main process alone does.

    Raises `ConfigError` at once where another process holds it, or the folder cannot be written.
    """
    if not is_main():
        yield
        return
    lock, was_there = FileLock(out / f".{name}.lock", timeout=0, thread_local=False), out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise ConfigError(
            f"another process is at work in {str(out)!r}", got=f"its lock {lock.lock_file!r} is held",
            fix="wait for it, or choose another out",
        ) from error  # fmt: skip
    except (OSError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"the run's folder {str(out)!r} cannot be written", got=getattr(error, "strerror", None) or error,
            fix="choose another out",
        ) from error  # fmt: skip
    try:
        yield
    finally:
        with suppress(OSError):
            Path(lock.lock_file).unlink()
        lock.release()
        if not was_there:
            with suppress(OSError):
                out.rmdir()  # where nothing was written into it


@contextmanager
def understood(what: str, fix: str) -> Iterator[None]:
    """Reading what a run wrote: a wrong form is one `ConfigError` with this fix, however it shows."""
    try:
        yield
    except PacelineError as error:
        if error.fix is not None:
            raise
        raise type(error)(error.what, got=error.got, expected=error.expected, fix=fix) from error
    except Exception as error:  # pickle, zip, safetensors and torch each raise their own
        told = str(error).strip().splitlines()
        raise ConfigError(
            f"{what} is damaged, or of another Paceline", got=told[0] if told else type(error).__name__, fix=fix
        ) from error
