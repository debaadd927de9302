"""`paceline demo-vlm`."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from .engine import (
    AllowLossyOption,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    EngineOptions,
    NumericsOption,
    NumTokensOption,
    PolicyOption,
    SpecConfigOption,
    ThreadsOption,
    TrustOption,
    choose_config,
    open_engine,
)
from .screen import DebugOption, JsonOption, NoProgressOption, Screen, screen_of

if TYPE_CHECKING:
    from ..demo_vlm import Answered, Shown
    from ..llm import LLM

_MODEL, _SMALL = "tiny-vlm", "tiny-vlm-small"
_COMMAND = "paceline demo-vlm"  # told by the pictures that it saves


def demo_vlm(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="A vision-language model: a folder, a hub id, or a zoo name.")
    ] = _MODEL,
    image: Annotated[
        str | None,
        typer.Option("--image", "-i", metavar="FILE", help="Your own picture in the place of the scenes."),
    ] = None,
    question: Annotated[
        list[str] | None, typer.Option("--question", "-q", metavar="TEXT", help="About it; may be given again.")
    ] = None,
    num_scenes: Annotated[int, typer.Option("--num-scenes", min=1, max=1000, help="How many pictures to render.")] = 3,
    seed: Annotated[int, typer.Option("--seed", help="Of the scenes, and of a sampled answer.")] = 0,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FOLDER", help="Keep the rendered pictures there, as PNG.")
    ] = None,
    drafter: DrafterOption = None,
    speculative_config: SpecConfigOption = None,
    num_speculative_tokens: NumTokensOption = None,
    policy: PolicyOption = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Length of an answer.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0: greedy.")] = 0.0,
    allow_lossy: AllowLossyOption = False,
    numerics: NumericsOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
    json_output: JsonOption = False,
    no_progress: NoProgressOption = False,
    debug: DebugOption = False,
) -> None:
    """Watch questions about pictures answered plainly and with speculation, by a small model trained for this.

    It knows drawn shapes, signs and bar charts, and five kinds of question. The default drafter is its sibling, which
    reads what the model's own eyes saw.

    Example:  paceline demo-vlm --image drawing.png --question "How many objects are there?"
    """
    screen = screen_of(ctx)
    if question and image is None:
        raise typer.BadParameter("--question is about an --image; the scenes have questions of their own")
    default = f"model:{_SMALL},vision=shared" if model == _MODEL and _is_packaged() else "lookup"
    config = choose_config(drafter, speculative_config, num_speculative_tokens, default, policy)
    from ..core.request import SamplingParams
    from ..demo_vlm import demo_vlm as run
    from ..demo_vlm import rendered

    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    pictures = rendered(num_scenes, seed) if image is None else [_own(image, question or ["Describe the image."])]
    places = _saved(pictures, save) if save is not None and image is None else {}
    options = EngineOptions(
        model, config, allow_lossy, numerics, dtype, device, None, threads, trust_remote_code, max_batch_size=1
    )
    llm = open_engine(options, screen)
    answered: list[Answered] = []
    with screen.stages() as report:
        for answer in run(llm, pictures, params):
            answered.append(answer)
            report("answering both ways", len(answered), sum(len(shown.queries) for shown in pictures))
    if screen.json:
        screen.put_json(_as_json(options, llm, answered, places))
        return
    for shown in pictures:
        _print_picture(shown, places.get(shown.name), [one for one in answered if one.shown is shown], screen)
    _print_totals(llm, config.name, answered, screen)


def _is_packaged() -> bool:
    from .. import zoo

    return _SMALL in zoo.ZOO


def _own(source: str, questions: list[str]) -> "Shown":
    from ..demo_vlm import Query, Shown
    from ..hf.images import OWN_CHOICE, open_image

    return Shown(source, open_image(source, OWN_CHOICE), "", tuple(Query("own", text) for text in questions))


def _saved(pictures: "list[Shown]", folder: Path) -> dict[str, str]:
    from PIL.PngImagePlugin import PngInfo

    from ..system.files import check_out, write_bytes

    about = PngInfo()
    about.add_text("Software", _COMMAND)
    places = {shown.name: folder / f"{shown.name.replace(' ', '-')}.png" for shown in pictures}
    for place in places.values():
        check_out(place, lambda head: _COMMAND in head)
    for shown in pictures:
        held = io.BytesIO()
        shown.image.save(held, format="PNG", pnginfo=about)
        write_bytes(places[shown.name], held.getvalue())
    return {name: str(place) for name, place in places.items()}


def _print_picture(shown: "Shown", place: str | None, answered: "list[Answered]", screen: Screen) -> None:
    screen.out.print()
    screen.out.rule(f"[bold]{escape(shown.name)}[/bold]", align="left", style="dim")
    for line in (shown.description, place):
        if line:
            screen.out.print(f"[dim]{escape(line)}[/dim]", soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_lines=False)
    for heading in ("Question and answer", "Plain\ntok/s", "Spec.\ntok/s", "Tokens\na pass", "Same", "Right"):
        table.add_column(heading, justify="left" if heading.startswith("Q") else "right", overflow="fold")
    for one in answered:
        text = one.speculative.completion.text.strip()
        other = "" if one.identical else f"\n[red]plain: {escape(one.plain.completion.text.strip())}[/red]"
        table.add_row(
            f"{escape(one.query.text)}\n[bold]{escape(text)}[/bold]{other}",
            f"{one.plain.tokens_per_s:.1f}",
            f"{one.speculative.tokens_per_s:.1f}",
            f"{one.speculative.completion.mean_acceptance_length:.2f}",
            _yes(one.identical),
            "" if one.right is None else _yes(one.right),
        )
    screen.out.print(table)


def _print_totals(llm: "LLM", drafter: str, answered: "list[Answered]", screen: Screen) -> None:
    from ..demo_vlm import totals

    total = totals(answered)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("All questions", "tok/s", "Seconds", "Vision", "Prefill", "Draft", "Verify", "Rest"):
        table.add_column(heading, justify="left" if heading == "All questions" else "right")
    for side, label in (("plain", "plain"), ("speculative", "with speculation")):
        split = [f"{value:.2f}" for value in total[f"{side}_split"].values()]
        table.add_row(label, f"{total[f'{side}_tokens_per_s']:.1f}", f"{total[f'{side}_seconds']:.2f}", *split)
    screen.out.print(table)
    right = f", {total['num_right']} of {total['num_known']} were right" if total["num_known"] else ""
    wide = not screen.out.is_terminal
    screen.out.print(
        f"With the [bold]{escape(drafter)}[/bold] drafter {escape(llm.loaded.name)} decoded {total['speedup']:.2f}x as "
        f"fast as plain decoding; {total['num_identical']} of {len(answered)} answers were token-identical{right} "
        f"(numerics: {llm.numerics}).",
        soft_wrap=wide,
    )


def _as_json(
    options: EngineOptions, llm: "LLM", answered: "list[Answered]", places: dict[str, str]
) -> dict[str, object]:
    from ..demo_vlm import totals
    from ..system.provenance import provenance

    rows = [
        {
            "picture": one.shown.name,
            "file": places.get(one.shown.name),
            "description": one.shown.description or None,
            "kind": one.query.kind,
            "question": one.query.text,
            "answer": one.query.answer,
            "right": one.right,
            "identical": one.identical,
            "plain": one.plain.as_dict(),
            "speculative": one.speculative.as_dict(),
        }
        for one in answered
    ]
    return {
        "model": options.model,
        "drafter": options.config.name,
        "speculative_config": options.config.as_dict(),
        **totals(answered),
        "questions": rows,
        "numerics": llm.numerics,
        "lossless": llm.verifier.lossless,
        "exact": llm.verifier.exact,
        "provenance": provenance(),
    }


def _yes(value: bool) -> str:
    return "[green]yes[/green]" if value else "[red]no[/red]"
