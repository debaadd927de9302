"""Loads the kernels' library: prebuilt, from the cache, or compiled now, by one process for all that wait for it."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from .compiler import (
    ISAS,
    LIBRARY,
    SOURCES,
    CompileError,
    Compiler,
    compile_cpu,
    compile_library,
    find_compiler,
    source_hash,
)

_LOG = logging.getLogger("paceline")
_REASON = "reason.txt"
_LOCK = threading.Lock()


@dataclass(frozen=True)
class Loaded:
    """The kernels, or in one line the reason why there are none and torch is used.

    isas: the instruction sets that were built and that this CPU has, the lowest first.
    isa: the one in use.
    untried: those that would come after it, but never ran on a processor that has them: only $PACELINE_ISA takes them.
    """

    library: ctypes.CDLL | None
    reason: str
    isas: tuple[str, ...] = ()
    isa: str | None = None
    untried: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.library:
            return f"torch: {self.reason}"
        others = (
            f"; {name}: present, not used: never ran on hardware; PACELINE_ISA={name} tries it" for name in self.untried
        )
        return f"native, {self.isa} ({self.reason}){''.join(others)}"


def load() -> Loaded:
    """The kernels of this process. The first call may compile them, which takes a minute or so.

    $PACELINE_ISA forces an instruction set, or torch with "none". Raises `ConfigError` for an unavailable one. Other
    errors do not raise; they become the `reason`.
    """
    with _LOCK:
        return _load()


def open_kernels(sources: Path = SOURCES) -> Loaded:
    """As `load`, from a folder of sources, and without caching the result."""
    asked = os.environ.get("PACELINE_ISA", "")
    if asked == "none":
        return Loaded(None, "PACELINE_ISA is none")
    if asked:
        _check(asked, tuple(ISAS), "unknown instruction set")
    digest = source_hash(sources)
    library, reason = _prebuilt(sources / LIBRARY, digest), "prebuilt"
    if library is None:
        try:
            library, reason = _built(sources, digest)
        except (CompileError, OSError) as error:
            return Loaded(None, " ".join(str(error).split()))
    has = {isa: library.paceline_has(isa.encode()) for isa in ISAS}
    isas = tuple(isa for isa in ISAS if has[isa])
    if asked:
        _check(asked, isas, f"this CPU or this library ({reason}) lacks the instruction set")
    if not library.paceline_select(asked.encode()):
        _check(asked, tuple(isa for isa in isas if isa != asked), "the system does not let this process use it")
    library.paceline_isa.restype = ctypes.c_char_p
    isa = asked or library.paceline_isa().decode()
    later = tuple(ISAS)[tuple(ISAS).index(isa) + 1 :]
    return Loaded(library, reason, isas, isa, tuple(other for other in later if has[other] == 2))


_load = functools.cache(open_kernels)


def _check(asked: str, known: tuple[str, ...], message: str) -> None:
    if asked not in known:
        expected, fix = f"none or one of {', '.join(known)}", "unset PACELINE_ISA to use the best one"
        raise ConfigError(f"PACELINE_ISA: {message}", got=asked, expected=expected, fix=fix)


def _prebuilt(path: Path, digest: str) -> ctypes.CDLL | None:
    """The library of a wheel, if it was compiled from these sources and this system can load it."""
    try:
        library = ctypes.CDLL(str(path))
        library.paceline_source_hash.restype = ctypes.c_char_p
        return library if library.paceline_source_hash() == digest.encode() else None
    except (OSError, AttributeError):
        return None


def _built(sources: Path, digest: str) -> tuple[ctypes.CDLL, str]:
    """The library from the cache, compiled if it is missing, and a description of how it was made.

    It has the instruction sets that this CPU has, which takes a fraction of the time of all. If the cache cannot be
    written, it is compiled for this process only. Raises `CompileError` and OSError.
    """
    compiler = find_compiler()
    made_by = (digest, compiler.identity, sys.platform, platform.machine(), platform.libc_ver())
    cpu, _ = _made(made_by, lambda out: compile_cpu(out, compiler, sources))
    isas = tuple(isa for isa in ISAS if cpu.paceline_cpu_has(isa.encode()))
    return _made((*made_by, isas), lambda out: _compile(out, compiler, sources, isas))


def _made(made_by: tuple[object, ...], compile_to: Callable[[Path], str | None]) -> tuple[ctypes.CDLL, str]:
    """A library of the cache, and what `compile_to` returned when it wrote it, now or earlier."""
    from filelock import FileLock

    folder = cache_folder("kernels") / hashlib.sha256(repr(made_by).encode()).hexdigest()[:32]
    if not (folder / LIBRARY).is_file():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / ".lock"):
                if not (folder / LIBRARY).is_file():  # else another process compiled it meanwhile
                    _make(folder, compile_to)
        except (OSError, NotImplementedError):  # the latter: a file system without locks
            with tempfile.TemporaryDirectory(prefix="paceline-") as own:  # a loaded library does not need its file
                _make(Path(own), compile_to)
                library, reason = _open(Path(own))
            return library, f"{reason}, for this process only, since {folder.parent} cannot be written"
    return _open(folder)


def _open(folder: Path) -> tuple[ctypes.CDLL, str]:
    return ctypes.CDLL(str(folder / LIBRARY)), (folder / _REASON).read_text(encoding="utf-8")


def cache_folder(name: str) -> Path:
    """A folder of the cache, under $PACELINE_CACHE or in the user's cache."""
    import platformdirs

    root = os.environ.get("PACELINE_CACHE") or platformdirs.user_cache_path("paceline")
    return Path(root).expanduser().absolute() / name


def _make(folder: Path, compile_to: Callable[[Path], str | None]) -> None:
    """Put the library into `folder`, whole or not at all. The caller holds the folder's lock."""
    for leftover in folder.glob(".partial-*"):  # from a killed process, since we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder))
    try:
        (work / _REASON).write_text(compile_to(work / LIBRARY) or "", encoding="utf-8")
        with (work / LIBRARY).open("rb+") as file:
            os.fsync(file.fileno())  # a library that a crash truncated would load, and then crash this process
        for name in (_REASON, LIBRARY):
            (work / name).replace(folder / name)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _compile(out: Path, compiler: Compiler, sources: Path, isas: tuple[str, ...]) -> str:
    """Compile the kernels to `out`; what they were compiled with."""
    message = "Compiling paceline's kernels (once, a minute or so) ..."
    _LOG.info(message)
    if sys.stderr is not None and sys.stderr.isatty():
        print(message, file=sys.stderr)
    missing = compile_library(out, compiler, sources, isas=isas)
    for isa, error in missing.items():
        _LOG.info("No %s kernels: %s", isa, error)
    without = f", which cannot compile {', '.join(missing)}" if missing else ""
    return f"compiled with {compiler.name}{without}"
