"""What `paceline tune` found, as a file: the drafter that pays for a model on a machine, and what was learnt of it."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from .errors import ConfigError
from .policy import Profile
from .spec_config import SpecConfig, parse

VERSION = 1
_KIND = "paceline-tune"


@dataclass(frozen=True)
class Tuned:
    """A choice and what it rests on.

    config: the drafter to use. profile: costs and acceptance for its policy to start from. provenance: machine,
    versions and command. words: what was found, in sentences. measured: results of every candidate, prompts, settings,
    flags of other engines; whatever JSON can hold.
    """

    config: SpecConfig
    profile: Profile
    provenance: dict[str, object]
    words: list[str]
    measured: dict[str, object] = field(default_factory=dict[str, object])

    def as_dict(self) -> dict[str, object]:
        """The content of the file."""
        return {
            "kind": _KIND,
            "version": VERSION,
            "config": self.config.as_dict(),
            "words": list(self.words),
            **self.measured,
            "profile": self.profile.to_dict(),
            "provenance": self.provenance,
        }


def save_tuned(path: Path | str, tuned: Tuned) -> None:
    """Write the file, whole or not at all. Raises OSError where that cannot be done."""
    path = Path(path)
    text = json.dumps(tuned.as_dict(), ensure_ascii=False, indent=1, allow_nan=False)
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        half.write_text(text + "\n", encoding="utf-8")
        half.replace(path)
    except BaseException:
        half.unlink(missing_ok=True)
        raise


def load_tuned(path: Path | str) -> Tuned:
    """Read such a file. Raises `ConfigError` for anything else, another version, or a config that is not understood."""
    given = _read(Path(path))
    if given is None:
        raise ConfigError(f"{str(path)!r} is not a file of `paceline tune`", got="something else", fix=_AGAIN)
    if given.get("version") != VERSION:
        raise ConfigError(
            f"{str(path)!r} is of another version", got=given.get("version"), expected=VERSION, fix=_AGAIN
        )
    config, profile, origin, words = (given.get(key) for key in ("config", "profile", "provenance", "words"))
    if not isinstance(config, dict) or not isinstance(profile, dict) or not isinstance(words, list):
        raise ConfigError(
            f"{str(path)!r} is incomplete",
            got="keys " + ", ".join(given),
            expected="config, profile, words",
            fix=_AGAIN,
        )
    known = ("kind", "version", "config", "profile", "provenance", "words")
    return Tuned(
        parse(cast("dict[str, object]", config)),
        Profile.from_dict(cast("dict[str, object]", profile)),
        cast("dict[str, object]", origin) if isinstance(origin, dict) else {},
        [str(one) for one in cast("list[object]", words)],
        {key: value for key, value in given.items() if key not in known},
    )


def default_file(model: str) -> Path:
    """`paceline-<model>.json`; of a path or hub id its last part."""
    last = model.rstrip("/\\").replace("\\", "/").rpartition("/")[2]
    return Path(f"paceline-{last or 'model'}.json")


def check_writable(path: Path | str) -> None:
    """Refuse, before minutes of measuring, what could not be written or should not be overwritten.

    An earlier file of `paceline tune` may be. Raises `ConfigError`.
    """
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{str(path)!r} is a folder", expected="a file name", fix="give another --out")
    if path.exists() and path.stat().st_size and _read(path) is None:
        raise ConfigError(
            f"{str(path)!r} holds something that `paceline tune` did not write",
            fix="give another --out, or move it away",
        )
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        half.touch()
        half.unlink()
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written", got=error.strerror, fix="give another --out") from error


def dtype_label(dtype: object, device: object) -> str:
    """How the weights are held, as a profile remembers it: "bfloat16", or "bfloat16 on cuda"."""
    name, where = str(dtype).removeprefix("torch."), str(device).partition(":")[0]
    return name if where == "cpu" else f"{name} on {where}"


def check_profile(profile: Profile, model: str, dtype: str, threads: int) -> list[str]:
    """Whether a profile may be used with this model; what is left blank in it fits anything.

    Returns warnings. Raises `ConfigError` where model or dtype (see `dtype_label`) are not those measured.
    """
    for what, then, now in (("model", profile.model, model), ("dtype", profile.dtype, dtype)):
        if then and then != now:
            raise ConfigError(
                f"the profile was measured with another {what}", got=f"{then} there, {now} here",
                fix=f"run `paceline tune` with this {what}, or leave the profile out",
            )  # fmt: skip
    if profile.threads and profile.threads != threads:
        return [
            f"the profile was measured with {_threads(profile.threads)} and this run has {threads}: its times are off "
            f"until the policy has learnt new ones (--threads {profile.threads} would fit)"
        ]
    return []


_AGAIN = "run `paceline tune` again"


def _threads(count: int) -> str:
    return f"{count} thread{'' if count == 1 else 's'}"


def _read(path: Path) -> Mapping[str, object] | None:
    """The content where it is a file of ours, None where it is another's."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the profile {str(path)!r} cannot be read", got=error.strerror) from error
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    return cast("dict[str, object]", found) if isinstance(found, dict) and found.get("kind") == _KIND else None
