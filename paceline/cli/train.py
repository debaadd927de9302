"""`paceline train`."""

import json
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
    qat = "qat"
    distill = "distill"


_STAGES = ("prepare", "train", "eval")


def train(
    ctx: typer.Context,
    method: Annotated[
        Method,
        typer.Argument(metavar="METHOD", help="eagle, eagle3, medusa, blockwise, mtp, space, qat or distill."),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[STAGE] [KEY=VALUE]...",
            help="prepare, train or eval; default: all. Then what to change, for example train.lr=1e-3.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", help="A YAML file; it needs model, prompts and out."),
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", "-m", metavar="MODEL", help="The same as model=MODEL.", show_default=False)
    ] = None,
    prepared: Annotated[
        list[Path] | None,
        typer.Option(
            "--prepared",
            metavar="FOLDER",
            show_default=False,
            help="Answers that `prepare` wrote before, in place of that stage; may be given more than once.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FOLDER", help="The same as out=FOLDER.", show_default=False)
    ] = None,
    json_output: JsonOption = False,
    no_progress: NoProgressOption = False,
    debug: DebugOption = False,
) -> None:
    """Train what drafts for a model: the model answers prompts, a head learns from them, then it is measured.

    Each stage goes on where it was stopped. The result is a folder for --drafter head:FOLDER; qat and
    distill train a draft for `--drafter self-int4:FOLDER` and `--drafter model:FOLDER`.

    Example:  paceline train eagle3 --config run.yaml train.epochs=3
    """
    screen = screen_of(ctx)
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
        from .engine import quieten

        quieten(screen.debug)
        run = Stages(method.value, read_config(config, overrides))
    if not is_main():  # of several processes one speaks
        screen.progress, screen.json = False, True
    told: dict[str, object] = {"method": method.value, "out": run.config.out}
    for stage in stages or [one for one in _STAGES if one != "prepare" or not prepared]:
        told[stage] = follow(run, stage, screen)
    if screen.json and is_main():
        screen.put_json(told)
