"""`python -m examples.tiny_hybrid`: the training of the model, and its packaging with what was measured."""

from collections import Counter
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
_RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of the training.")]
PROMPTS = Path(__file__).parent / "prompts.jsonl"


@app.command()
def train(
    run: _RunArgument,
    steps: Annotated[int, typer.Option(min=1, help="Of 2,048 tokens each; more than before goes on.")] = 1200,
) -> None:
    """Train the model and its MTP module; a stopped run goes on from its last checkpoint."""
    from .train import train

    train(run, steps=steps)


@app.command()
def package(
    run: _RunArgument,
    out: Annotated[Path, typer.Argument(help="The folder of the packaged model.")],
    note: Annotated[str | None, typer.Option(help="What the card says of the training besides its settings.")] = None,
) -> None:
    """Measure the acceptance of a trained model on prompts that it has not seen, and package it."""
    import torch
    from transformers import AutoTokenizer

    from paceline.measure.prompts import read_lines

    from .corpus import LICENCES, files, held_out_heads
    from .evaluate import measure, on_text
    from .model import load
    from .package import package
    from .train import LENGTH, summary

    model, mtp = load(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    sizes = Counter(path.split("/")[0] for path, _ in files(held_out=False))
    suites = {
        "prompts written by hand": [line.turns[0] for line in read_lines(PROMPTS)],
        "functions of held-out files": list(held_out_heads()),
    }
    rows = [row for name, texts in suites.items() for row in measure(model, mtp, tokenizer, name, texts)]
    text = torch.tensor(tokenizer("".join(text for _, text in files(held_out=True)))["input_ids"][: 32 * LENGTH])
    training = {**summary(run), **on_text(model, mtp, text.view(-1, LENGTH)), **({"note": note} if note else {})}
    versions = {name: python_version() if name == "python" else version(name) for name in sizes}
    sources = [f"{name} {versions[name]} ({LICENCES[name]}, {count} files)" for name, count in sizes.items()]
    record: dict[str, Any] = {"parameters_mtp": sum(weight.numel() for weight in mtp.parameters())}
    record |= {"parameters": model.num_parameters() + record["parameters_mtp"], "data": {"sources": sources}}
    package(run / "model", out, {**record, "training": training, "acceptance": rows})


if __name__ == "__main__":
    app()
