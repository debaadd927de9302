"""What `paceline train` shows: a bar for each stage where stderr is a terminal, else a line every half minute."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rich import box
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from .screen import Screen

if TYPE_CHECKING:
    from ..train.log import Event
    from ..train.stages import Done, Preparing, Stages

_EVERY = 30.0  # seconds between two lines


@final
class Bar:
    """Shows how far a stage is."""

    def __init__(self, screen: Screen, label: str, bars: Progress | None):
        self._screen, self._label, self._bars, self._said = screen, label, bars, time.monotonic()
        self._task = None if bars is None else bars.add_task(label, total=None, told="")

    def at(self, done: int, total: int, told: str, label: str | None = None) -> None:
        """How much is done, and a few words."""
        if self._bars is not None and self._task is not None:
            self._bars.update(
                self._task, description=label or self._label, completed=done, total=total, told=f"{done}/{total} {told}"
            )
        elif time.monotonic() - self._said >= _EVERY:
            self._said = time.monotonic()
            self._screen.say(escape(f"{label or self._label}: {done} of {total}, {told}"))


@contextmanager
def bar_of(screen: Screen, label: str) -> Iterator[Bar]:
    """A bar for one stage."""
    if not screen.shows_progress or screen.json:
        yield Bar(screen, label, None)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[told]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=screen.err, transient=True) as bars:
        yield Bar(screen, label, bars)


def follow(stages: "Stages", stage: str, screen: Screen) -> dict[str, Any]:
    """Run one stage to its end; returns its last result, or those of several fractions of the data together."""
    from ..train.stages import Done, Preparing

    results: list[dict[str, Any]] = []
    with screen.spinner(f"loading {stages.config.model}"):
        stages.check()
    begin = time.monotonic()
    with bar_of(screen, stage) as bar:

        def report(what: str, done: int, total: int) -> None:
            bar.at(done, total, "prompts", label=f"eval: {what}")

        events = stages.eval(report) if stage == "eval" else stages.prepare() if stage == "prepare" else stages.train()
        for event in events:
            if isinstance(event, Done):
                results.append({"path": str(event.path), **event.result})
                _say_done(event, screen)
            elif isinstance(event, Preparing):
                _prepared(event, time.monotonic() - begin, bar)
            else:
                _trained(event.event, event.fraction, bar, screen)
    return results[0] if len(results) == 1 else {"runs": results}


def _prepared(event: "Preparing", seconds: float, bar: Bar) -> None:
    skipped = f", {event.skipped} prompts too long" if event.skipped else ""
    bar.at(event.done, event.total, f"answers, {event.tokens / max(seconds, 1e-9):.0f} tok/s{skipped}")


def _trained(event: "Event", fraction: float, bar: Bar, screen: Screen) -> None:
    from ..train.log import Evaluated, Started, Stepped

    if isinstance(event, Started):
        of = "" if fraction == 1.0 else f" ({fraction:.0%} of the data)"
        how = "going on with" if event.resumed else "training on"
        text = (
            f"{how} {event.answers} answers, {event.tokens} tokens{of}; {event.held_out} held out; {event.steps} steps"
        )
        screen.say(escape(text))
        if event.cost is not None:
            screen.say(escape(f"the whole run: {event.cost}"))
    elif isinstance(event, Stepped):
        agreement = " ".join(f"{share:.2f}" for share in event.agreement)
        told = f"loss {event.loss:.3f}, agreement {agreement}, {event.tokens_per_s:.0f} tok/s"
        bar.at(event.step, event.steps, told + (f", {event.skipped} steps skipped" if event.skipped else ""))
    elif isinstance(event, Evaluated):
        agreement = " ".join(f"{share:.3f}" for share in event.agreement)
        text = f"step {event.step}, {event.tokens} tokens: loss {event.loss:.3f}, agreement {agreement}"
        screen.say(f"{escape(text)}, [bold]estimated accepted length {event.accepted_length:.2f}[/bold]")


def _say_done(done: "Done", screen: Screen) -> None:
    if screen.json:
        return
    if done.stage == "eval":
        screen.out.print(_table(done.result["trials"]))
    what = {
        "prepare": f"{done.result.get('answers')} answers",
        "train": "what drafts",
        "eval": "the measurements",
    }[done.stage]
    screen.say(f"{what} in {escape(str(done.path))}" + (" (was there already)" if done.was_there else ""))
    if done.stage == "train":
        from ..train.finish import model_beside

        tuned = model_beside(done.path)
        model = escape(str(tuned)) if (tuned / "config.json").exists() else "MODEL"
        drafter = escape(f"{_kind(done.path)}:{done.path}")
        screen.say(f"[dim]use it:[/dim] paceline generate {model} --drafter {drafter} --chat ...")


def _kind(folder: Path) -> str:
    """How the command line calls a drafter that lies in this folder."""
    told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return "model" if "paceline_head" not in told else "self-int4" if told["method"] == "self_int4" else "head"


def _table(trials: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("Prompts", "Temperature", "Tokens a pass", "Acceptance by position"):
        table.add_column(heading, justify="left" if heading == "Prompts" else "right")
    for trial in trials:
        result = trial["result"]
        table.add_row(
            escape(trial["name"]),
            f"{trial['params']['temperature']:g}",
            f"{result['mean_acceptance_length']:.2f}",
            " ".join(f"{rate:.2f}" for rate in result["per_position"]),
        )
    return table
