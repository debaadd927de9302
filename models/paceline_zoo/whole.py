"""Models kept whole: `build` copies their folder.

NAME/model.json     what it is, with the hash of every file
NAME/model/*        config, weights and tokenizer, as transformers reads them
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from paceline.errors import ConfigError
from paceline.schema import checked, validate
from paceline.system.files import Progress, silent
from paceline.system.provenance import sha256_of
from paceline.zoo.entry import ZooEntry

ABOUT = "model.json"


@checked
class PackagedModel(ZooEntry):
    """One model, as model.json describes it, with its name, its folder and the hash of model.json.

    files: names and hashes of the folder `model`.
    """

    name: str
    folder: Path
    sha256: str
    paceline_model: Literal[1]
    description: str
    licence: str
    parameters: int
    files: Mapping[str, str]
    base: str | None = None
    download_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuse a file elsewhere."""
        for name in self.files:
            if name != Path(name).name:
                raise ConfigError(f"{name!r} is no file of this folder")

    @property
    def source(self) -> str:
        """The place the weights come from, in words."""
        return "this package"

    @property
    def needed_bytes(self) -> int:
        """Free disk space that a pull needs: bfloat16 weights, and 4 MB of tokenizer."""
        return self.parameters * 2 + 4_000_000

    def build(self, base: Path | None, folder: Path, progress: Progress = silent) -> None:
        """Copy the files into the empty `folder`. Raises `ConfigError` for one that is not as it was packaged."""
        for done, (name, expected) in enumerate(self.files.items(), start=1):
            path = self.folder / "model" / name
            got = sha256_of(path) if path.is_file() else "no such file"
            if got != expected:
                message = f"{self.name}: model/{name} is not the one that was packaged"
                raise ConfigError(message, got=got, expected=expected, fix="install the models again")
            shutil.copyfile(path, folder / name)
            progress("convert", done, len(self.files))


def read_model(folder: Path) -> PackagedModel:
    """The packaged model in a folder; its weights are not opened. Raises `ConfigError` for a damaged one."""
    about = folder / ABOUT
    try:
        text = about.read_bytes()
        place = {"name": folder.name, "folder": str(folder), "sha256": hashlib.sha256(text).hexdigest()}
        return validate(PackagedModel, {**json.loads(text), **place}, str(about))
    except (ConfigError, OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"the packaged model {folder.name!r} is damaged", got=str(error), expected=f"a whole {ABOUT}",
            fix="install the models again, or package it again",
        ) from error  # fmt: skip
