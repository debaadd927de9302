"""`paceline show`."""

import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.text import Text

from ..errors import ConfigError
from .engine import DeviceOption, ThreadsOption
from .screen import DebugOption, JsonOption, NoProgressOption, Screen, screen_of

if TYPE_CHECKING:
    from ..eval.results import SavedAnswer, SavedResults

# The same as `cli.tokens` has, by name: that module waits for torch, which showing results need not.
_STYLES = {"drafted": "green", "recovered": "yellow", "bonus": "cyan", "plain": "default"}

_CASCADE = "A cascade"


def show(
    ctx: typer.Context,
    result: Annotated[
        Path | None,
        typer.Argument(metavar="[RESULT]", help="A folder that `paceline bench` wrote.", show_default=False),
    ] = None,
    answer: Annotated[
        int | None, typer.Option("--answer", "-n", min=1, help="Which answer to print; default: 1.", show_default=False)
    ] = None,
    as_html: Annotated[
        bool, typer.Option("--html", metavar="", help="Write one page with all answers and their rounds.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Default: answers.html in RESULT.", show_default=False),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", metavar="", help="Open the page in the browser.")] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="PATH",
            help="A model's folder, for results without the texts of their tokens.",
            show_default=False,
        ),
    ] = None,
    cascade: Annotated[
        Path | None,
        typer.Option(
            "--cascade",
            metavar="FILE",
            help="In the place of RESULT: a file of `paceline calibrate`; shows the four cases of a cascade.",
            rich_help_panel=_CASCADE,
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            "-p",
            metavar="FILE",
            help="JSON lines, in which an example of each case is looked for.",
            rich_help_panel=_CASCADE,
            show_default=False,
        ),
    ] = None,
    small: Annotated[
        str | None,
        typer.Option(
            "--small", metavar="MODEL", help="Default: where it was.", rich_help_panel=_CASCADE, show_default=False
        ),
    ] = None,
    large: Annotated[
        str | None,
        typer.Option(
            "--large", metavar="MODEL", help="Default: where it was.", rich_help_panel=_CASCADE, show_default=False
        ),
    ] = None,
    num_prompts: Annotated[
        int, typer.Option("--num-prompts", min=1, help="Look at most at so many.", rich_help_panel=_CASCADE)
    ] = 200,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Of a long answer.", rich_help_panel=_CASCADE)
    ] = 96,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    json_output: JsonOption = False,
    no_progress: NoProgressOption = False,
    debug: DebugOption = False,
) -> None:
    """Show the answers of a benchmark, every token coloured by where it came from.

    With --html, one page that opens without a network: the tree of each round, and where its time went. With --cascade,
    the four cases of a small model before a large one: corrected, agreed with, alone, and a long answer.

    Example:  paceline show results/lookup --html --open
    """
    screen = screen_of(ctx)
    if (out is not None or open_page) and not as_html:
        raise typer.BadParameter("--out and --open are of the page: add --html")
    if as_html and answer is not None:
        raise typer.BadParameter("the page has all answers: give either --html or --answer")
    if cascade is not None:
        if result is not None or answer is not None or tokenizer is not None or not as_html or prompts is None:
            raise typer.BadParameter("--cascade takes --html and --prompts, and no RESULT, --answer or --tokenizer")
        from .cascade_show import CascadeOptions, show_cascade

        options = CascadeOptions(cascade, prompts, small, large, num_prompts, max_tokens, device, threads)
        page = show_cascade(options, out or cascade.with_suffix(".html"), screen)
        _open(page, open_page, screen)
        return
    if prompts is not None or small is not None or large is not None:
        raise typer.BadParameter("--prompts, --small and --large are of --cascade")
    if result is None:
        raise typer.BadParameter("there is nothing to show: give RESULT, or --cascade FILE")
    from ..eval.results import open_results

    opened = open_results(result)
    if as_html:
        _write_page(opened, tokenizer, out, open_page, screen)
    else:
        _print_answer(opened, tokenizer, answer or 1, screen)


