"""`paceline train`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .screen import DebugOption, JsonOption, NoProgressOption, screen_of
from .train_view import follow


class Method(StrEnum):
    """What can be trained."""

    eagle = "eagle"
    eagle3 = "eagle3"
    medusa = "medusa"
    blockwise = "blockwise"
    mtp = "mtp"
    space = "space"


_STAGES = ("prepare", "train", "eval")


def train(
    ctx: typer.Context,
    method: Annotated[Method, typer.Argument(metavar="METHOD", help="eagle, eagle3, medusa, blockwise, mtp or space.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[STAGE] [KEY=VALUE]...",
            help="prepare, train or eval; default: all three. Then what to change, for example train.lr=1e-3.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", help="A YAML file; it needs model, prompts and out."),
    ] = None,
    json_output: JsonOption = False,
    no_progress: NoProgressOption = False,
    debug: DebugOption = False,
) -> None:
    """Train what drafts for a model: the model answers prompts, a head learns from them, then it is measured.

    Each stage goes on where it was stopped. The result is a folder for --drafter head:FOLDER.

    Example:  paceline train eagle3 --config run.yaml train.epochs=3
    """
    screen = screen_of(ctx)
    stages = [word for word in words or [] if "=" not in word]
    overrides = [word for word in words or [] if "=" in word]
    if len(stages) > 1 or any(stage not in _STAGES for stage in stages):
        raise typer.BadParameter(f"{' '.join(stages)!r} is no stage; expected {', '.join(_STAGES)}, or KEY=VALUE")
    with screen.spinner("starting"):
        from ..train.config import read_config

        run = read_config(config, overrides)
        from ..train.stages import Stages, is_main
        from .engine import quieten

        quieten(screen.debug)
    if not is_main():  # of several processes one speaks
        screen.progress, screen.json = False, True
    made = Stages(method.value, run)
    told: dict[str, object] = {"method": method.value, "out": run.out}
    for stage in stages or _STAGES:
        told[stage] = follow(made, stage, screen)
    if screen.json and is_main():
        screen.put_json(told)
