"""The commands of the small models: training, and packaging with what was measured."""

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

PROMPTS = Path(__file__).parent / "prompts.jsonl"
_RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of the training.")]


def make_app(home: str) -> typer.Typer:
    """The commands of the model whose modules `train`, `evaluate` and `package` are below `home`."""
    app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

    def part(name: str) -> Any:
        return import_module(f"{home}.{name}")

    @app.command()
    def train(  # pyright: ignore[reportUnusedFunction]
        run: _RunArgument,
        steps: Annotated[int, typer.Option(min=1, help="Of 2,048 tokens each; more than before goes on.")] = 1200,
    ) -> None:
        """Train the model; a stopped run goes on from its last checkpoint."""
        part("train").train(run, steps=steps)

    @app.command()
    def package(  # pyright: ignore[reportUnusedFunction]
        run: _RunArgument,
        out: Annotated[Path, typer.Argument(help="The folder of the packaged model.")],
        note: Annotated[
            str | None, typer.Option(help="What the card says of the training besides its settings.")
        ] = None,
    ) -> None:
        """Measure the acceptance of a trained model on prompts that it has not seen, and package it."""
        import torch
        from transformers import AutoTokenizer

        from paceline.measure.prompts import read_lines

        from .corpus import files, held_out_heads, sources
        from .loop import LENGTH

        folder, suites = run / "model", {
            "prompts written by hand": [line.turns[0] for line in read_lines(PROMPTS)],
            "functions of held-out files": list(held_out_heads()),
        }  # fmt: skip
        text = AutoTokenizer.from_pretrained(folder)("".join(text for _, text in files(held_out=True)))
        held_out = torch.tensor(text["input_ids"][: 32 * LENGTH]).view(-1, LENGTH)
        record = {"data": {"sources": sources()}, **part("evaluate").evaluate(folder, suites, held_out)}
        record["training"] = part("train").summary(run) | record["training"] | ({"note": note} if note else {})
        part("package").package(folder, out, record)

    return app
