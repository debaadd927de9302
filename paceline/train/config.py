"""What a training run is: a YAML file and dotted overrides, read into frozen dataclasses.

    model: smollm2-135m                 paceline train eagle --config run.yaml train.lr=1e-3 prepare.limit=100
    prompts: [train.jsonl]
    out: runs/eagle

Everything else has a default. `head` and `train.loss` are the method's own; its recipe reads them.
"""

import difflib
import types
import typing
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from ..errors import ConfigError

METHODS = ("eagle", "eagle3", "medusa", "blockwise", "mtp", "space", "qat", "distill")
_T = TypeVar("_T")


@dataclass(frozen=True)
class PrepareSection:
    """Which answers to write. limit, max_tokens, temperatures, mix, seed, part: as in `PrepareConfig`.

    states: "store" keeps the hidden states that the method reads; "online" computes them again while training.
    prompt_tokens: longer prompts are left out. batch: answers written side by side.
    """

    limit: int = 10_000
    max_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 1.0)
    mix: Mapping[str, float] = field(default_factory=dict[str, float])
    seed: int = 0
    states: Literal["store", "online"] = "store"
    part: tuple[int, ...] = (0, 1)
    prompt_tokens: int = 512
    batch: int = 16


@dataclass(frozen=True)
class TrainConfig:
    """How to train.

    max_tokens: columns of a batch, rows x longest row; also where an answer is cut. lr: its peak, after a share
    `warmup` of the steps, from where a cosine falls to a tenth. accumulate: batches a step, on each device.
    held_out: share of the prompts kept for evaluation. limit: answers to train on, None: all. fractions: of them,
    one run each, for the curve of accepted length against data. evaluate_every: steps; None: after each epoch.
    """

    epochs: int = 5
    max_tokens: int = 2048
    lr: float = 6e-4
    warmup: float = 0.03
    clip: float = 0.5
    weight_decay: float = 0.0
    accumulate: int = 1
    seed: int = 0
    limit: int | None = None
    fractions: tuple[float, ...] = (1.0,)
    held_out: float = 0.03
    evaluate_every: int | None = None
    checkpoint_seconds: float = 300.0
    log_every: int = 20
    tensorboard: bool = False
    loss: Mapping[str, object] = field(default_factory=dict[str, object])

    def __post_init__(self) -> None:
        for name, holds, expected in (
            ("epochs", self.epochs >= 1, "at least 1"),
            ("max_tokens", self.max_tokens >= 8, "at least 8"),
            ("lr", self.lr > 0, "above 0"),
            ("warmup", 0 <= self.warmup < 1, "a share below 1"),
            ("clip", self.clip > 0, "above 0"),
            ("accumulate", self.accumulate >= 1, "at least 1"),
            ("held_out", 0 <= self.held_out < 1, "a share below 1"),
            ("fractions", all(0 < f <= 1 for f in self.fractions), "shares above 0 and at most 1"),
            ("log_every", self.log_every >= 1, "at least 1"),
        ):
            if not holds:
                raise ConfigError(f"train.{name} is out of range", got=getattr(self, name), expected=expected)


@dataclass(frozen=True)
class EvalSection:
    """Real decoding with the trained head. prompts: files, empty: the built-in prompts. limit: the first of each file.

    depth, nodes: of a draft, None: the method's. drafter: other keys of its `spec_config`, as tree and top_k.
    """

    prompts: tuple[str, ...] = ()
    limit: int = 40
    max_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 1.0)
    depth: int | None = None
    nodes: int | None = None
    drafter: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True)
class RunConfig:
    """A whole run. prompts: JSON lines with "prompt" or "messages" (a chat, whose pictures `qat` and `distill` read)
    and, for `prepare.mix`, "source". out: the run's folder.
    start: a head to go on from, whose shape and draft vocabulary stay; None: a fresh one of the shape `head` asks for.

    answers: folders that `prepare` wrote elsewhere; empty: the run's own. head: shape of what is trained. base_model,
    licence: for the model card, a hub id and the head's licence.
    """

    model: str
    out: str
    prompts: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    dtype: str | None = None
    device: str | None = None
    base_model: str | None = None
    licence: str | None = None
    start: str | None = None
    head: Mapping[str, object] = field(default_factory=dict[str, object])
    prepare: PrepareSection = field(default_factory=PrepareSection)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalSection = field(default_factory=EvalSection)


def read_config(path: Path | str | None, overrides: Seq[str] = ()) -> RunConfig:
    """The file with `a.b=value` put over it, values being YAML. Raises `ConfigError` for what is not understood."""
    return build(RunConfig, read_mapping(path, overrides))


def read_mapping(path: Path | str | None, overrides: Seq[str] = ()) -> dict[str, Any]:
    """The same as plain values."""
    import yaml

    given: dict[str, Any] = {}
    if path is not None:
        try:
            told = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"the configuration {str(path)!r} cannot be read", got=str(error)) from error
        if not isinstance(told, dict):
            raise ConfigError(f"{str(path)!r} is not a YAML mapping", got=type(told).__name__)
        given = told
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(
                "an override cannot be read", got=repr(override), expected="key=value, as in train.lr=1e-3"
            )
        *parents, last = key.split(".")
        at = given
        for parent in parents:
            at = at.setdefault(parent, {})
            if not isinstance(at, dict):
                raise ConfigError(f"{key!r} goes below {parent!r}, which is a value", got=repr(at))
        try:
            at[last] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"the value of {key!r} is not YAML", got=repr(text)) from error
    return given


def build(kind: type[_T], given: Mapping[str, Any], where: str = "") -> _T:
    """A frozen dataclass from a mapping: unknown keys, missing keys and wrong types raise `ConfigError`."""
    known = {one.name: one for one in fields(cast("Any", kind))}
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            raise ConfigError(
                f"unknown key {where + str(key)!r}",
                expected="one of " + ", ".join(where + name for name in known),
                fix=f"did you mean {where + close[0]!r}?" if close else None,
            )
    missing = [
        name
        for name, one in known.items()
        if name not in given and one.default is MISSING and one.default_factory is MISSING
    ]
    if missing:
        raise ConfigError(f"the configuration has no {where + missing[0]!r}", fix=f"add {where + missing[0]}: to it")
    kinds = typing.get_type_hints(kind)
    return kind(**{key: _value(kinds[key], value, where + key) for key, value in given.items()})


def _value(kind: Any, value: Any, where: str) -> Any:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise _wrong(where, value, "a mapping")
        return build(cast("type[Any]", kind), value, where + ".")
    if origin is types.UnionType:
        if value is None and types.NoneType in parts:
            return None
        return _value(next(part for part in parts if part is not types.NoneType), value, where)
    if origin is Literal:
        if value not in parts:
            raise _wrong(where, value, "one of " + ", ".join(map(str, parts)))
        return value
    if origin is tuple:
        many = value if isinstance(value, list | tuple) else [value]
        return tuple(_value(parts[0], one, where) for one in many)
    if origin is not None:  # a mapping
        if not isinstance(value, Mapping):
            raise _wrong(where, value, "a mapping")
        return {str(key): _value(parts[1], one, f"{where}.{key}") for key, one in value.items()}
    if kind is object:
        return value
    if kind is float:
        if isinstance(value, str):  # YAML 1.1 reads 1e-3 as text
            try:
                value = float(value)
            except ValueError:
                raise _wrong(where, value, "a number") from None
        value = float(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
        raise _wrong(where, value, names.get(kind, kind.__name__))
    return value


def _wrong(where: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{where} has a wrong value", got=repr(value), expected=expected)
