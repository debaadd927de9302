"""The output of commands: results to stdout, messages and progress to stderr; with --json only one line of JSON."""

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..engine.output import Completion, StreamChunk

LINE_EVERY_S = 30.0
STYLES = {"drafted": "green", "recovered": "yellow", "bonus": "cyan", "plain": "default"}
"""The colour of a token by its `Origin`."""


class Screen:
    """The two consoles of a run.

    json: print one line of JSON on stdout instead of text. progress: draw bars where stderr is a terminal.
    """

    def __init__(self) -> None:
        self.debug, self.progress, self.json = False, True, False
        self._has_put, self._part = False, dict[str, object]()
        self.out = Console(highlight=False)
        self.err = Console(stderr=True, highlight=False)

    def force_colour(self) -> None:
        """Colour also where stdout is no terminal."""
        self.out = Console(highlight=False, force_terminal=True, no_color=False, color_system="standard")

    def print(self, text: str) -> None:
        """One line of the result, in rich markup; wrapped at the width of a terminal, and not in a file."""
        self.out.print(text, soft_wrap=not self.out.is_terminal)

    def heading(self, text: str) -> None:
        """The title of a list of entries."""
        self.out.print(f"\n[bold]{text}[/bold]")

    def entry(self, name: str, text: str) -> None:
        """A name that is to be copied, whole at any width, and below it what it is, in rich markup."""
        self.out.print(f"  [cyan]{escape(name)}[/cyan]", soft_wrap=True)
        if self.out.is_terminal:
            self.out.print(Padding(text, (0, 0, 0, 6)))
        else:
            self.out.print(f"      {text}", soft_wrap=True)

    def print_path(self, path: object) -> None:
        """A file that was written, on a line of its own."""
        self.out.print(escape(str(path)), soft_wrap=True)

    def say(self, text: str) -> None:
        """One line for the user, in rich markup, on stderr; silent under --json."""
        if not self.json:
            self.err.print(text, soft_wrap=True)

    def warn(self, subject: str, text: str = "") -> None:
        """As `say`, of plain text: what to look at in yellow, then more of it."""
        self.say(f"[yellow]{escape(subject)}[/yellow] {escape(text)}".rstrip())

    def say_error(self, text: str) -> None:
        """The one message of a failure."""
        self.err.print(f"[bold red]Error:[/bold red] {escape(text)}", soft_wrap=not self.err.is_terminal)

    def put_json(self, value: dict[str, object], is_whole: bool = True) -> None:
        """Print the one line of --json. An incomplete value is kept for the line of the error that follows."""
        if not is_whole:
            self._part = value
            return
        from ..system.files import to_json

        self._has_put = True
        as_it_is = "utf" in (sys.stdout.encoding or "").lower()
        sys.stdout.write(to_json(value, ensure_ascii=not as_it_is) + "\n")
        sys.stdout.flush()

    def put_error(
        self, kind: str, message: str, got: object = None, expected: object = None, fix: str | None = None
    ) -> None:
        """Print the one line of --json for a failed command, unless its result is out already."""
        if self.json and not self._has_put:
            parts = {"got": got, "expected": expected, "fix": fix}
            parts = {key: None if value is None else str(value) for key, value in parts.items()}
            self.put_json({**self._part, "error": {"type": kind, "message": message, **parts}})

    @property
    def shows_progress(self) -> bool:
        """Whether bars may be drawn."""
        return self.progress and self.err.is_terminal

    @contextmanager
    def spinner(self, text: str) -> Iterator[None]:
        """For work of unknown length."""
        if not self.shows_progress:
            yield
            return
        with self.err.status(escape(text), spinner="dots"):
            yield

    @contextmanager
    def stages(self) -> Iterator[Callable[..., None]]:
        """A bar for each stage, fed by report(stage, done, total, text). Without a terminal: a line every 30 s."""
        if not self.shows_progress:
            said = time.monotonic()

            def say(label: str, done: int, total: int | None, text: str = "") -> None:
                nonlocal said
                if time.monotonic() - said >= LINE_EVERY_S:
                    said = time.monotonic()
                    parts = f"{label}: {done}", f" of {total}" if total else "", f", {text}" if text else ""
                    self.say(escape("".join(parts)))

            yield say
            return
        tasks: dict[str, TaskID] = {}
        columns = (MofNCompleteColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
        shown = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), *columns)
        with Progress(*shown, console=self.err, transient=True) as bars:

            def draw(label: str, done: int, total: int | None, text: str = "") -> None:
                if label not in tasks:
                    tasks[label] = bars.add_task(label, total=total, text=text)
                bars.update(tasks[label], completed=done, total=total, text=text)

            yield draw

    @contextmanager
    def pulling(self) -> Iterator[Callable[[str, int, int | None], None]]:
        """Bars fed by the progress of `zoo.pull`, of which some stages count bytes."""
        labels = {"wait": "waiting for another pull", "hash": "checking", "convert": "converting"}
        labels |= {"download": "downloading", "extract": "unpacking"}
        with self.stages() as bars:

            def report(stage: str, done: int, total: int | None) -> None:
                unit, name = (10**6, "MB") if stage in ("download", "extract") else (1, "")
                bars(labels.get(stage, stage), done // unit, total and total // unit, name)

            yield report


def duration(seconds: float) -> str:
    """A rough time, rounded up: "20 seconds", "3 minutes", "2 hours"."""
    for unit, size in (("hour", 3600), ("minute", 60)):
        if seconds > 1.5 * size:
            return f"{math.ceil(seconds / size)} {unit}s"
    return f"{max(10, 10 * math.ceil(seconds / 10))} seconds"


def number(value: float | None, form: str = ".2f", unit: str = "") -> str:
    """A formatted number; a dash where there is none."""
    return "–" if value is None or not math.isfinite(value) else format(value, form) + unit


def table_of(
    columns: dict[str, Callable[[Any], str]], rows: Iterable[Any], text_columns: int = 1, title: str | None = None
) -> Table:
    """A table with a line for each row; the function of each column formats its cell.

    The first `text_columns` columns hold text, the others numbers.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(columns):
        is_text = index < text_columns
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold" if is_text else "ellipsis")
    for row in rows:
        table.add_row(*[cell(row) for cell in columns.values()])
    return table


class Painter:
    """Turns the chunks of one answer into coloured text.

    A character may span tokens: it gets the colour of the token that completes it.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stop: Sequence[str] = ()):
        from ..sampling.detokenize import Detokenizer

        self._text = Detokenizer(tokenizer, stop)

    def paint(self, chunk: "StreamChunk | Completion") -> Text:
        """The text that this chunk, or a whole answer, completes."""
        pieces = self._text.pieces(chunk.token_ids, chunk.finish_reason is not None)
        return Text.assemble(*zip(pieces, map(STYLES.__getitem__, chunk.origins), strict=True))


