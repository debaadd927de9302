"""Checks of values from outside, by pydantic: types, ranges, unknown and missing keys.

    @checked                                        construct it in Python: wrong values raise `ConfigError`
    class Options:
        depth: Annotated[int, Field(ge=1)] = 5

    validate(Options, {"depth": 0}, "options")      read it from JSON or YAML: the same

    @checked_call                                   call it: wrong arguments raise `ConfigError`
    def grow(depth: Annotated[int, Field(ge=1)]): ...

Nothing is converted: 1.0 is no integer, True no number, "5" neither. NaN and infinities are refused.
"""

import difflib
import inspect
import json
import logging
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, wraps
from typing import Annotated, Any, ParamSpec, TypeVar, cast, dataclass_transform, get_args, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from .errors import ConfigError, PacelineError
from .integrations.other_names import INSTEAD
from .integrations.vllm_options import settle, spelled

_T = TypeVar("_T")
_P = ParamSpec("_P")
_LOG = logging.getLogger("paceline")


def check_text(value: str) -> str:
    """The text itself. Raises ValueError for a lone surrogate, which no encoding can write."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("text without lone surrogates, as \\ud800 is one") from None
    return value


def scalar(value: Any) -> Any:
    """A scalar of numpy, or a tensor without dimensions, as Python's number; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


Integer = Annotated[int, BeforeValidator(scalar)]
Number = Annotated[float, BeforeValidator(scalar)]
"""Numbers, also those of numpy and torch."""
Positive = Annotated[float, Field(gt=0)]
Text = Annotated[str, AfterValidator(check_text)]
"""Text that UTF-8 can encode."""
Many = Annotated[tuple[_T, ...], Strict(False)]
"""A tuple, which may be given as a list."""
_CONFIG = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)


@dataclass_transform(frozen_default=True)
def checked(cls: type[_T]) -> type[_T]:
    """A frozen dataclass whose arguments are validated when it is made; `__post_init__` runs after that."""
    cast("Any", cls).__pydantic_config__ = _CONFIG
    record = dataclass(frozen=True)(cls)
    record.__init__ = checked_call(record.__init__)
    return record


def checked_call(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function, or a constructor, whose arguments are validated by their names and annotations."""
    signature = inspect.signature(function)
    name = function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        bound = signature.bind(*args, **kwargs)
        for key, adapter in _argument_adapters(function).items():
            if key in bound.arguments:
                try:
                    bound.arguments[key] = adapter.validate_python(bound.arguments[key])
                except ValidationError as error:
                    raise _config_error(error, f"{name}.{key}", None) from None
        return function(*bound.args, **bound.kwargs)

    return checked_names(call)


def checked_names(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function that treats unknown keywords as `taken_from_others` says."""
    name = function.__qualname__.removesuffix(".__init__")
    known = list(inspect.signature(function).parameters)
    known = known[1:] if known[:1] == ["self"] else known

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        others = {key: kwargs.pop(key) for key in [*kwargs] if key not in known}
        if others:
            kwargs |= taken_from_others(name, others, known, kwargs)
        return function(*args, **kwargs)

    return call


def taken_from_others(
    taker: str, options: Mapping[str, object], known: Sequence[str], taken: Container[str] = ()
) -> dict[str, object]:
    """Options of other engines as ours, by the table of `taker` in `other_names`; what changes nothing is logged.

    taken: those of the known options that have a value already. Raises one `ConfigError` for all that is refused.
    """
    table = INSTEAD.get(taker, {})
    listed = {name: value for name, value in options.items() if name in table}
    settled = settle(listed, table, [name for name in known if name not in taken])
    fixes = {name: spelled(settled.refused[name]) if name in listed else meant(name, known) for name in options
             if name in settled.refused or name not in listed}  # fmt: skip
    if fixes:
        expected = None if listed.keys() >= fixes.keys() else "one of " + ", ".join(known)
        shown = {
            name: f"{name}={brief(options[name])}" if getattr(table.get(name), "idle", ()) else brief(name)
            for name in fixes
        }
        raise not_taken(taker, {shown[name]: fix for name, fix in fixes.items()}, expected)
    if settled.idle:
        _LOG.warning("%s: these options change nothing here: %s.", taker, ", ".join(settled.idle))
    return settled.ours


def not_taken(taker: str, fixes: Mapping[str, str | None], expected: str | None = None) -> ConfigError:
    """The error for options that something does not take: all at once, with what to do instead of each."""
    told = [(name, fix) for name, fix in fixes.items() if fix]
    fix = "; ".join(fix if len(fixes) == 1 else f"{name}: {fix}" for name, fix in told)
    return ConfigError(f"{taker} takes no {', '.join(fixes)}", expected=expected, fix=fix or None)


def validate(kind: type[_T], value: object, subject: str) -> _T:
    """`value`, as JSON or YAML gave it, as a `kind`: a checked class, or any type that pydantic knows.

    subject: names the value in errors. Raises `ConfigError` with the field, what it holds and what it may hold.
    """
    try:
        return cast("TypeAdapter[_T]", _adapter(kind)).validate_json(json.dumps(value, default=str))
    except ValidationError as error:
        raise _config_error(error, subject, kind) from None
    except (RecursionError, ValueError, TypeError) as error:
        raise ConfigError(f"{subject} cannot be read", got=cut(str(error), 300)) from error


def meant(word: str, known: Sequence[str]) -> str | None:
    """A question with the known word of which this one is a misspelling; None where it is of none."""
    word = word.lower()
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.8)
    return f"did you mean {close[0]!r}?" if close and _has_same_parts(word, close[0]) else None


