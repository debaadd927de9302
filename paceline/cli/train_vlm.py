"""What `paceline train vlm` shows: a bar for each stage where stderr is a terminal, else a line every half minute."""

from typing import TYPE_CHECKING, Any

from rich import box
from rich.markup import escape
from rich.table import Table

from .screen import Screen
from .train_view import Bar, bar_of

if TYPE_CHECKING:
    from ..train.stages import Done
    from ..train.vlm.stages import VlmEvent, VlmStages


def follow_vlm(stages: "VlmStages", stage: str, screen: Screen) -> dict[str, Any]:
    """Run one stage to its end; returns its result."""
    from ..train.stages import Done

    result: dict[str, Any] = {}
    with bar_of(screen, stage) as bar:
        for event in stages.run(stage):
            if isinstance(event, Done):
                result = {"path": str(event.path), **event.result}
                _say_done(event, screen)
            else:
                _show(event, bar, screen)
    return result


def _show(event: "VlmEvent", bar: Bar, screen: Screen) -> None:
    from ..train.log import Evaluated, Stepped
    from ..train.vlm.course import Begun
    from ..train.vlm.stages import Asking

    if isinstance(event, Begun):
        screen.say(f"{'going on with' if event.resumed else 'training for'} {event.steps} steps")
        if event.cost is not None:
            screen.say(escape(f"the whole stage: {event.cost}"))
    elif isinstance(event, Stepped):
        bar.at(event.step, event.steps, f"loss {event.loss:.3f}{_parts(event.parts)}")
    elif isinstance(event, Evaluated):
        agrees = f", agrees with the teacher {event.agreement[0]:.3f}" if event.agreement else ""
        screen.say(escape(f"step {event.step}: held-out loss {event.loss:.3f}{_parts(event.parts)}{agrees}"))
    elif isinstance(event, Asking):
        bar.at(event.done, event.total, f"questions, {event.right:.3f} right", label=f"{event.model}: {event.suite}")


def _parts(parts: dict[str, float]) -> str:
    return "".join(f", {name} {value:.3f}" for name, value in parts.items())


def _say_done(done: "Done", screen: Screen) -> None:
    if screen.json:
        return
    if done.stage == "eval":
        screen.out.print(_table(done.result))
    what = {"eyes": "tower and projector", "talk": "the packaged model", "distill": "the packaged sibling"}
    told = what.get(done.stage, "the results")
    screen.say(f"{told} in {escape(str(done.path))}" + (" (was there already)" if done.was_there else ""))
    if done.stage in ("talk", "distill"):
        merged = done.path.parent / ("model" if done.stage == "talk" else "model-small")
        screen.say(f"[dim]merged, for plain transformers:[/dim] {escape(str(merged))}")


def _table(results: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("Model", "Questions", "Number", "Right", "Every shape named"):
        table.add_column(heading, justify="left" if heading in ("Model", "Questions") else "right")
    for model, suites in results.items():
        for suite, result in suites.items():
            named = result.get("every shape named")
            told = "" if named is None else f"{named:.3f}"
            table.add_row(escape(model), escape(suite), str(result["questions"]), f"{result['right']:.3f}", told)
    return table
