"""The help of a command: the names of its options are whole in a terminal of 80 columns, beside what they do."""

import inspect
import re
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

_NAMES = re.compile(r"-[\w-]+(?:(?:, | / |; )-[\w-]+)*")


class Command(TyperCommand):
    """A command that prints its help in panels of two columns. Typer's have six, and cut names to make room."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print it."""
        print_help(self, ctx)


def print_help(command: Any, ctx: Any) -> None:
    """Print the help of a command or group, without rich markup, which would eat brackets."""
    console = Console(highlight=False)
    console.print(Padding(Text(command.get_usage(ctx), "bold"), 1))
    console.print(Padding(Text("\n\n".join(_paragraphs(command))), (0, 1, 1, 1)))
    panels: dict[str, Table] = {}
    for param in sorted(command.get_params(ctx), key=lambda parameter: parameter.param_type_name):  # arguments first
        if record := param.get_help_record(ctx):
            title = getattr(param, "rich_help_panel", None) or f"{param.param_type_name.capitalize()}s"
            _add(panels.setdefault(title, _grid()), *record)
    for name, subcommand in getattr(command, "commands", {}).items():
        _add(panels.setdefault("Commands", _grid()), name, _paragraphs(subcommand)[0])
    for title, table in panels.items():
        console.print(Panel(table, title=title, title_align="left", border_style="dim"))
    if command.epilog:
        console.print(Padding(Text(command.epilog), 1))


def _paragraphs(command: Any) -> list[str]:
    return [paragraph.replace("\n", " ") for paragraph in inspect.cleandoc(command.help or "").split("\n\n")]


def _grid() -> Table:
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(no_wrap=True, style="bold cyan")
    table.add_column(ratio=1)
    return table


def _add(table: Table, names: str, text: str) -> None:
    """A row: the names, and the kind of value before the text. Long names stand below each other."""
    match = _NAMES.match(names)
    name, kind = (match[0], names[match.end() :].strip()) if match else (names, "")
    indent = "    " if name.startswith("--") else ""
    told = Text.assemble((f"{kind}  " if kind else "", "yellow"), text.replace("\\[", "["))  # older typers escape it
    told.highlight_regex(r"  \[[^\[]+\]$", "dim")
    table.add_row(Text(indent + name), told)
