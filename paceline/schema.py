"""Values that come from outside, checked once where they enter, by pydantic: types, ranges, unknown and missing keys.

    @checked                                        construct it in Python: wrong values raise `ConfigError`
    class Options:
        depth: Annotated[int, Field(ge=1)] = 5

    validate(Options, {"depth": 0}, "options")      read it from JSON or YAML: the same

Nothing is converted: 1.0 is no integer, True no number, "5" neither. NaN and infinities are refused.
"""

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, cast, dataclass_transform, get_args, get_type_hints

from pydantic import AfterValidator, ConfigDict, Strict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from .errors import ConfigError, PacelineError

_T = TypeVar("_T")


def check_text(value: str) -> str:
    """The text itself. Raises ValueError where no encoding can write it, since it holds half a character."""
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("text without lone surrogates, as \\ud800 is one")
    return value


Text = Annotated[str, AfterValidator(check_text)]
"""Text that UTF-8 can write."""
Many = Annotated[tuple[_T, ...], Strict(False)]
"""A tuple, which may be given as a list."""
_CONFIG = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)


@dataclass_transform(frozen_default=True)
def checked(cls: type[_T]) -> type[_T]:
    """A frozen dataclass whose fields are validated when it is made; `__post_init__` runs after that."""
    after: Callable[[Any], None] = cls.__dict__.get("__post_init__", lambda self: None)

    def __post_init__(self: Any) -> None:
        _check_fields(self)
        after(self)

    any_cls = cast("Any", cls)
    any_cls.__pydantic_config__, any_cls.__post_init__ = _CONFIG, __post_init__
    return dataclass(frozen=True)(cls)


def validate(kind: type[_T], value: object, what: str) -> _T:
    """`value`, as JSON or YAML gave it, as a `kind`: a checked class, or any type that pydantic knows.

    what: names the value in errors. Raises `ConfigError` with the field, what it holds and what it may hold.
    """
    try:
        return cast("TypeAdapter[_T]", _adapter(kind)).validate_json(json.dumps(value, default=str))
    except ValidationError as error:
        raise _told(error, what, kind) from None
    except (RecursionError, ValueError, TypeError) as error:
        raise ConfigError(f"{what} cannot be read", got=str(error)) from error


def _check_fields(made: Any) -> None:
    kind = cast("type[Any]", type(made))
    for name, adapter in _field_adapters(kind).items():
        try:
            value = adapter.validate_python(getattr(made, name))
        except ValidationError as error:
            raise _told(error, f"{kind.__name__}.{name}", None) from None
        object.__setattr__(made, name, value)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=None if is_dataclass(kind) else _CONFIG)


@cache
def _field_adapters(kind: type[Any]) -> Mapping[str, TypeAdapter[Any]]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: _adapter(hints[field.name]) for field in fields(kind)}


def _told(error: ValidationError, what: str, kind: Any) -> PacelineError:
    """The first thing that is wrong, in our words."""
    errors = error.errors(include_url=False)
    first = errors[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, PacelineError):
        return cause
    path, known = _place(kind, first)
    name = ".".join(path)
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        close = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        return ConfigError(
            f"{what}: unknown key {name!r}",
            expected="one of " + ", ".join(known) if known else None,
            fix=f"did you mean {close[0]!r}?" if close else None,
        )
    if first["type"] in ("missing", "missing_argument"):
        return ConfigError(f"{what}: there is no {name!r}", fix=f"add {path[-1]!r}")
    same = [one for one in errors if _place(kind, one)[0] == path]  # of a union, every member tells what it takes
    expected = dict.fromkeys(one["msg"].removeprefix("Value error, ").removeprefix("Input should be ") for one in same)
    where = f"{what}: {name}" if name else what
    return ConfigError(f"{where} has a wrong value", got=_short(first["input"]), expected=" or ".join(expected))


def _place(kind: Any, first: ErrorDetails) -> tuple[list[str], list[str]]:
    """The path to what is wrong, without the names of union members, and the keys that are known where it ends."""
    path, known = list[str](), list[str]()
    for step in first["loc"]:
        kind = next((one for one in (kind, *get_args(kind)) if is_dataclass(one)), None)
        known = [field.name for field in fields(kind)] if kind is not None else []
        if isinstance(step, int) or kind is not None or first["type"] == "extra_forbidden":
            path.append(str(step))
        kind = get_type_hints(kind).get(str(step)) if kind is not None else None
    return path, known


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
