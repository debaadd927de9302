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
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from importlib import import_module
from types import UnionType
from typing import Any, Literal, Protocol, TypeAlias, Union, cast, get_args, get_origin, get_type_hints

from torch import nn

from ..errors import ConfigError

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
    if method in _KINDS:
        return cast("str", method)
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
    """The configuration of this method. Raises `ConfigError` for an unknown, missing or misfitting key."""
    file, _, name = _KINDS[method]
    kind: Any = getattr(import_module(f"..modules.{file}", __package__), name)
    if not isinstance(given, Mapping):
        raise ConfigError('"head" is not an object', got=type(given).__name__, expected=f"the fields of {name}")
    values = cast("Mapping[str, object]", given)
    known, hints = {field.name: field for field in fields(kind)}, get_type_hints(kind)
    unknown = sorted(set(values) - set(known))
    missing = sorted(
        key
        for key, field in known.items()
        if field.default is MISSING and field.default_factory is MISSING and key not in values
    )
    for what, keys in (("has unknown keys", unknown), ("lacks keys", missing)):
        if keys:
            raise ConfigError(f"the head's configuration {what}", got=", ".join(keys), expected=", ".join(known))
    config = kind(**{key: _fitted(key, value, hints[key]) for key, value in values.items()})
    if getattr(config, "version", None) != _VERSIONS.get(method, getattr(config, "version", None)):
        raise ConfigError(f'"version" does not fit the method {method!r}', expected=f"{_VERSIONS[method]}")
    return config


def _fitted(key: str, value: object, hint: Any) -> object:
    """The value as this type; lists become tuples. Raises `ConfigError`."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if value is None and type(None) in inner:
            return None
        return _fitted(key, value, next(one for one in inner if one is not type(None)))
    if origin is tuple and isinstance(value, list | tuple):
        each = cast("list[object]", value)
        kinds = [inner[0]] * len(each) if inner[-1] is Ellipsis else list(inner)
        if len(kinds) == len(each):
            return tuple(_fitted(key, one, kind) for one, kind in zip(each, kinds, strict=True))
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif hint is int and isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ConfigError(f"{key!r} of the head's configuration is negative", got=value, expected=">= 0")
        return value
    elif (hint in (bool, str) and type(value) is hint) or (origin is Literal and value in inner):
        return value
    raise ConfigError(f"{key!r} of the head's configuration has the wrong type", got=repr(value), expected=str(hint))
