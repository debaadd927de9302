"""`paceline show` and `paceline plot`: saved results as coloured text, a page or figures."""

import os
import sys
import webbrowser
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.text import Text

from ..errors import ConfigError
from .options import command, opt
from .screen import STYLES, Screen, legend

if TYPE_CHECKING:
    from ..measure.results import SavedResults


class FigureFormat(StrEnum):
    """The values of --format; typer takes no list of a Literal."""

    png = "png"
    svg = "svg"


@command
def plot(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULTS...",
            help="Folders that `paceline bench` wrote, or files of what a measurement prints with --json.",
        ),
    ],
    screen: Screen,
    out: Path | None = opt(None, "Default: `plots` in the first folder.", short="-o", metavar="DIR"),
    format: list[FigureFormat] | None = opt(None, "Repeat it for several; default: both.", short="-f"),
) -> None:
    """Plot results: speed-ups, acceptance, the time of a pass, batch sizes. Several results are compared.

    A figure that the results have no data for is left out, with the reason.

    Example:  paceline plot results/lookup results/self-int4 --out plots
    """
    from ..measure.plots import draw
    from ..measure.results import open_results

    opened = [open_results(path) for path in results]
    folder = out or next((record.path for record in opened if record.path.is_dir()), Path()) / "plots"
    with screen.spinner("drawing"):
        files, left_out = draw(opened, folder, [kind.value for kind in format or FigureFormat])
    if screen.json:
        screen.put_json({"files": files, "left_out": left_out})
        return
    for file in files:
        screen.print_path(file)
    for name, reason in left_out.items():
        screen.say(f"[dim]left out {escape(name)}: {escape(reason)}[/dim]")


@command
def show(
    result: Annotated[Path, typer.Argument(metavar="RESULT", help="A folder that `paceline bench` wrote.")],
    screen: Screen,
    answer: int | None = opt(None, "Which answer to print; default: 1.", short="-n", min=1),
    html: bool = opt(False, "Write one page with all answers and their rounds."),
    out: Path | None = opt(None, "Default: answers.html in RESULT.", short="-o", metavar="FILE"),
    open: bool = opt(False, "Open the page in the browser."),
) -> None:
    """Show the answers of a benchmark, every token coloured by its origin.

    With --html, writes one self-contained page, which also shows the tree of each round and how long it took.

    Example:  paceline show results/lookup --html --open
    """
    if (out is not None or open) and not html:
        raise typer.BadParameter("--out and --open are for the page: add --html")
    if html and answer is not None:
        raise typer.BadParameter("the page has all answers: give either --html or --answer")
    from ..measure.results import open_results

    opened = open_results(result)
    if not html:
        _print_answer(opened, answer or 1, screen)
        return
    from ..measure.page import SIGN, chosen, page
    from ..system.files import check_out, write_text

    file = out or opened.path / "answers.html"
    check_out(file, SIGN)
    with screen.spinner("writing the page"):
        text = page(opened)
        write_text(file, text)
    if screen.json:
        screen.put_json({"page": file, "answers": len(chosen(opened.answers())), "bytes": len(text.encode())})
    else:
        screen.print_path(file)
    if open:
        _open_page(file, screen)


def _open_page(file: Path, screen: Screen) -> None:
    screen.say("[dim]Opening the page in your browser.[/dim]")
    # Text browsers need the terminal until they are left, and hang without one.
    has_windows = not sys.platform.startswith("linux") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if not (sys.stdin.isatty() or has_windows) or not webbrowser.open(file.resolve().as_uri()):
        screen.warn("No browser could be opened here; open the file yourself.")


def _print_answer(opened: "SavedResults", number: int, screen: Screen) -> None:
    from ..measure.page import chosen

    answers = chosen(opened.answers())
    if not answers:
        raise ConfigError("these results have no answer of Paceline with its rounds", got=str(opened.path))
    if number > len(answers):
        raise ConfigError("there is no such answer", got=number, expected=f"1 to {len(answers)}")
    answer = answers[number - 1]
    if screen.json:
        keys = ("id", "category", "text", "token_ids", "origins", "sources", "seconds")
        about = {"drafter": answer.side, "rounds": len(answer.rounds), "pieces": answer.texts}
        about |= {key: getattr(answer, key) for key in keys}
        screen.put_json({"answer": number, "answers": len(answers), **about})
        return
    title = f"[bold]{escape(answer.category or answer.id)}[/bold] · {escape(answer.side)}"
    screen.out.rule(f"{title} [dim]answer {number} of {len(answers)}[/dim]", align="left", style="dim")
    styles = (STYLES.get(origin, "default") for origin in answer.origins)
    screen.out.print(Text.assemble(*zip(answer.texts, styles, strict=True)), soft_wrap=True)
    screen.out.print(legend(answer.origins), soft_wrap=True)
    pace = f", {answer.tokens_per_s:.1f} tok/s" if answer.tokens_per_s else ""
    drafted = sum(one_round.num_nodes for one_round in answer.rounds)
    accepted = sum(len(one_round.path) for one_round in answer.rounds)
    drafts = f"; {drafted} drafted, {accepted} accepted, {drafted - accepted} rejected" if drafted else ""
    rounds = f"{len(answer.token_ids)} tokens in {len(answer.rounds)} rounds"
    screen.say(f"[dim]{rounds}{pace}{drafts}; --html shows the rounds[/dim]")
