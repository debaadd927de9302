"""The manifest of a pulled folder: what it holds, byte for byte, and where it came from."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import DownloadError
from ..system.provenance import provenance, sha256_of
from .fetch import Progress, silent
from .registry import ZooEntry

MANIFEST = "paceline-manifest.json"
FORMAT = 1  # raise it when conversion writes different files, and old folders are pulled anew


@dataclass(frozen=True)
class FileRecord:
    """One file of a pulled folder."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a complete folder holds; written last, so that a folder with a manifest was once whole."""

    format: int
    name: str
    source: str
    source_sha256: str
    licence: str
    files: dict[str, FileRecord]

    def matches(self, model: ZooEntry) -> bool:
        """Whether pulling `model` today would make this very folder."""
        return (self.format, self.name, self.source_sha256) == (FORMAT, model.name, model.sha256)


def write_manifest(folder: Path, model: ZooEntry, progress: Progress = silent) -> None:
    """Hash every file of `folder` and write its manifest, with the provenance of the conversion."""
    paths = sorted(path for path in folder.iterdir() if path.name != MANIFEST)
    files: dict[str, FileRecord] = {}
    for done, path in enumerate(paths, start=1):
        files[path.name] = FileRecord(path.stat().st_size, sha256_of(path))
        progress("hash", done, len(paths))
    manifest = Manifest(FORMAT, model.name, model.source, model.sha256, model.licence, files)
    text = json.dumps(asdict(manifest) | {"provenance": provenance()}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def verify(folder: Path | str, *, hashes: bool = False) -> Manifest:
    """Check a pulled folder against its manifest and return it: sizes always, contents (slower) with `hashes`.

    Raises DownloadError at the first file that is missing or differs, or when there is no readable manifest.
    """
    folder = Path(folder)
    manifest = _read(folder)
    for name, record in manifest.files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != record.bytes:
            got = "no such file" if size is None else f"{size:,} bytes"
            raise _damaged(folder, f"{name}: {got}", f"{record.bytes:,} bytes")
        if hashes and (got := sha256_of(path)) != record.sha256:
            raise _damaged(folder, f"{name}: sha256 {got}", record.sha256)
    return manifest


def _read(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        files = {name: FileRecord(int(r["bytes"]), str(r["sha256"])) for name, r in data["files"].items()}
        return Manifest(
            format=int(data["format"]),
            name=str(data["name"]),
            source=str(data["source"]),
            source_sha256=str(data["source_sha256"]),
            licence=str(data["licence"]),
            files=files,
        )
    except OSError as error:
        raise _damaged(folder, f"no {MANIFEST}", "the manifest that a finished pull writes") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(folder, f"an unreadable {MANIFEST}", "the manifest that a finished pull writes") from error


def _damaged(folder: Path, got: str, expected: str) -> DownloadError:
    what = f"the model folder {folder} is not as it was pulled"
    return DownloadError(what, got=got, expected=expected, fix="pull it again with force (`paceline pull --force`)")
