"""`paceline train`: train a drafter. Shows a progress bar, or a line every half minute without a terminal."""

import json
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from ..methods.table import trained, trained_method
from .help import Command
from .options import command, opt, quieten
from .screen import Screen, table_of

if TYPE_CHECKING:
    from ..train.stages import Done, Stages

_STAGES = ("prepare", "train", "eval")


class TrainCommand(Command):
    """Names the methods in its help, also those of installed packages, which are loaded for it."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print it."""
        method: Any = next(param for param in self.params if param.name == "method")
        method.help = f"One of {', '.join(trained())}."
        super().format_help(ctx, formatter)


@command
def train(
    method: Annotated[str, typer.Argument(metavar="METHOD")],
    screen: Screen,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[STAGE] [KEY=VALUE]...",
            help="prepare, train or eval; default: all. Then settings to change, for example train.lr=1e-3.",
        ),
    ] = None,
    config: Path | None = opt(None, "A YAML file; it needs model, prompts and out.", short="-c", metavar="FILE"),
    target: str | None = opt(None, "The same as model=MODEL.", short="-m", metavar="MODEL"),
    prepared: list[Path] | None = opt(
        None, "Answers of an earlier `prepare`, instead of that stage; repeatable.", metavar="FOLDER"
    ),
    out: Path | None = opt(None, "The same as out=FOLDER.", short="-o", metavar="FOLDER"),
) -> None:
    """Train a drafter for a model: the model answers prompts, a head learns from the answers, then it is measured.

    Each stage resumes where it was stopped. The result is a folder for --drafter head:FOLDER; qat and
    distill train a draft for `--drafter self-int4:FOLDER` and `--drafter model:FOLDER`.

    Example:  paceline train eagle3 --config run.yaml train.epochs=3
    """
    trained_method(method)  # which raises for an unknown one
    stages = [word for word in words or [] if "=" not in word]
    values = {"model": target, "out": out and str(out), "answers": [str(path) for path in prepared or ()] or None}
    overrides = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items() if value is not None]
    overrides += [word for word in words or [] if "=" in word]
    if len(stages) > 1 or any(stage not in _STAGES for stage in stages):
        raise typer.BadParameter(f"{' '.join(stages)!r} is not a stage; expected {', '.join(_STAGES)}, or KEY=VALUE")
    with screen.spinner("starting"):
        from ..train.config import read_config
        from ..train.run_folder import is_main, leave_group
        from ..train.stages import Stages

        quieten(screen.debug)
        run = Stages(method, read_config(config, overrides))
    if not is_main():  # of several processes only one prints
        screen.progress, screen.json = False, True
    results: dict[str, object] = {"method": method, "out": run.config.out}
    for stage in stages or [name for name in _STAGES if name != "prepare" or not prepared]:
        results[stage] = _follow(run, stage, screen)
    leave_group()
    if screen.json and is_main():
        screen.put_json(results)


def _follow(run: "Stages", stage: str, screen: Screen) -> dict[str, Any]:
    from ..train.log import Evaluated, Started, Stepped
    from ..train.stages import Done, Preparing

    result = dict[str, Any]()
    had_few = run.config.start is not None  # which has learnt already
    with screen.spinner(f"loading {run.config.model}"):
        run.check()
    begin = time.monotonic()
    with screen.stages() as report:

        def report_eval(subject: str, done: int, total: int | None) -> None:
            report(f"eval: {subject}", done, total, "prompts")

        for event in run.run(stage, report_eval):
            if isinstance(event, Done):
                result = {"path": str(event.path), **event.result}
                _say_done(event, run.method, run.config.model, screen)
            elif isinstance(event, Preparing):
                most = event.total * run.config.prepare.part[1] * run.config.prepare.max_tokens
                had_few = had_few or _warn_few(f"{event.total} prompts, whose answers have at most", most, screen)
                skipped = f", {event.skipped} prompts too long" if event.skipped else ""
                pace = event.tokens / max(time.monotonic() - begin, 1e-9)
                report(stage, event.done, event.total, f"answers, {pace:.0f} tok/s{skipped}")
            elif isinstance(event, Stepped):
                agreement = " ".join(f"{share:.2f}" for share in event.agreement)
                skipped = f", {event.skipped} steps skipped" if event.skipped else ""
                text = f"loss {event.loss:.3f}, agreement {agreement}, {event.tokens_per_s:.0f} tok/s{skipped}"
                report(stage, event.step, event.steps, text)
            elif isinstance(event, Started):
                answers = f"{event.data['answers']} answers with"
                had_few = had_few or _warn_few(answers, event.data["tokens"], screen)
                how = "resuming with" if event.resumed else "training on"
                data = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in event.data.items())
                screen.say(escape(f"{how} {data}; {event.steps} steps"))
            elif isinstance(event, Evaluated):
                agreement = " ".join(f"{share:.3f}" for share in event.agreement)
                text = f"step {event.step}, {event.tokens} tokens: loss {event.loss:.3f}, agreement {agreement}"
                screen.say(f"{escape(text)}, [bold]estimated accepted length {event.accepted_length:.2f}[/bold]")
    return result


def _warn_few(subject: str, tokens: int, screen: Screen) -> bool:
    """Warn where so many answer tokens are too few, and return whether they are."""
    from ..train.data import FEW_TOKENS

    if tokens >= FEW_TOKENS:
        return False
    text = f"{subject} {tokens:,} tokens. Below {FEW_TOKENS:,} a drafter hardly learns; the packaged heads learnt from "
    text += "190,000 (SPACE) to ten million (EAGLE-1), see docs/heads.md. Add prompts."
    screen.warn("Few answers:", text)
    return True


def _say_done(done: "Done", method: str, target: str, screen: Screen) -> None:
    if screen.json:
        return
    if done.stage == "eval":
        columns = {
            "Prompts": lambda trial: escape(trial["name"]),
            "Temperature": lambda trial: f"{trial['params']['temperature']:g}",
            "Tokens a pass": lambda trial: f"{trial['result']['mean_acceptance_length']:.2f}",
            "Acceptance by position": lambda trial: " ".join(f"{rate:.2f}" for rate in trial["result"]["per_position"]),
        }
        screen.out.print(table_of(columns, done.result["trials"]))
    answers = f"{done.result.get('answers')} answers"
    subject = {"prepare": answers, "train": "the drafter", "eval": "the measurements"}[done.stage]
    screen.say(f"{subject} in {escape(str(done.path))}" + (" (was there already)" if done.was_there else ""))
    if done.stage == "train":
        from ..train.artefact import model_beside

        tuned = model_beside(done.path)
        model = str(tuned) if (tuned / "config.json").exists() else target
        words = shlex.join(["paceline", "generate", model, "--drafter", f"{trained_method(method).word}:{done.path}"])
        screen.say(f"[dim]use it:[/dim] {escape(words)} --chat ...")