def nothing_drafted(reasons: Iterable[str | None]) -> str:
    """That no answer has a draft, with the known reasons, the most frequent first."""
    known = [reason for reason, _ in Counter(filter(None, reasons)).most_common()]
    return f"nothing was drafted: {'; '.join(known)}" if known else "nothing was drafted"


def legend(origins: Iterable[str]) -> Text:
    """What the colours mean, and how many tokens had each."""
    from ..measure.page import MEANINGS

    counts, text = Counter(origins), Text()
    for origin, style in STYLES.items():
        if count := counts[origin]:
            text.append("■ ", style).append(f"{MEANINGS[origin]} {count}   ", "dim")
    return text


NEAR_TIE = "[yellow]~[/yellow]"


def mark(passed: bool) -> str:
    """A tick or a cross."""
    return "[green]✓[/green]" if passed else "[red]✗[/red]"


def _flag(name: str, attribute: str, value: bool, help: str) -> Any:
    """An option that sets an attribute of the screen, before the other options are read."""

    def callback(ctx: typer.Context, is_given: bool) -> bool:
        if is_given:
            setattr(ctx.obj, attribute, value)
        return is_given

    return typer.Option(name, metavar="", callback=callback, is_eager=True, help=help)


_JsonFlag = Annotated[bool, _flag("--json", "json", True, "Print one line of JSON and nothing else.")]
NoProgressFlag = Annotated[bool, _flag("--no-progress", "progress", False, "Draw no progress bars.")]
DebugFlag = Annotated[bool, _flag("--debug", "debug", True, "Show stack traces and library warnings.")]
FLAGS = {"json_output": _JsonFlag, "no_progress": NoProgressFlag, "debug": DebugFlag}
"""What every command takes, by parameter name."""
