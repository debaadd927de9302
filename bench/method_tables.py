"""Write the tables of methods in docs/ anew, from `paceline.methods.table`:  python -m bench.method_tables

A table stands between two comments, `<!-- methods: NAME -->` and `<!-- end -->`.
"""

import re
from collections.abc import Callable
from pathlib import Path

from paceline.methods.heads.exchange import ENGINES
from paceline.methods.method import Method
from paceline.methods.spec import keys_of, spec_class
from paceline.methods.table import METHODS

DOCS = Path(__file__).parents[1] / "docs"
ROWS = list(METHODS.values())


def table(columns: dict[str, Callable[[Method], str]], rows: list[Method]) -> str:
    """A Markdown table with one column for each function of a row."""
    lines = [list(columns), ["---"] * len(columns), *[[cell(row) for cell in columns.values()] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def files(row: Method) -> str:
    """The file or the folder of a method, below paceline/."""
    place = f"methods{row.home}".replace(".", "/")
    return f"`{place}.py`" if place.count("/") == 1 else f"`{place.rpartition('/')[0]}/`"


def exported(engine: str) -> Callable[[Method], str]:
    """Whether a head is exported for an engine, and what is different there."""
    return lambda row: f"yes, {row.exports[engine]}".rstrip(", ") if engine in row.exports else "no"


def tables() -> dict[str, str]:
    """Every table by its name."""
    heads = [row for row in ROWS if "PATH_OR_NAME" in row.usage]
    code = "`{}`".format
    return {
        "drafters": table({
            "method": lambda row: row.title, "`--drafter`": lambda row: code(row.usage),
            "class": lambda row: code(row.drafter), "needs": lambda row: row.needs,
            "drafts": lambda row: row.drafts, "from": lambda row: row.how,
        }, ROWS),
        "keys": table({
            "method": lambda row: code(row.name), "`--drafter`": lambda row: code(row.usage),
            "keys": lambda row: ", ".join(map(code, keys_of(spec_class(row.name)))),
        }, ROWS),
        "files": table({
            "method": lambda row: row.title, "papers": lambda row: row.papers, "files": files,
        }, ROWS),
        "heads": table({
            "method": lambda row: f"{code(row.name)} ({row.title})", "is": lambda row: row.how,
            "drafts": lambda row: row.drafts,
        }, [row for row in heads if "head" in row.needs]),
        "exports": table(
            {"head": lambda row: row.title, **{f"`--to {engine}`": exported(engine) for engine in ENGINES}}, heads
        ),
    }  # fmt: skip


def renewed(page: str) -> str:
    """A page with its tables as they are now."""
    made = tables()
    pattern = r"(<!-- methods: (\w+) -->\n).*?(<!-- end -->)"
    return re.sub(pattern, lambda one: f"{one[1]}{made[one[2]]}\n{one[3]}", page, flags=re.S)


if __name__ == "__main__":
    for path in DOCS.glob("*.md"):
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
