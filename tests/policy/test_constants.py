"""The documentation's table of the policies' numbers is that of the code."""

import re
from pathlib import Path

from paceline.policy import constants

LINE = re.compile(r"([A-Z_]+) = (.+?)  # ([^|]+) \| ([^|]+) \| ([^|]+)")


def rows() -> list[tuple[str, ...]]:
    lines = Path(constants.__file__).read_text(encoding="utf-8").splitlines()
    return [found.groups() for line in lines if (found := LINE.fullmatch(line))]


def test_every_number_says_what_it_is():
    assert [row[0] for row in rows()] == [name for name in vars(constants) if name.isupper()]


def test_the_documentation_has_the_same_table():
    page = Path(constants.__file__).parents[2].joinpath("docs", "speed.md").read_text(encoding="utf-8")
    for name, value, unit, what, where in rows():
        assert f"| `{name}` | {value} {unit} | {what} | {where} |" in page
