"""Trained models that are installed beside Paceline: draft heads and small vision-language models. Reads JSON only.

They come in distributions of their own, such as `paceline-zoo`, which name their folder under the entry point group
`paceline.models`. In that folder, each model has a folder of its own:

    NAME/config.json            a head, which `--drafter head:NAME` names (see `heads.folder`)
    NAME/vlm.json               a vision-language model: what it is made of, with the hash of every part
    NAME/lora.safetensors       its low-rank layers over the base model
    NAME/eyes.safetensors       its vision tower and projector; another model may share them
    NAME/model/*                config.json, processor and chat template, as they go into the pulled folder

`pull` makes a folder that plain transformers loads from such a model and its base, an ordinary model of the zoo.
"""

import difflib
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, cast

from ..errors import ConfigError
from ..schema import Many, checked, validate
from ..system.files import exists, read_json

_LOG = logging.getLogger("paceline")
INSTALL = "`pip install paceline-zoo` brings the trained models"
ABOUT = "vlm.json"
FORMAT = 1
_CONFIG, _RECORD = "config.json", "training.json"
_CHECKOUT = Path(__file__).parents[2] / "models" / "paceline_zoo"


def model_folders() -> list[Path]:
    """Folders of installed models: the source checkout's own first, then those of the entry points.

    A distribution whose entry point cannot be loaded is left out with a warning: the other models can still be used.
    """
    folders = [_CHECKOUT] if _CHECKOUT.is_dir() else []
    for entry in entry_points(group="paceline.models"):
        try:
            folders.append(Path(entry.load()))
        except Exception as error:
            _LOG.warning("The models of %r cannot be found (%r): install it again.", entry.name, error)
    return list(dict.fromkeys(folder.resolve() for folder in folders))


def _named(marker: str) -> dict[str, Path]:
    """The folder of every model that holds the file `marker`, by name; the first of two with one name counts."""
    found: dict[str, Path] = {}
    for folder in model_folders():
        for file in sorted(folder.glob(f"*/{marker}")):
            found.setdefault(file.parent.name, file.parent)
    return dict(sorted(found.items()))


# ------------------------------------------------------------------------------------------------------------- heads


@dataclass(frozen=True)
class PackagedHead:
    """One head, as `paceline models` lists it.

    is_default: it is the one to use for this target. demo: the drafter that `paceline demo` uses, as the command line
    names it. mean_acceptance_length: the first one recorded; None where none was. size_bytes: of the weights.
    """

    name: str
    folder: Path
    method: str
    target_name: str
    fingerprint: str
    size_bytes: int
    licence: str
    is_default: bool
    demo: str
    mean_acceptance_length: float | None


def packaged_heads() -> list[PackagedHead]:
    """Every installed head, by name. Raises `ConfigError` for a damaged one."""
    return [_read_head(folder) for folder in _named(_CONFIG).values()]


def best_head(fingerprint: str) -> PackagedHead | None:
    """The default head for the target of this fingerprint, None where there is none."""
    heads = packaged_heads()
    return next((head for head in heads if head.fingerprint == fingerprint and head.is_default), None)


def head_folder(name_or_path: str | Path) -> Path:
    """The folder of a head; a local folder wins over an installed name. Raises `ConfigError` that lists the names."""
    path = Path(name_or_path)
    if isinstance(name_or_path, Path) or exists(path / _CONFIG):
        return path
    known = _named(_CONFIG)
    if name_or_path in known:
        return known[name_or_path]
    close = difflib.get_close_matches(name_or_path.lower(), list(known), n=1, cutoff=0.5)
    if close:
        fix = f"did you mean {close[0]!r}?"
    elif known:
        fix = "`paceline models` lists the installed ones; `paceline train` makes one"
    else:
        fix = f"{INSTALL}; `paceline train` makes one"
    raise ConfigError(
        f"no head at {name_or_path!r}",
        got="a folder without config.json" if exists(path) else "neither a folder nor an installed head",
        expected="a folder with config.json" + (", or one of " + ", ".join(known) if known else ""),
        fix=fix,
    )


def head_method(name_or_path: str | Path) -> str:
    """The method in its config.json, whatever it is. Raises `ConfigError` as `head_folder` does."""
    folder = head_folder(name_or_path)
    config = _json(folder / _CONFIG)
    method = config.get("method") if "paceline_head" in config else _published_method(config)
    if not isinstance(method, str):
        raise ConfigError(f"{folder / _CONFIG} names no method", got=repr(method), expected="for example eagle3")
    return method


