"""Trained models from installed distributions such as `paceline-zoo`: draft heads, and models built from their files.

The entry point of a distribution in the group `paceline.models` names a module with

    FOLDER       a folder of heads, each in a folder of its own (see `methods.heads.folder`): `--drafter head:NAME`
    DEFAULTS     optional: the name of the recommended head for each target, and the drafter of `paceline demo` with it
    models()     optional: a function for each model's name that reads its `entry.ZooEntry`: `paceline pull NAME`
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from ..errors import ConfigError
from ..schema import meant
from ..system.files import exists, read_object
from .entry import ZooEntry

_LOG = logging.getLogger("paceline")
INSTALL = "`pip install paceline-zoo` brings the trained models (in a checkout: `pip install -e models`)"
_CONFIG, _RECORD, _GGUF = "config.json", "training.json", ".gguf"


def distributions() -> list[ModuleType]:
    """The modules of the installed models, as their entry points name them.

    One that cannot be imported is left out with a warning.
    """
    modules: list[ModuleType] = []
    for name in dict.fromkeys(entry.module for entry in entry_points(group="paceline.models")):
        try:
            module = import_module(name)
            assert Path(module.FOLDER)
            modules.append(module)
        except Exception as error:
            _LOG.warning("The models of %r cannot be found (%r): install it again.", name, error)
    return modules


def model_folders() -> list[Path]:
    """The folders of installed heads."""
    return list(dict.fromkeys(Path(module.FOLDER).resolve() for module in distributions()))


def packaged_models() -> dict[str, Callable[[], ZooEntry]]:
    """Every installed model other than heads, by name, with the function that reads it."""
    models: dict[str, Callable[[], ZooEntry]] = {}
    for module in reversed(distributions()):  # the first of two with one name counts
        models |= module.models() if hasattr(module, "models") else {}
    return dict(sorted(models.items()))


def _defaults() -> dict[str, str]:
    """The drafter of the demo for each recommended head."""
    return {name: drafter for module in distributions() for name, drafter in getattr(module, "DEFAULTS", {}).items()}


def _head_folders() -> dict[str, Path]:
    """The folder of every head by name; the first of two with one name counts."""
    folders: dict[str, Path] = {}
    for folder in model_folders():
        for file in sorted(folder.glob(f"*/{_CONFIG}")):
            folders.setdefault(file.parent.name, file.parent)
    return dict(sorted(folders.items()))


@dataclass(frozen=True)
class PackagedHead:
    """One head, as `paceline models` lists it.

    is_default: the recommended head for this target. demo: the value of --drafter in `paceline demo`.
    mean_acceptance_length: of the first recorded measurement; None without one. size_bytes: of the weights.
    """

    name: str
    folder: Path
    method: str
    target_name: str
    fingerprint: str
    sketch: str
    size_bytes: int
    licence: str
    is_default: bool
    demo: str
    mean_acceptance_length: float | None


def packaged_heads() -> list[PackagedHead]:
    """Every installed head, by name. Raises `ConfigError` for a damaged one."""
    defaults = _defaults()
    return [_read_head(folder, defaults.get(name)) for name, folder in _head_folders().items()]


def heads_for(fingerprint: str, sketch: str = "") -> list[PackagedHead]:
    """The installed heads for a target, the default one first. sketch: of a rounded copy of it."""
    from ..hf.fingerprint import LIKE, likeness  # with torch

    heads = packaged_heads()
    fitting = [head for head in heads if head.fingerprint == fingerprint or likeness(head.sketch, sketch) > LIKE]
    return sorted(fitting, key=lambda head: not head.is_default)


def head_folder(name_or_path: str | Path) -> Path:
    """The folder of a head; a local folder takes precedence over an installed name. Raises `ConfigError`.

    For the folder of a training run, the folder `head` or `draft` in it. A GGUF file is its own place.
    """
    path = Path(name_or_path)
    if path.suffix == _GGUF and path.is_file():
        return path
    if not exists(path / _CONFIG):
        path = next((path / name for name in ("head", "draft") if exists(path / name / _CONFIG)), path)
    if isinstance(name_or_path, Path) or exists(path / _CONFIG):
        return path
    known = _head_folders()
    if name_or_path in known:
        return known[name_or_path]
    have = "`paceline models` lists the installed ones" if known else INSTALL
    raise ConfigError(
        f"no head at {name_or_path!r}",
        got="a folder without config.json" if exists(path) else "neither a folder nor an installed head",
        expected="a folder with config.json" + (", or one of " + ", ".join(known) if known else ""),
        fix=meant(name_or_path, list(known)) or f"{have}; `paceline train` makes one",
    )


def published_head(name_or_path: str | Path) -> Path | None:
    """The folder of a head in another project's layout, such as an export; None for Paceline's own, or no head."""
    try:
        folder = head_folder(name_or_path)
        return None if "paceline_head" in read_object(folder / _CONFIG) else folder
    except ConfigError:
        return None


def _read_head(folder: Path, demo: str | None) -> PackagedHead:
    config, record = read_object(folder / _CONFIG), read_object(folder / _RECORD)
    try:
        rows = record.get("acceptance") or []
        return PackagedHead(
            folder.name,
            folder,
            str(config["method"]),
            str(config["target"]["name"]),
            str(config["target"]["fingerprint"]),
            str(config["target"].get("sketch", "")),
            (folder / "model.safetensors").stat().st_size,
            str(record.get("licence", "")),
            demo is not None,
            demo or f"head:{folder.name}",
            float(rows[0]["result"]["mean_acceptance_length"]) if rows else None,
        )
    except (KeyError, TypeError, ValueError, OSError) as error:
        message = f"the packaged head {folder.name!r} is damaged"
        raise ConfigError(message, got=repr(error), fix="install the models again") from error