def _write_page(
    opened: "SavedResults", tokenizer: str | None, out: Path | None, open_page: bool, screen: Screen
) -> None:
    from ..eval.page import chosen, is_page, page, tokenizer_for
    from ..system.files import check_out, write_text

    answers = chosen(opened.answers())
    file = out or opened.path / "answers.html"
    check_out(file, is_page)
    with screen.spinner("writing the page"):
        text = page(opened, tokenizer_for(opened, answers, tokenizer))
        write_text(file, text)
    if screen.json:
        screen.put_json({"page": str(file), "answers": len(answers), "bytes": len(text.encode())})
    else:
        screen.out.print(escape(str(file)), soft_wrap=True)
    _open(file, open_page, screen)


def _open(file: Path, is_asked: bool, screen: Screen) -> None:
    if not is_asked:
        return
    # Browsers that show pages in the terminal itself keep it until they are left; without one they hang.
    screen.say("[dim]Opening the page in your browser.[/dim]")
    if not (sys.stdin.isatty() or _has_screen()) or not webbrowser.open(file.resolve().as_uri()):
        screen.say("[yellow]No browser could be opened here; open the file yourself.[/yellow]")


def _has_screen() -> bool:
    """Whether windows can be opened."""
    return not sys.platform.startswith("linux") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _print_answer(opened: "SavedResults", tokenizer: str | None, number: int, screen: Screen) -> None:
    from ..eval.page import chosen, tokenizer_for, with_texts

    answers = chosen(opened.answers())
    if not answers:
        raise ConfigError("these results hold no answer of ours with its rounds", got=str(opened.path))
    if number > len(answers):
        raise ConfigError("there is no such answer", got=number, expected=f"1 to {len(answers)}")
    one = answers[number - 1]
    one = with_texts(one, tokenizer_for(opened, [one], tokenizer))
    if screen.json:
        screen.put_json(_as_json(one, number, len(answers)))
        return
    title = f"[bold]{escape(one.category or one.id)}[/bold] · {escape(one.side)}"
    screen.out.rule(f"{title} [dim]answer {number} of {len(answers)}[/dim]", align="left", style="dim")
    screen.out.print(_painted(one), soft_wrap=True)
    screen.out.print(_legend(one.origins), soft_wrap=True)
    pace = f", {one.tokens_per_s:.1f} tok/s" if one.tokens_per_s else ""
    rounds = f"{len(one.token_ids)} tokens in {len(one.rounds)} rounds"
    nodes, stood = (sum(map(len, parts)) for parts in zip(*[(r.parents[1:], r.path) for r in one.rounds], strict=True))
    drafts = f"; {nodes} drafted, {stood} accepted, {nodes - stood} rejected" if nodes else ""
    screen.say(f"[dim]{rounds}{pace}{drafts}; --html shows the rounds[/dim]")


def _painted(one: "SavedAnswer") -> Text:
    text = Text()
    for piece, origin in zip(one.pieces, one.origins, strict=True):
        text.append(piece, _STYLES.get(origin, "default"))
    return text


def _legend(origins: Sequence[str]) -> Text:
    from ..eval.page import MEANINGS

    text = Text()
    for origin, style in _STYLES.items():
        if count := origins.count(origin):
            text.append("■ ", style).append(f"{MEANINGS[origin]} {count}   ", "dim")
    return text


def _as_json(one: "SavedAnswer", number: int, count: int) -> dict[str, object]:
    return {
        "answer": number,
        "answers": count,
        "id": one.id,
        "category": one.category,
        "drafter": one.side,
        "text": one.text,
        "token_ids": one.token_ids,
        "pieces": one.pieces,
        "origins": one.origins,
        "sources": one.sources,
        "rounds": len(one.rounds),
        "seconds": one.seconds,
    }
