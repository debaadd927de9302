"""`python -m examples.tiny_vlm`: the demo, the training of the model, and its scenes as a file of prompts."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline import PacelineError

MODEL, HEAD = "tiny-vlm", "tiny-vlm-eagle3"
STAGES = ("pretrain", "sft", "distill", "eval")
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
_console, _err = Console(), Console(stderr=True)
_JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def demo(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="A vision-language model.")] = MODEL,
    image: Annotated[str | None, typer.Option("--image", "-i", help="Your own image instead of scenes.")] = None,
    question: Annotated[list[str] | None, typer.Option("--question", "-q", help="About it; may be repeated.")] = None,
    num_scenes: Annotated[int, typer.Option(min=1, max=1000, help="How many scenes to draw.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the scenes, and of sampled answers.")] = 0,
    drafter: Annotated[str | None, typer.Option(help="As `paceline generate` takes it.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of an answer.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0: greedy.")] = 0.0,
    dtype: Annotated[str | None, typer.Option(help="As `paceline generate` takes it.")] = None,
    device: Annotated[str | None, typer.Option(help="As `paceline generate` takes it.")] = None,
    json_output: _JsonOption = False,
) -> None:
    """Watch questions about images answered plainly and with speculation.

    The default model knows drawn shapes, signs and bar charts. Its default drafter is its EAGLE-3 head, which reads its
    hidden states and so knows what it sees.
    """
    if question and image is None:
        raise typer.BadParameter("--question is about an --image; the scenes have questions of their own")
    from paceline import LLM, SamplingParams
    from paceline.config import parse
    from paceline.hf.images import OWN_CHOICE, open_image
    from paceline.system.provenance import provenance
    from paceline.zoo import resolve

    from . import demo as shows
    from .questions import Question

    config = parse(drafter or (f"head:{HEAD}" if model == MODEL else "lookup"))
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    if image is None:
        images = shows.scenes(num_scenes, seed)
    else:
        queries = tuple(Question("own", text) for text in question or ["Describe the image."])
        images = [shows.Shown(image, open_image(image, OWN_CHOICE), "", queries)]
    with _err.status("loading"):
        made, policy, verifier = config.build()
        llm = LLM(
            resolve(model), drafter=made, policy=policy, verifier=verifier, dtype=dtype, device=device, max_num_seqs=1
        )
    answered: list[shows.Answered] = []
    with _err.status("answering both ways") as status:
        for one in shows.answer_both_ways(llm, images, params):
            answered.append(one)
            status.update(f"answering both ways: {len(answered)} of {sum(len(i.queries) for i in images)}")
    if not json_output:
        shows.show(_console, llm, config.name, answered)
        return
    report = {"model": model, "drafter": config.name, "speculative_config": config.as_dict()}
    report |= shows.totals(answered) | {"questions": [one.as_dict() for one in answered]}
    report |= {"numerics": llm.numerics, "lossless": llm.verifier.lossless, "exact": llm.verifier.exact}
    print(json.dumps(report | {"provenance": provenance()}))


@app.command()
def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[STAGE] [KEY=VALUE]...", help=f"{', '.join(STAGES)}; default: all. Then changes."),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="A YAML file; it needs model and out.")] = None,
    json_output: _JsonOption = False,
) -> None:
    """Train the model and its sibling; every stage can be stopped and called again."""
    chosen = [word for word in words or [] if "=" not in word]
    if len(chosen) > 1 or any(stage not in STAGES for stage in chosen):
        raise typer.BadParameter(f"{' '.join(chosen)!r} is no stage; expected {', '.join(STAGES)}, or KEY=VALUE")
    from paceline.train.run_folder import is_main
    from paceline.train.stages import Done

    from .config import read_vlm_config
    from .stages import VlmStages

    run = VlmStages(read_vlm_config(config, [word for word in words or [] if "=" in word]), chosen or STAGES)
    report: dict[str, object] = {"method": "vlm", "out": run.config.out}
    for stage in chosen or STAGES:
        with _err.status(stage) as status:
            for event in run.run(stage):
                if isinstance(event, Done):
                    report[stage] = {"path": str(event.path), **event.result}
                    if is_main():
                        _err.print(f"{stage}: {event.path}{' (was there already)' if event.was_there else ''}")
                elif is_main():
                    status.update(f"{stage}: {_event_line(event)}")
    if json_output and is_main():
        print(json.dumps(report))


def _event_line(event: object) -> str:
    """A line about what happened in a stage."""
    values = {key: value for key, value in vars(event).items() if isinstance(value, int | float | str)}
    return ", ".join(f"{key} {f'{value:.4g}' if isinstance(value, float) else value}" for key, value in values.items())


@app.command()
def scenes(
    out: Annotated[Path, typer.Argument(help="A new folder for the images and prompts.jsonl.")],
    per_kind: Annotated[int, typer.Option(min=1, help="Questions of each kind.")] = 60,
    train: Annotated[bool, typer.Option("--train", help="Scenes for training instead of held-out ones.")] = False,
) -> None:
    """Write questions about held-out scenes as prompts, for `paceline bench MODEL --suite OUT/prompts.jsonl`.

    With --train they are prompts for `paceline train`.
    """
    from paceline.system.files import check_out, write_text

    from .questions import KINDS, scene_suite
    from .scene import HELD_OUT, render

    first = HELD_OUT // 2 if train else HELD_OUT
    if train and first + per_kind * len(KINDS) > HELD_OUT:
        most = (HELD_OUT - first) // len(KINDS)
        raise typer.BadParameter(f"--per-kind {per_kind} reaches the held-out scenes; expected at most {most}")
    check_out(out / "prompts.jsonl")
    lines = []
    (out / "images").mkdir(parents=True, exist_ok=True)
    for number, (scene, one) in enumerate(scene_suite(per_kind, first)):
        image = f"images/scene-{number}.png"
        render(scene).save(out / image)
        line = {"id": f"scene-{number}", "category": one.kind, "turns": [one.text], "image": image}
        lines.append(json.dumps({**line, "answer": one.answer}))
    write_text(out / "prompts.jsonl", "\n".join(lines) + "\n")


if __name__ == "__main__":
    try:
        app()
    except PacelineError as error:
        sys.exit(str(error))
