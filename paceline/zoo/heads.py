"""The trained heads that travel with the package: by name, and by the target they were trained for. Reads JSON only.

A folder artefacts/NAME is the head that `--drafter head:NAME` names.
"""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ..errors import ConfigError
from ..system.files import exists, read_json

ARTEFACTS = Path(__file__).parent / "artefacts"
_CONFIG, _RECORD = "config.json", "training.json"


@dataclass(frozen=True)
class PackagedHead:
    """One line of `paceline models`.

    is_default: the one to take for this target. demo: the drafter, as the command line names it, that `paceline demo`
    uses. mean_acceptance_length: the first one recorded; None where none was. size_bytes: of the weights.
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


def packaged_heads(artefacts: Path = ARTEFACTS) -> list[PackagedHead]:
    """Every packaged head, by name. Raises `ConfigError` for a folder that is damaged."""
    folders = sorted(path.parent for path in artefacts.glob(f"*/{_CONFIG}"))
    return [_read(folder) for folder in folders]


def best_head(fingerprint: str, artefacts: Path = ARTEFACTS) -> PackagedHead | None:
    """The default head for the target of this fingerprint, None where there is none."""
    heads = packaged_heads(artefacts)
    return next((head for head in heads if head.fingerprint == fingerprint and head.is_default), None)


def head_folder(name_or_path: str | Path, artefacts: Path = ARTEFACTS) -> Path:
    """The folder of a head; a local folder wins over a packaged name. Raises `ConfigError` that lists the names."""
    path = Path(name_or_path)
    if isinstance(name_or_path, Path) or exists(path / _CONFIG):
        return path
    names = sorted(folder.parent.name for folder in artefacts.glob(f"*/{_CONFIG}"))
    if name_or_path in names:
        return artefacts / name_or_path
    close = difflib.get_close_matches(name_or_path.lower(), names, n=1, cutoff=0.5)
    if close:
        fix = f"did you mean {close[0]!r}?"
    else:
        fix = "`paceline models` lists the packaged ones; `paceline train` makes one"
    raise ConfigError(
        f"no head at {name_or_path!r}",
        got="a folder without config.json" if exists(path) else "neither a folder nor a packaged head",
        expected="a folder with config.json" + (", or one of " + ", ".join(names) if names else ""),
        fix=fix,
    )


def head_method(name_or_path: str | Path, artefacts: Path = ARTEFACTS) -> str:
    """The method in its config.json, whatever it is. Raises `ConfigError` as `head_folder` does."""
    folder = head_folder(name_or_path, artefacts)
    config = _json(folder / _CONFIG)
    method = config.get("method") if "paceline_head" in config else _published_method(config)
    if not isinstance(method, str):
        raise ConfigError(f"{folder / _CONFIG} names no method", got=repr(method), expected="for example eagle3")
    return method


def _published_method(config: dict[str, Any]) -> str:
    """Of a head that others published, whose config.json names none; the readers of `heads` see if it is one."""
    if config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        return "medusa"
    names = " ".join(map(str, config.get("architectures") or []))
    marks = ("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids", "speculators_model_type")
    return "eagle3" if "Eagle3" in names or any(mark in config for mark in marks) else "eagle"


def _read(folder: Path) -> PackagedHead:
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
            f"the packaged head {folder.name!r} is damaged", got=repr(error), fix="install Paceline again"
        ) from error


def _json(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object", got=type(value).__name__)
    return cast("dict[str, Any]", value)
