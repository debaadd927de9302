"""What a cost model has learnt, as a file: measured on one machine, for one model, to start the next run from."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, cast

from ..errors import ConfigError

VERSION = 1

Table = tuple[tuple[float, ...], tuple[float, ...]]
"""Hits and tries of each position."""
Columns = tuple[tuple[float, ...], ...]
ODDS_BUCKETS, TREE_CELLS = 11, 110
"""Of products of confidences, see `tree_odds`, and of budgets, see `tree_gains`."""


def _no_seconds() -> dict[int, float]:
    return {}


@dataclass(frozen=True)
class Profile:
    """Costs in seconds and acceptance counts.

    pass_seconds: T(n) by rows. draft_seconds: by drafter, (per drafted token, per token read first). acceptance: by
    drafter, then by hint, "" for all of them together. calibration: by drafter, hits and tries by bucket of confidence.
    trees: by drafter of trees, "gains" (4 columns by budget, see `tree_gains`) and "paths", "ahead" (hits and expected
    hits by bucket of the product of confidences, see `tree_odds`); files from before there were trees have none.
    model, dtype, threads: what it was measured with; whoever uses a profile compares them.
    """

    pass_seconds: dict[int, float] = field(default_factory=_no_seconds)
    draft_seconds: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    acceptance: dict[str, dict[str, Table]] = field(default_factory=dict[str, dict[str, Table]])
    calibration: dict[str, Table] = field(default_factory=dict[str, Table])
    trees: dict[str, dict[str, Columns]] = field(default_factory=dict[str, "dict[str, Columns]"])
    model: str = ""
    dtype: str = ""
    threads: int = 0
    version: int = VERSION

    def to_dict(self) -> dict[str, object]:
        """For `json.dump`."""
        made = asdict(self)
        made["pass_seconds"] = {str(rows): seconds for rows, seconds in self.pass_seconds.items()}
        return made

    @classmethod
    def from_dict(cls, given: Mapping[str, object]) -> "Profile":
        """From what `json.load` gave. Raises `ConfigError` for unknown keys, another version or a broken table."""
        known = [f.name for f in fields(cls)]
        for key in given:
            if key not in known:
                raise ConfigError(f"unknown profile key {key!r}", expected="one of " + ", ".join(known))
        if given.get("version") != VERSION:
            raise ConfigError(
                "the profile is of another version", got=given.get("version"), expected=VERSION, fix="tune again"
            )
        values = cast("dict[str, Any]", dict(given))
        try:
            return cls(
                pass_seconds={int(n): _positive(s) for n, s in values.get("pass_seconds", {}).items()},
                draft_seconds={
                    str(name): (_positive(token), _positive(pending))
                    for name, (token, pending) in values.get("draft_seconds", {}).items()
                },
                acceptance={
                    str(name): {_hint(hint): _table(table) for hint, table in by_hint.items()}
                    for name, by_hint in values.get("acceptance", {}).items()
                },
                calibration={str(name): _table(table, 12) for name, table in values.get("calibration", {}).items()},
                trees={str(name): _trees(tables) for name, tables in values.get("trees", {}).items()},
                model=str(values.get("model", "")),
                dtype=str(values.get("dtype", "")),
                threads=int(values.get("threads", 0)),
            )
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError("the profile cannot be read", got=str(error), fix="tune again") from error


def _positive(value: object) -> float:
    number = float(cast("float", value))
    if not 0 < number < 1e6:
        raise ValueError(f"{value!r} is not a time in seconds")
    return number


def _hint(text: str) -> str:
    if text:
        int(text)
    return text


def _table(value: object, size: int | None = None) -> Table:
    hits, tries = (tuple(map(float, column)) for column in cast("list[list[float]]", value))
    sizes_agree = len(hits) == len(tries) and (size is None or len(hits) == size)
    if not sizes_agree or not all(0 <= hit <= tried + 1e-6 for hit, tried in zip(hits, tries, strict=True)):
        raise ValueError(f"{value!r} is not a pair of hits and tries")
    return hits, tries


def _trees(value: object) -> dict[str, Columns]:
    tables = cast("dict[str, list[list[float]]]", value)
    made = {name: tuple(tuple(map(float, column)) for column in columns) for name, columns in tables.items()}
    if set(made) != {"gains", "paths", "ahead"}:
        raise ValueError(f"trees have gains, paths and ahead, not {', '.join(sorted(made))}")
    for name, columns in made.items():
        count, size = (4, TREE_CELLS) if name == "gains" else (2, ODDS_BUCKETS)
        if [len(column) for column in columns] != [size] * count:
            raise ValueError(f"{name} of a tree is not {count} columns of {size}")
        if not all(0 <= value < math.inf for column in columns for value in column):
            raise ValueError(f"{name} of a tree has a number that is no count")
    return made