def _published_method(config: dict[str, Any]) -> str:
    """The method of a head that others published, whose config.json names none; `heads.exchange` checks it."""
    if config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        return "medusa"
    names = " ".join(map(str, config.get("architectures") or []))
    marks = ("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids", "speculators_model_type")
    return "eagle3" if "Eagle3" in names or any(mark in config for mark in marks) else "eagle"


def _read_head(folder: Path) -> PackagedHead:
    config, record = _json(folder / _CONFIG), _json(folder / _RECORD)
    try:
        rows = record.get("acceptance") or []
        return PackagedHead(
            folder.name,
            folder,
            str(config["method"]),
            str(config["target"]["name"]),
            str(config["target"]["fingerprint"]),
            (folder / "model.safetensors").stat().st_size,
            str(record.get("licence", "")),
            record.get("default") is True,
            str(record.get("demo") or f"head:{folder.name}"),
            float(rows[0]["result"]["mean_acceptance_length"]) if rows else None,
        )
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise ConfigError(
            f"the packaged head {folder.name!r} is damaged", got=repr(error), fix="install the models again"
        ) from error


def _json(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object", got=type(value).__name__)
    return cast("dict[str, Any]", value)


# -------------------------------------------------------------------------------------------- vision-language models


@checked
class Part:
    """A file, relative to the model's folder, and its hash."""

    file: str
    sha256: str


@checked
class Adapter:
    """A file of low-rank layers: `scale` B A is added to a weight. layers: which of them each of the model's takes."""

    file: str
    sha256: str
    scale: float
    layers: Many[int]


@checked
class PackagedVlm:
    """One model, as vlm.json describes it, with its name, its folder and the hash of vlm.json.

    base: a model of the zoo. base_fingerprint: of the checkpoint it was trained on, see `hf.fingerprint`; it is
    merged with no other. layers: the decoder layers of the base that are kept, in order. adapters: added one after the
    other. model: file names and hashes of the folder `model`. dtype: of the pulled folder's weights. parameters: of the
    whole model.
    """

    name: str
    folder: Path
    sha256: str
    paceline_vlm: Literal[1]
    description: str
    licence: str
    base: str
    base_fingerprint: str
    layers: Many[int]
    eyes: Part
    adapters: Many[Adapter]
    dtype: Literal["float32", "bfloat16", "float16"]
    parameters: int
    model: Mapping[str, str]

    def __post_init__(self) -> None:
        """Refuse a file elsewhere: parts lie in this folder or in that of another model, the rest in model/."""
        root = self.folder.parent.resolve()
        for part in (self.eyes, *self.adapters):
            if not (self.folder / part.file).resolve().is_relative_to(root) or not part.file.endswith(".safetensors"):
                raise ConfigError(f"{part.file!r} is no safetensors file of a packaged model")
        for name in self.model:
            if name != Path(name).name:
                raise ConfigError(f"{name!r} is no file of this folder")

    @property
    def source(self) -> str:
        """Where the weights come from, in words."""
        return f"{self.base} and what was trained for it in this package"

    @property
    def download_bytes(self) -> int:
        """Nothing is downloaded but the base."""
        return 0

    @property
    def needed_bytes(self) -> int:
        """Free disk space that a pull needs, without the base model: weights, and 4 MB of tokenizer."""
        return self.parameters * (4 if self.dtype == "float32" else 2) + 4_000_000


def read_vlm(folder: Path) -> PackagedVlm:
    """The packaged model in a folder; its weights are not opened. Raises `ConfigError` for a damaged one."""
    try:
        text = (folder / ABOUT).read_bytes()
    except OSError as error:
        raise _damaged(folder, error) from error
    return parse_vlm(folder, text)


def parse_vlm(folder: Path, text: bytes) -> PackagedVlm:
    """The packaged model that the folder is, or will be once `text` is its vlm.json. Raises `ConfigError`."""
    place = {"name": folder.name, "folder": str(folder), "sha256": hashlib.sha256(text).hexdigest()}
    try:
        return validate(PackagedVlm, {**json.loads(text), **place}, str(folder / ABOUT))
    except (ConfigError, ValueError, TypeError) as error:
        raise _damaged(folder, error) from error


def vlm_folders() -> dict[str, Path]:
    """The folder of every installed vision-language model, by name; nothing is read."""
    return _named(ABOUT)


def _damaged(folder: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"the packaged model {folder.name!r} is damaged", got=str(error), expected=f"a whole {ABOUT}",
        fix="install the models again, or package it again",
    )  # fmt: skip
