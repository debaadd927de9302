"""What a stage was asked for, noted before its result: a finished one is taken as done by the same run alone."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.schema import validate
from paceline.system.files import read_json, write_text

from .config import VlmConfig

FILE = "settings.json"


def settings_of(config: VlmConfig, stage: str, model: str, easy: str, seen: str | None) -> dict[str, object]:
    """By the names of the configuration, without what leaves the result as it is.

    model, easy: hashes of the language model and of easy-VQA. seen: of what the stage before made, or the teacher is.
    """
    told: dict[str, object] = {"model": model, "seed": config.seed, "clip": config.clip}
    own = asdict(getattr(config, stage))
    told |= {f"{stage}.{key}": value for key, value in own.items() if key not in ("micro_batch", "teacher")}
    if stage != "distill":
        told |= {f"tower.{key}": value for key, value in asdict(config.tower).items()}
    if stage != "eyes":
        told |= {"easy_vqa": easy, "licence": config.licence, "base_model": config.base_model}
        told["eyes" if stage == "talk" else "distill.teacher"] = seen
    return told


def note_settings(folder: Path, settings: Mapping[str, object]) -> None:
    """Write what the stage in this folder was asked for; JSON values by name."""
    write_text(folder / FILE, json.dumps(settings, indent=1) + "\n")


def check_settings(folder: Path, settings: Mapping[str, object], result: Path) -> None:
    """Raise `ConfigError`, naming what differs, where `result` was made of other settings."""
    path, asked = folder / FILE, json.loads(json.dumps(settings))
    fix = f"choose another out, or remove {str(result)!r} and {str(folder)!r} to begin again"
    try:
        then = validate(dict[str, Any], read_json(path, "the record"), f"the record {str(path)!r}")
    except ConfigError as error:
        raise ConfigError(
            f"nobody knows with which settings {str(result)!r} was made", got=error.what,
            expected="the record of a finished stage", fix=fix,
        ) from error  # fmt: skip
    both = {key: (then.get(key), asked.get(key)) for key in {**then, **asked}}
    differing = {key: pair for key, pair in both.items() if pair[0] != pair[1]}
    if differing:
        raise ConfigError(
            f"{str(result)!r} was made with other settings",
            got=", ".join(f"{key}: {_brief(now)}" for key, (_, now) in differing.items()),
            expected=", ".join(f"{key}: {_brief(was)}" for key, (was, _) in differing.items()), fix=fix,
        )  # fmt: skip


def _brief(value: object) -> str:
    """A hash by its beginning."""
    text = json.dumps(value)
    return text if len(text) <= 24 else text[:13] + "..."
