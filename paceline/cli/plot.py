"""`paceline plot`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from .screen import DebugOption, JsonOption, NoProgressOption, screen_of


class FormatChoice(StrEnum):
    """The values of --format."""

    png = "png"
    svg = "svg"


def plot(
    ctx: typer.Context,
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULTS...", help="Folders that `paceline bench` wrote, or files of `paceline doctor --json`."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Default: `plots` in the first folder.", show_default=False),
    ] = None,
    picture_format: Annotated[
        list[FormatChoice] | None,
        typer.Option("--format", "-f", help="Repeat it for several; default: both.", show_default=False),
    ] = None,
    json_output: JsonOption = False,
    no_progress: NoProgressOption = False,
    debug: DebugOption = False,
) -> None:
    """Draw results: speed-ups, acceptance, the cost of a pass, batch sizes, windows. Several results are compared.

    A picture that the results give no data for is left out, and the reason told.

    Example:  paceline plot results/lookup results/self-int4 --out plots
    """
    screen = screen_of(ctx)
    from ..eval.plots import draw
    from ..eval.results import open_results

    opened = [open_results(path) for path in results]
    folder = out or next((one.path for one in opened if one.path.is_dir()), Path()) / "plots"
    with screen.spinner("drawing"):
        files, left_out = draw(opened, folder, [one.value for one in picture_format or FormatChoice])
    if screen.json:
        screen.put_json({"files": [str(file) for file in files], "left_out": left_out})
        return
    for file in files:
        screen.out.print(escape(str(file)), soft_wrap=True)
    for name, reason in left_out.items():
        screen.say(f"[dim]left out {escape(name)}: {escape(reason)}[/dim]")
