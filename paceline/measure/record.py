"""A table of measurements as JSON: what was run, where, on which commit, and the values with their units.

`provenance` of `paceline bench`, `check`, `check-draft`, `demo`, `doctor` and `tune` with --json is `measured_on()`; a
`Record` keeps the part that a reader needs. `bench/results/` holds records, which `bench/results.py` prints.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from ..errors import ConfigError
from ..system.files import read_json, write_text
from ..system.provenance import provenance

Cell: TypeAlias = str | int | float | tuple[float, float] | None
"""A name, a value, the bounds of an interval, or nothing."""


def measured_on() -> dict[str, object]:
    """`provenance`, and the instruction set of the kernels; None where torch computes."""
    from ..kernels import load  # imports torch, before which `set_waiting` is called

    return {**provenance(), "isa": load().isa}


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Machine(_Strict):
    """name: as tables call it, such as "two Zen 3 cores". isa: of the kernels, or of the processor."""

    name: str
    isa: str | None = None
    cores: int | None = None
    cpu: str | None = None
    gpu: str | None = None


class Record(_Strict):
    """One table on one machine.

    table: what it is about, the same on every machine. columns: their units by name, "" for words; rows: a cell for
    each column. title, notes: said before and after the table. command: that prints it, "" where its script is gone.
    """

    table: str
    title: str
    machine: Machine
    model: str
    command: str
    commit: str
    date: str
    versions: dict[str, str] = {}
    columns: dict[str, str]
    rows: list[list[Cell]]
    notes: list[str] = []

    @model_validator(mode="after")
    def _is_whole(self) -> "Record":
        if wrong := [row for row in self.rows if len(row) != len(self.columns)]:
            raise ValueError(f"{len(wrong[0])} cells of {len(self.columns)} columns: {wrong[0]}")
        return self

    @property
    def values(self) -> dict[str, dict[str, Cell]]:
        """Rows by their first cell, cells by column."""
        return {str(row[0]): dict(zip(self.columns, row, strict=True)) for row in self.rows}

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"{self.table}-{self.machine.name.lower().replace(' ', '-')}.json"

    def save(self, folder: Path) -> Path:
        """Write it, a line for each row. Raises `OSError`."""
        about = self.model_dump(exclude={"rows"}, exclude_none=True)
        rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in self.rows)
        head = json.dumps(about, indent=1, ensure_ascii=False).removesuffix("\n}")
        path = folder / self.file
        write_text(path, f'{head},\n "rows": [\n  {rows}\n ]\n}}\n')
        return path


def record_of(about: Mapping[str, Any], machine: str, command: str, **table: Any) -> Record:
    """The record of a run. about: its `measured_on()`. machine: its name. table: the other fields."""
    facts = {key: about[key] for key in ("isa", "cores", "cpu", "gpu")}
    versions = {key: str(about[key]) for key in ("paceline", "torch", "transformers") if about[key]}
    commit = str(about["git_commit"] or "unknown")[:7] + (" and changes" if about["git_dirty"] else "")
    place = Machine(name=machine, **facts)
    return Record(
        machine=place, command=command, commit=commit, date=str(about["time"])[:10], versions=versions, **table
    )


def read_records(folder: Path) -> list[Record]:
    """The records of a folder by file. Raises `ConfigError` for a file that is none."""
    records = list[Record]()
    for path in sorted(folder.glob("*.json")):
        try:
            records.append(Record.model_validate(read_json(path, "the record")))
        except ValidationError as error:
            first = error.errors()[0]
            got = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise ConfigError(f"{path} is no record", got=got, fix="write it with `make bench`") from None
        if path.name != records[-1].file:
            raise ConfigError(f"{path} holds another record", got=path.name, expected=records[-1].file)
    return records
