"""`paceline export`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from .screen import DebugOption, JsonOption, NoProgressOption, screen_of


class EngineChoice(StrEnum):
    """The values of --to."""

    vllm = "vllm"
    sglang = "sglang"
    speculators = "speculators"


def export(
    ctx: typer.Context,
    head: Annotated[
        str, typer.Argument(metavar="HEAD", help="A folder that `paceline train` wrote, or a packaged head's name.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; a new one.")],
    to: Annotated[EngineChoice, typer.Option("--to", help="Who is to read it.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="TARGET",
            help="The head's target, for layouts that hold its output rows or its name.",
            show_default=False,
        ),
    ] = None,
    num_tokens: Annotated[
        int, typer.Option("--num-speculative-tokens", "-k", min=1, help="Tokens to draft a step there.")
    ] = 3,
    json_output: JsonOption = False,
    no_progress: NoProgressOption = False,
    debug: DebugOption = False,
) -> None:
    """Write a trained head for vLLM, SGLang or speculators, and check that it reads back as the same head.

    Example:  paceline export heads/mine mine-vllm --to vllm --model smollm2-135m
    """
    screen = screen_of(ctx)
    with screen.spinner("starting"):
        from transformers.utils import logging

        from ..export import export_head
        from ..export.folder import check_new
        from ..runner import load_model
        from ..zoo import resolve
        from ..zoo.packaged import head_folder

    logging.disable_progress_bar()
    check_new(out)  # before a model is fetched
    place, target = head_folder(head), None
    if model is not None:
        with screen.pulling() as progress:
            folder = resolve(model, progress=progress)
        with screen.spinner(f"loading {model}"):
            target = load_model(folder, device="cpu")
    with screen.spinner("writing and reading back"):
        done = export_head(place, to.value, out, target, model, num_tokens)
    if screen.json:
        screen.put_json(
            {
                "folder": str(done.folder),
                "method": done.method,
                "engine": done.engine,
                "serve": done.serve,
                "notes": list(done.notes),
                "largest_difference": done.largest_difference,
            }
        )
        return
    screen.say(f"[green]✓[/green] reads back as the same head; logits differ by at most {done.largest_difference:g}")
    for note in done.notes:
        screen.say(f"[yellow]{escape(note)}[/yellow]")
    screen.out.print(done.serve, soft_wrap=True, markup=False)
