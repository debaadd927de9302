"""What a cost model has learnt, as a file: measured on one machine, for one model, to start the next run from."""

from collections.abc import Mapping
from dataclasses import asdict, field
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from ..errors import ConfigError
from ..schema import Many, checked, validate

VERSION = 1
ODDS_BUCKETS, TREE_CELLS = 11, 110
"""Of products of confidences, see `tree_odds`, and of budgets, see `tree_gains`."""

_Seconds = Annotated[float, Field(gt=0, lt=1e6)]
_Column = Many[Annotated[float, Field(ge=0)]]
Columns = tuple[_Column, ...]


def _check_table(table: tuple[_Column, _Column]) -> tuple[_Column, _Column]:
    hits, tries = table
    if len(hits) != len(tries) or any(hit > tried + 1e-6 for hit, tried in zip(hits, tries, strict=True)):
        raise ValueError("hits and as many tries, none of them fewer")
    return table


def _check_calibration(table: tuple[_Column, _Column]) -> tuple[_Column, _Column]:
    if len(table[0]) != 12:
        raise ValueError("12 hits and 12 tries")
    return table


def _check_trees(tables: dict[str, Columns]) -> dict[str, Columns]:
    sizes = {name: [len(column) for column in columns] for name, columns in tables.items()}
    if sizes != {"gains": [TREE_CELLS] * 4, "paths": [ODDS_BUCKETS] * 2, "ahead": [ODDS_BUCKETS] * 2}:
        raise ValueError(f"gains (4 columns of {TREE_CELLS}), paths and ahead (2 columns of {ODDS_BUCKETS})")
    return tables


Table = Annotated[tuple[_Column, _Column], AfterValidator(_check_table)]
"""Hits and tries of each position."""
_Calibration = Annotated[Table, AfterValidator(_check_calibration)]
_Hint = Annotated[str, Field(pattern=r"^(-?\d{1,9})?$")]
_Trees = Annotated[dict[str, Many[_Column]], AfterValidator(_check_trees)]


@checked
class Profile:
    """Costs in seconds and acceptance counts.

    pass_seconds: T(n) by rows. draft_seconds: by drafter, (per drafted token, per token read first). acceptance: by
    drafter, then by hint, "" for all of them together. calibration: by drafter, hits and tries by bucket of confidence.
    trees: by drafter of trees, "gains" (4 columns by budget, see `tree_gains`) and "paths", "ahead" (hits and expected
    hits by bucket of the product of confidences, see `tree_odds`); files from before there were trees have none.
    model, dtype, threads: what it was measured with; whoever uses a profile compares them.
    """

    pass_seconds: dict[Annotated[int, Field(ge=1)], _Seconds] = field(default_factory=dict[int, float])
    draft_seconds: dict[str, tuple[_Seconds, _Seconds]] = field(default_factory=dict[str, tuple[float, float]])
    acceptance: dict[str, dict[_Hint, Table]] = field(default_factory=dict[str, dict[str, Table]])
    calibration: dict[str, _Calibration] = field(default_factory=dict[str, Table])
    trees: dict[str, _Trees] = field(default_factory=dict[str, "dict[str, Columns]"])
    model: str = ""
    dtype: str = ""
    threads: Annotated[int, Field(ge=0)] = 0
    version: Literal[1] = VERSION

    def to_dict(self) -> dict[str, object]:
        """For `json.dump`."""
        made = asdict(self)
        made["pass_seconds"] = {str(rows): seconds for rows, seconds in self.pass_seconds.items()}
        return made

    @classmethod
    def from_dict(cls, given: Mapping[str, object]) -> "Profile":
        """From what `json.load` gave. Raises `ConfigError` for unknown keys, another version or a broken table."""
        if given.get("version") != VERSION:
            raise ConfigError(
                "the profile is of another version", got=given.get("version"), expected=VERSION, fix="tune again"
            )
        return validate(cls, dict(given), "the profile")
