"""A log that a later run goes on from, a clock, a progress bar and tables: of the scripts about pictures."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from paceline.errors import ConfigError


class Log:
    """JSON lines: settings first, then a line for each piece of work; a later run leaves out what is there.

    Raises `ConfigError` where the file is of other settings.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]):
        self.path, self.lines = path, list[dict[str, Any]]()
        self.head: dict[str, Any] = {"settings": json.loads(json.dumps(dict(settings), default=str))}
        if path is None:
            return
        if path.is_file() and (text := path.read_text(encoding="utf-8")):
            kept = text[: text.rfind("\n") + 1]  # a line that was being written when the run was stopped is dropped
            found = [json.loads(line) for line in kept.splitlines()]
            if not found or found[0]["settings"] != self.head["settings"]:
                raise ConfigError(f"{str(path)!r} is of another run", fix="take another file, or the same options")
            self.head, self.lines = found[0], found[1:]
            path.write_text(kept, encoding="utf-8")

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Write the head; a run that goes on keeps the facts that it finds."""
        if self.head.keys() == {"settings"}:
            self.head |= json.loads(json.dumps(dict(facts)))
            self._write("w", self.head)

    def add(self, line: dict[str, Any]) -> None:
        """One piece of work."""
        self.lines.append(json.loads(json.dumps(line)))
        self._write("a", line)

    def _write(self, mode: str, line: Mapping[str, Any]) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open(mode, encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


class Patience:
    """Seconds that a run may take; None: as many as it needs."""

    def __init__(self, seconds: float | None):
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        """Whether nothing more should be begun."""
        return self._end is not None and time.monotonic() > self._end


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr; `step(what is done now)` moves it on."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda now: progress.update(task, advance=1, description=f"{what}: {now}")


def table(columns: Seq[str], rows: Seq[Seq[object]]) -> str:
    """Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in cells)} |" for cells in lines)
