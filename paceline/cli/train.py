"""`paceline train`: a bar for each stage where stderr is a terminal, else a line every half minute."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, final

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .options import Opt, command, quieten
from .screen import Screen, table_of

if TYPE_CHECKING:
    from ..train.log import Event
    from ..train.stages import Done, Preparing, Stages

Method = Literal["eagle", "eagle3", "medusa", "blockwise", "mtp", "space", "qat", "distill"]
_STAGES = ("prepare", "train", "eval")
_EVERY = 30.0  # seconds between two lines


@command
def train(
    method: Annotated[
        Method, typer.Argument(metavar="METHOD", help="eagle, eagle3, medusa, blockwise, mtp, space, qat or distill.")
    ],
    screen: Screen,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[STAGE] [KEY=VALUE]...",
            help="prepare, train or eval; default: all. Then what to change, for example train.lr=1e-3.",
        ),
    ] = None,
    config: Annotated[
        Path | None, Opt("A YAML file; it needs model, prompts and out.", short="-c", metavar="FILE")
    ] = None,
    target: Annotated[str | None, Opt("The same as model=MODEL.", short="-m", metavar="MODEL")] = None,
    prepared: Annotated[
        list[Path] | None,
        Opt("Answers that `prepare` wrote before, instead of that stage; repeatable.", metavar="FOLDER"),
    ] = None,
    out: Annotated[Path | None, Opt("The same as out=FOLDER.", short="-o", metavar="FOLDER")] = None,
) -> None:
    """Train a drafter for a model: the model answers prompts, a head learns from the answers, then it is measured.

    Each stage resumes where it was stopped. The result is a folder for --drafter head:FOLDER; qat and
    distill train a draft for `--drafter self-int4:FOLDER` and `--drafter model:FOLDER`.

    Example:  paceline train eagle3 --config run.yaml train.epochs=3
    """
    stages = [word for word in words or [] if "=" not in word]
    given = {"model": target, "out": out and str(out), "answers": [str(one) for one in prepared or ()] or None}
    overrides = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items() if value is not None]
    overrides += [word for word in words or [] if "=" in word]
    if len(stages) > 1 or any(stage not in _STAGES for stage in stages):
        raise typer.BadParameter(f"{' '.join(stages)!r} is no stage; expected {', '.join(_STAGES)}, or KEY=VALUE")
    with screen.spinner("starting"):
        from ..train.config import read_config
        from ..train.run_folder import is_main
        from ..train.stages import Stages

        quieten(screen.debug)
        run = Stages(method, read_config(config, overrides))
    if not is_main():  # of several processes only one prints
        screen.progress, screen.json = False, True
    results: dict[str, object] = {"method": method, "out": run.config.out}
    for stage in stages or [one for one in _STAGES if one != "prepare" or not prepared]:
        results[stage] = _follow(run, stage, screen)
    if screen.json and is_main():
        screen.put_json(results)


@final
class _Bar:
    """Shows how far a stage is."""

    def __init__(self, screen: Screen, label: str, bars: Progress | None):
        self._screen, self._label, self._bars, self._said = screen, label, bars, time.monotonic()
        self._task = None if bars is None else bars.add_task(label, total=None, text="")

    def at(self, done: int, total: int, text: str, label: str | None = None) -> None:
        """How much is done, and a few words."""
        label = label or self._label
        if self._bars is not None and self._task is not None:
            text = f"{done}/{total} {text}"
            self._bars.update(self._task, description=label, completed=done, total=total, text=text)
        elif time.monotonic() - self._said >= _EVERY:
            self._said = time.monotonic()
            self._screen.say(escape(f"{label}: {done} of {total}, {text}"))


@contextmanager
def _bar_of(screen: Screen, label: str) -> Iterator[_Bar]:
    """A bar for one stage."""
    if not screen.shows_progress or screen.json:
        yield _Bar(screen, label, None)
        return
    text = (TextColumn("{task.fields[text]}"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), *text)
    with Progress(*columns, console=screen.err, transient=True) as bars:
        yield _Bar(screen, label, bars)


def _follow(stages: "Stages", stage: str, screen: Screen) -> dict[str, Any]:
    """Run one stage to its end; returns its last result, or those of several fractions of the data together."""
    from ..train.stages import Done, Preparing

    results: list[dict[str, Any]] = []
    with screen.spinner(f"loading {stages.config.model}"):
        stages.check()
    begin = time.monotonic()
    with _bar_of(screen, stage) as bar:

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


def _prepared(event: "Preparing", seconds: float, bar: _Bar) -> None:
    skipped = f", {event.skipped} prompts too long" if event.skipped else ""
    bar.at(event.done, event.total, f"answers, {event.tokens / max(seconds, 1e-9):.0f} tok/s{skipped}")


def _trained(event: "Event", fraction: float, bar: _Bar, screen: Screen) -> None:
    from ..train.log import Evaluated, Started, Stepped

    if isinstance(event, Started):
        of = "" if fraction == 1.0 else f" ({fraction:.0%} of the data)"
        how = "resuming with" if event.resumed else "training on"
        text = (
            f"{how} {event.answers} answers, {event.tokens} tokens{of}; {event.held_out} held out; {event.steps} steps"
        )
        screen.say(escape(text))
        if event.cost is not None:
            screen.say(escape(f"the whole run: {event.cost}"))
    elif isinstance(event, Stepped):
        agreement = " ".join(f"{share:.2f}" for share in event.agreement)
        skipped = f", {event.skipped} steps skipped" if event.skipped else ""
        text = f"loss {event.loss:.3f}, agreement {agreement}, {event.tokens_per_s:.0f} tok/s{skipped}"
        bar.at(event.step, event.steps, text)
    elif isinstance(event, Evaluated):
        agreement = " ".join(f"{share:.3f}" for share in event.agreement)
        text = f"step {event.step}, {event.tokens} tokens: loss {event.loss:.3f}, agreement {agreement}"
        screen.say(f"{escape(text)}, [bold]estimated accepted length {event.accepted_length:.2f}[/bold]")


def _say_done(done: "Done", screen: Screen) -> None:
    if screen.json:
        return
    if done.stage == "eval":
        columns: dict[str, Callable[[dict[str, Any]], str]] = {
            "Prompts": lambda trial: escape(trial["name"]),
            "Temperature": lambda trial: f"{trial['params']['temperature']:g}",
            "Tokens a pass": lambda trial: f"{trial['result']['mean_acceptance_length']:.2f}",
            "Acceptance by position": lambda trial: " ".join(f"{rate:.2f}" for rate in trial["result"]["per_position"]),
        }
        screen.out.print(table_of(columns, done.result["trials"]))
    what = {
        "prepare": f"{done.result.get('answers')} answers",
        "train": "the drafter",
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
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return "model" if "paceline_head" not in config else "self-int4" if config["method"] == "self_int4" else "head"
