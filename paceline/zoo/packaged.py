"""Vision-language models that travel with the package as what was trained: low-rank layers, tower, projector.

    artefacts/NAME/vlm.json             what it is made of, with the hash of every part
    artefacts/NAME/lora.safetensors     low-rank layers over the base model
    artefacts/NAME/eyes.safetensors     vision tower and projector; a sibling names another folder's
    artefacts/NAME/model/*              config.json, processor and chat template, as they go into the pulled folder

`pull` makes of it and of its base, an ordinary model of the zoo, a folder that plain transformers loads.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError

ABOUT = "vlm.json"
FORMAT = 1


@dataclass(frozen=True)
class Part:
    """A file, relative to the model's folder, and its hash."""

    file: str
    sha256: str


@dataclass(frozen=True)
class Adapter:
    """Low-rank layers: `scale` B A is added to a weight. layers: of its layers the one for each layer of the model."""

    part: Part
    scale: float
    layers: tuple[int, ...]


@dataclass(frozen=True)
class PackagedVlm:
    """One packaged model. base: a model of the zoo; layers: those of its decoder layers that are kept, in order.

    base_fingerprint: of the checkpoint it was trained on, see `checkpoint_hash`; no other is merged with it.
    adapters: added one after the other. dtype: of the pulled folder's weights. parameters: of the whole model.
    """

    name: str
    folder: Path
    description: str
    licence: str
    base: str
    base_fingerprint: str
    layers: tuple[int, ...]
    eyes: Part
    adapters: tuple[Adapter, ...]
    dtype: str
    parameters: int
    model_files: Mapping[str, str]
    sha256: str
    download_bytes: int = 0

    @property
    def source(self) -> str:
        """Where the weights come from, in words."""
        return f"{self.base} and what was trained for it in this package"

    @property
    def folder_bytes(self) -> int:
        """Of the pulled folder, about: weights, and 4 MB of tokenizer."""
        return self.parameters * (4 if self.dtype == "float32" else 2) + 4_000_000

    @property
    def needed_bytes(self) -> int:
        """Free disk space that a pull needs at its peak, the base model apart."""
        return self.folder_bytes


def read_vlm(folder: Path) -> PackagedVlm:
    """The packaged model in a folder; its weights are not opened. Raises `ConfigError` for a damaged one."""
    try:
        text = (folder / ABOUT).read_bytes()
    except OSError as error:
        raise _damaged(folder, error) from error
    return parse_vlm(folder, text)


def parse_vlm(folder: Path, text: bytes) -> PackagedVlm:
    """The packaged model that the folder is, or will be once `text` is its vlm.json. Raises `ConfigError`."""
    try:
        about: dict[str, Any] = json.loads(text)
        if about["paceline_vlm"] != FORMAT:
            raise ValueError(f"format {about['paceline_vlm']!r}")
        made = PackagedVlm(
            name=folder.name,
            folder=folder,
            description=str(about["description"]),
            licence=str(about["licence"]),
            base=str(about["base"]),
            base_fingerprint=str(about["base_fingerprint"]),
            layers=tuple(map(int, about["layers"])),
            eyes=Part(**about["eyes"]),
            adapters=tuple(
                Adapter(Part(one["file"], one["sha256"]), float(one["scale"]), tuple(map(int, one["layers"])))
                for one in about["adapters"]
            ),
            dtype=str(about["dtype"]),
            parameters=int(about["parameters"]),
            model_files={str(name): str(sha256) for name, sha256 in about["model"].items()},
            sha256=hashlib.sha256(text).hexdigest(),
        )
        _check_places(made)
        return made
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(folder, error) from error


def _check_places(made: PackagedVlm) -> None:
    """Raise ValueError for a file outside: parts lie in this folder or a sibling's, the rest in model/."""
    root = made.folder.parent.resolve()
    for part in (made.eyes, *(adapter.part for adapter in made.adapters)):
        if not (made.folder / part.file).resolve().is_relative_to(root) or not part.file.endswith(".safetensors"):
            raise ValueError(f"{part.file!r} is no safetensors file of a packaged model")
    for name in made.model_files:
        if name != Path(name).name:
            raise ValueError(f"{name!r} is no file of this folder")


def vlm_folders(artefacts: Path) -> dict[str, Path]:
    """The folder of every packaged model, by name; nothing is read."""
    return {path.parent.name: path.parent for path in sorted(artefacts.glob(f"*/{ABOUT}"))}


def packaged_vlms(artefacts: Path) -> dict[str, PackagedVlm]:
    """Every packaged model of a folder, by name. Raises `ConfigError` for a damaged one."""
    return {name: read_vlm(folder) for name, folder in vlm_folders(artefacts).items()}


def _damaged(folder: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"the packaged model {folder.name!r} is damaged", got=repr(error), expected=f"a whole {ABOUT}",
        fix="install Paceline again, or package it again",
    )  # fmt: skip
