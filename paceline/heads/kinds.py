"""Which method has which module, and a module's configuration as JSON and back.

method       module                        configuration
eagle        modules.eagle.EagleHead       EagleConfig, version 1 (EAGLE-1 and -2 share their weights)
eagle3       modules.eagle.EagleHead       EagleConfig, version 3
medusa       modules.heads.MedusaHead      MedusaConfig
blockwise    modules.heads.BlockwiseHead   BlockwiseConfig
mtp          modules.mtp.MtpHead           MtpConfig
space        modules.space.SpaceAdapter    SpaceConfig
self_int4    modules.int4_draft.Int4Draft  Int4DraftConfig
"""

import difflib
from dataclasses import asdict
from importlib import import_module
from typing import Any, Protocol, TypeAlias, cast

from torch import nn

from ..errors import ConfigError
from ..schema import validate

_KINDS = {  # file of `modules`, class of the head, class of its configuration
    "eagle": ("eagle", "EagleHead", "EagleConfig"),
    "eagle3": ("eagle", "EagleHead", "EagleConfig"),
    "medusa": ("heads", "MedusaHead", "MedusaConfig"),
    "blockwise": ("heads", "BlockwiseHead", "BlockwiseConfig"),
    "mtp": ("mtp", "MtpHead", "MtpConfig"),
    "space": ("space", "SpaceAdapter", "SpaceConfig"),
    "self_int4": ("int4_draft", "Int4Draft", "Int4DraftConfig"),
}
METHODS = tuple(_KINDS)
_VERSIONS = {"eagle": 1, "eagle3": 3}

Head: TypeAlias = nn.Module
"""A module of one of these kinds; each has its `config`, a frozen dataclass."""


class _MakesHead(Protocol):
    def __call__(self, config: object, /) -> Head: ...


def method_of(head: Head) -> str:
    """The method a module is for. Raises `ConfigError` for a module of no known kind."""
    version = getattr(getattr(head, "config", None), "version", None)
    for method, (_, name, _) in _KINDS.items():
        if type(head).__name__ == name and version == _VERSIONS.get(method, version):
            return method
    kinds = ", ".join(sorted({name for _, name, _ in _KINDS.values()}))
    raise ConfigError("this module is no head that can be saved", got=type(head).__name__, expected=f"one of {kinds}")


def check_method(method: object) -> str:
    """The method itself. Raises `ConfigError` that lists the known ones."""
    if isinstance(method, str) and method in _KINDS:
        return method
    close = difflib.get_close_matches(str(method), METHODS, n=1)
    fix = f"did you mean {close[0]!r}?" if close else None
    raise ConfigError("unknown method of a head", got=repr(method), expected="one of " + ", ".join(METHODS), fix=fix)


def new_head(method: str, config: object) -> Head:
    """A module of this configuration, its weights not yet those of a trained one."""
    file, name, _ = _KINDS[method]
    make = cast("_MakesHead", getattr(import_module(f"..modules.{file}", __package__), name))
    return make(config)


def config_to_json(head: Head) -> dict[str, object]:
    """The fields of the configuration; tuples become lists when they are written."""
    return asdict(cast("Any", head.config))


def config_from_json(method: str, given: object) -> object:
    """The configuration of this method, from JSON. Raises `ConfigError` for an unknown, missing or misfitting key."""
    file, _, name = _KINDS[method]
    kind: Any = getattr(import_module(f"..modules.{file}", __package__), name)
    config: object = validate(kind, given, f'"head" of method {method!r}')
    if getattr(config, "version", None) != _VERSIONS.get(method, getattr(config, "version", None)):
        raise ConfigError(f'"version" does not fit the method {method!r}', expected=f"{_VERSIONS[method]}")
    return config
