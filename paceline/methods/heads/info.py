"""What the folder of a trained head or draft model says of it, without its weights (see `folder`)."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from ...errors import ConfigError
from ...schema import checked, meant, validate
from ...system.files import exists, read_object
from ...target.loaded import LoadedModel
from ...zoo.packaged import head_folder
from ..method import named
from ..table import rows
from .parts import Count, Vocabulary, Width

FORMAT = 1
CONFIG, WEIGHTS, CARD, RECORD = "config.json", "model.safetensors", "README.md", "training.json"
DRAFT_MODEL = "draft_model"
"""The method of a draft model in its training.json."""
SIZES = ("hidden_size", "num_layers", "vocab_size")

Head: TypeAlias = nn.Module
"""A module of the class that the table names; it has its `config`, a frozen dataclass that names the `method`."""


def head_class(method: str) -> Any:
    """The class of a method's heads, whose `Config` is the class of the configuration. Raises `ConfigError`."""
    known = {row.name: row.head for row in rows() if row.head}
    if method not in known:
        expected, fix = "one of " + ", ".join(known), meant(str(method), list(known))
        raise ConfigError("unknown method of a head", got=repr(method), expected=expected, fix=fix)
    return named(known[method])


def method_of(head: Head) -> str:
    """The method a module is for. Raises `ConfigError` for a module of no known class."""
    method: Any = getattr(getattr(head, "config", None), "method", None)
    if not isinstance(method, str) or type(head) is not head_class(method):
        expected = "a head of " + ", ".join(row.title for row in rows() if row.head)
        raise ConfigError("this module is no head that can be saved", got=type(head).__name__, expected=expected)
    return method


@checked
class HeadTarget:
    """The target that a head, or a draft model, was trained for. sketch: see `hf.fingerprint`; old heads have none."""

    name: str
    fingerprint: str
    hidden_size: Width
    num_layers: Count
    vocab_size: Vocabulary
    sketch: str = ""

    @classmethod
    def of(cls, target: LoadedModel) -> "HeadTarget":
        return cls(target.name, target.fingerprint, *(getattr(target, size) for size in SIZES), sketch=target.sketch)


@checked
class HeadFile:
    """config.json of a head; `head` holds the fields of its module's configuration."""

    paceline_head: int
    method: str
    target: HeadTarget
    head: dict[str, Any]


@dataclass(frozen=True)
class HeadInfo:
    """What a head or a draft model is: its method, its target, and its module's configuration (None of a model)."""

    folder: Path
    method: str
    target: HeadTarget
    config: Any


def head_info(folder: str | os.PathLike[str]) -> HeadInfo:
    """Read config.json of a folder or a packaged head. Raises `ConfigError` for what is no head of this format."""
    place = place_of(folder)
    entries = read_config(place)
    if entries.get("paceline_head") != FORMAT:
        got, expected = f'"paceline_head": {entries.get("paceline_head")!r}', f'"paceline_head": {FORMAT}'
        raise ConfigError(f"{str(place)!r} holds no head that this Paceline reads", got=got, expected=expected)
    file = validate(HeadFile, entries, str(place / CONFIG))
    config: Any = validate(head_class(file.method).Config, file.head, f'"head" of method {file.method!r}')
    if config.method != file.method:
        raise ConfigError("the sizes of this head are those of another method", got=config.method, expected=file.method)
    return HeadInfo(place, file.method, file.target, config)


def trained_info(folder: str | os.PathLike[str]) -> HeadInfo:
    """As `head_info`, but also of a draft model, whose training.json names the target."""
    place = place_of(folder)
    record = _read_object(place / RECORD) if (place / RECORD).is_file() else {}
    if record.get("method") != DRAFT_MODEL:
        return head_info(folder)
    target = validate(HeadTarget, record.get("target"), f'"target" of {place / RECORD}')
    return HeadInfo(place, DRAFT_MODEL, target, None)


def read_record(folder: str | os.PathLike[str]) -> dict[str, object]:
    """Read training.json of a folder or a packaged head. Raises `ConfigError` where it is missing or broken."""
    return _read_object(place_of(folder) / RECORD)


def read_config(place: Path) -> Mapping[str, object]:
    """The object in config.json of a folder, whatever its format. Raises `ConfigError`."""
    return _read_object(place / CONFIG)


def place_of(folder: str | os.PathLike[str]) -> Path:
    """The folder of a head by its path or packaged name."""
    return head_folder(folder if isinstance(folder, str) else Path(folder))


def _read_object(path: Path) -> dict[str, object]:
    if not exists(path):
        raise ConfigError(
            f"no head at {str(path.parent)!r}",
            got=f"no {path.name}",
            expected=f"a folder with {CONFIG}, {WEIGHTS}, {CARD} and {RECORD}, or a name that `paceline models` lists",
        )
    return read_object(path)