def _has_same_parts(word: str, other: str) -> bool:
    """Whether each part of a word is a misspelling of one of the other: top_k is none of top_p."""
    parts, others = (re.findall(r"[^\W_]+", text.lower()) for text in (word, other))
    return "".join(parts) == "".join(others) or all(
        difflib.get_close_matches(part, [two for two in others if two[0] == part[0]], 1, 0.75) for part in parts
    )


def brief(value: object) -> str:
    """A value in at most 80 characters, for messages; it may be anything."""
    try:
        text = " ".join(repr(value).split())
    except (RecursionError, ValueError):  # nested too deep; a number of too many digits
        text = f"{type(value).__name__}, too large to show"
    return cut(text)


def cut(text: str, most: int = 80) -> str:
    """A text, or its beginning and three dots, in at most so many characters."""
    return text if len(text) <= most else text[: most - 3] + "..."


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    has_config = is_dataclass(getattr(kind, "__origin__", kind))  # also in Annotated
    return TypeAdapter(kind, config=None if has_config else _CONFIG)


@cache
def _argument_adapters(function: Callable[..., Any]) -> Mapping[str, TypeAdapter[Any]]:
    hints = get_type_hints(function, include_extras=True)
    return {name: _adapter(hint) for name, hint in hints.items() if name != "return"}


def _config_error(error: ValidationError, subject: str, kind: Any) -> PacelineError:
    """The first fault as a `ConfigError`; for a union, the fault in the member that matches best."""
    errors = error.errors(include_url=False)
    first = max(errors, key=lambda fault: len(fault["loc"]))
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, PacelineError):
        return cause
    if first["type"] == "json_invalid":  # the JSON is made here, so the value is at fault
        expected = "text without lone surrogates, in at most 200 levels"
        return ConfigError(f"{subject} cannot be read", got=brief(first["input"]), expected=expected)
    path, known = _place(kind, first)
    name = cut(".".join(path))
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        expected = "one of " + ", ".join(known) if known else None
        return ConfigError(f"{subject}: unknown key {name!r}", expected=expected, fix=meant(path[-1], known))
    if first["type"] in ("missing", "missing_argument"):
        return ConfigError(f"{subject}: there is no {name!r}", fix=f"add {path[-1]!r}")
    same = [f for f in errors if _place(kind, f)[0] == path]  # each member of a union has its own
    expected = dict.fromkeys(cut(re.sub(r"^(Value error, |\w+ should (be )?)", "", f["msg"]), 500) for f in same)
    where = f"{subject}: {name}" if name else subject
    words = re.findall(r"'([^']+)'", str(first.get("ctx", {}).get("expected", "")))  # of a Literal
    fix = meant(first["input"], words) if isinstance(first["input"], str) else None
    if isinstance(first["input"], type):
        fix = f"make one: {first['input'].__name__}(...)"
    return ConfigError(f"{where} has a wrong value", got=brief(first["input"]), expected=" or ".join(expected), fix=fix)


def _place(kind: Any, first: ErrorDetails) -> tuple[list[str], list[str]]:
    """The path to what is wrong, without the names of union members, and the keys that are known where it ends."""
    path, known = list[str](), list[str]()
    for step in first["loc"]:
        kind = next((part for part in (kind, *get_args(kind)) if is_dataclass(part)), None)
        known = [field.name for field in fields(kind)] if kind is not None else []
        if isinstance(step, int) or kind is not None or first["type"] == "extra_forbidden":
            path.append(str(step))
        kind = get_type_hints(kind).get(str(step)) if kind is not None else None
    return path, known
