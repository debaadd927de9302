"""The file of `paceline tune`: the fastest drafter for a model on a machine, and its measured costs and acceptance."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from .config import SpecConfig, parse
from .errors import ConfigError
from .policy import Profile
from .schema import validate
from .system.files import read_kind, to_json, write_text
from .target import LoadedModel

VERSION = 1
_KIND = "paceline-tune"
SIGN = f'{{\n "kind": "{_KIND}"'
"""The beginning of such a file."""
_AGAIN = "run `paceline tune` again"


@dataclass(frozen=True)
class Tuned:
    """The chosen drafter, and the measurements behind the choice.

    config: the drafter to use.
    profile: the costs and acceptance that its policy starts from.
    provenance: machine, versions and command.
    words: the findings, in sentences.
    measured: results of every candidate, prompts, settings, flags of other engines; anything JSON can hold.
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
    write_text(path, to_json(tuned.as_dict(), indent=1) + "\n")


def load_tuned(path: Path | str) -> Tuned:
    """Read such a file. Raises `ConfigError` for anything else, another version, or a config that is not understood."""
    content = read_kind(path, _KIND, VERSION, _AGAIN)
    del content["kind"], content["version"]
    config, profile, origin = (
        validate(dict[str, object], content.pop(key, None), f"{key} in {str(path)!r}")
        for key in ("config", "profile", "provenance")
    )
    words = validate(list[str], content.pop("words", None), f"words in {str(path)!r}")
    return Tuned(parse(config), Profile.from_dict(profile), origin, words, content)


def default_file(model: str) -> Path:
    """`paceline-<model>.json`; of a path or hub id its last part."""
    return Path(f"paceline-{Path(model).name or 'model'}.json")


def made_for(loaded: LoadedModel) -> tuple[str, str, int]:
    """What a profile depends on: the model's name, its dtype (on a GPU as "bfloat16 on cuda"), threads."""
    dtype, device = str(loaded.dtype).removeprefix("torch."), loaded.device.type
    return loaded.name, dtype if device == "cpu" else f"{dtype} on {device}", torch.get_num_threads()


def check_profile(profile: Profile, loaded: LoadedModel) -> list[str]:
    """Check that a profile fits this model; an empty field fits anything.

    Returns warnings. Raises `ConfigError` where it was measured with another model or dtype.
    """
    model, dtype, threads = made_for(loaded)
    for name, then, now in (("model", profile.model, model), ("dtype", profile.dtype, dtype)):
        if then and then != now:
            raise ConfigError(
                f"the profile was measured with another {name}", got=f"{then} there, {now} here",
                fix=f"run `paceline tune` with this {name}, or leave the profile out",
            )  # fmt: skip
    if profile.threads and profile.threads != threads:
        return [
            f"the profile was measured with {profile.threads} threads and this run has {threads}: its times are off "
            f"until the policy has learnt new ones (--threads {profile.threads} would fit)"
        ]
    return []
