"""Where output goes: results to stdout, everything said along the way to stderr, and nothing but JSON under --json."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class Screen:
    """The two consoles of a run, and what the user wants to see.

    json: human output is left out, and stdout carries one line of JSON. progress: bars, where stderr is a terminal.
    """

    def __init__(self) -> None:
        self.debug, self.progress, self.json = False, True, False
        self._has_put, self._part = False, dict[str, object]()
        self.out = Console(highlight=False)
        self.err = Console(stderr=True, highlight=False)

    def force_colour(self) -> None:
        """Colour also where stdout is no terminal."""
        self.out = Console(highlight=False, force_terminal=True, no_color=False, color_system="standard")

    def say(self, text: str) -> None:
        """One line for the user, in rich markup, on stderr; silent under --json."""
        if not self.json:
            self.err.print(text, soft_wrap=True)

    def say_error(self, text: str) -> None:
        """The one message of a failure."""
        self.err.print(f"[bold red]Error:[/bold red] {escape(text)}", soft_wrap=not self.err.is_terminal)

    def put_json(self, value: dict[str, object], is_whole: bool = True) -> None:
        """The one line of --json. What is not whole waits for the error that the command is about to end with."""
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
        """The one line of --json where a command failed; nothing where its result is out already."""
        if self.json and not self._has_put:
            told = {"got": got, "expected": expected, "fix": fix}
            parts = {key: None if value is None else str(value) for key, value in told.items()}
            self.put_json({**self._part, "error": {"type": kind, "message": message, **parts}})

    @property
    def shows_progress(self) -> bool:
        """Whether bars may be drawn."""
        return self.progress and self.err.is_terminal

    @contextmanager
    def spinner(self, text: str) -> Iterator[None]:
        """Something is going on whose length nobody knows."""
        if not self.shows_progress:
            yield
            return
        with self.err.status(escape(text), spinner="dots"):
            yield

    @contextmanager
    def stages(self) -> Iterator[Callable[[str, int, int], None]]:
        """A bar fed by report(stage, done, total), one line for each stage."""
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with self._bars(*columns) as report:
            yield lambda stage, done, total: report(stage, stage, done, total)

    @contextmanager
    def pulling(self) -> Iterator[Callable[[str, int, int | None], None]]:
        """A bar fed by the progress of `zoo.pull`: bytes for some stages, things for others."""
        labels = {"wait": "waiting for another pull", "hash": "checking", "convert": "converting"}
        labels |= {"download": "downloading", "extract": "unpacking"}
        counts = (SpinnerColumn(), TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn())
        sizes = (
            SpinnerColumn(),
            TextColumn("{task.description:<12}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with self._bars(*sizes) as in_bytes, self._bars_after(*counts) as in_things:

            def report(stage: str, done: int, total: int | None) -> None:
                bars = in_bytes if stage in ("download", "extract") else in_things
                bars(stage, labels.get(stage, stage), done, total)

            yield report

    @contextmanager
    def _bars(self, *columns: object) -> Iterator[Callable[[str, str, int, int | None], None]]:
        if not self.shows_progress:
            yield lambda key, label, done, total: None
            return
        tasks: dict[str, object] = {}
        with Progress(*columns, console=self.err, transient=True) as bars:  # type: ignore[arg-type]

            def report(key: str, label: str, done: int, total: int | None) -> None:
                if key not in tasks:
                    tasks[key] = bars.add_task(label, total=total)
                bars.update(tasks[key], completed=done, total=total)  # type: ignore[arg-type]

            yield report

    _bars_after = _bars


def number(value: float | None, form: str = ".2f") -> str:
    """A number for people; a dash where there is none, as of the mean of nothing."""
    return "–" if value is None or not math.isfinite(value) else format(value, form)


def screen_of(ctx: typer.Context) -> Screen:
    """The screen of this run."""
    root = ctx.find_root()
    if not isinstance(root.obj, Screen):
        root.obj = Screen()
    return root.obj


def _set_debug(ctx: typer.Context, value: bool) -> bool:
    screen_of(ctx).debug |= value
    return value


def _set_no_progress(ctx: typer.Context, value: bool) -> bool:
    screen_of(ctx).progress &= not value
    return value


def _set_json(ctx: typer.Context, value: bool) -> bool:
    screen_of(ctx).json |= value
    return value


DebugOption = Annotated[
    bool,
    typer.Option(
        "--debug", metavar="", callback=_set_debug, is_eager=True, help="Show stack traces and library warnings."
    ),
]
NoProgressOption = Annotated[
    bool,
    typer.Option("--no-progress", metavar="", callback=_set_no_progress, is_eager=True, help="Draw no progress bars."),
]
JsonOption = Annotated[
    bool,
    typer.Option(
        "--json", metavar="", callback=_set_json, is_eager=True, help="Print one line of JSON and nothing else."
    ),
]
