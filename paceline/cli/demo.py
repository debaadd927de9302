"""`paceline demo`: the same prompts decoded plainly and with speculation, side by side."""

import io
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..config import parse
from .options import AnswerOptions, ModelOptions, Speculation, SpeculationOptions, command, open_engine, opt
from .screen import Painter, Screen, legend, nothing_drafted, number, table_of

if TYPE_CHECKING:
    from ..core.request import SamplingParams
    from ..llm import LLM
    from ..measure.demo import Pair, Speeds
    from ..measure.prompts import Example

_SVG_ID = "paceline-demo"
_SVG_COLUMNS = 100


@command
def demo(
    speculation: SpeculationOptions,
    answers: AnswerOptions,
    loading: ModelOptions,
    screen: Screen,
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="A folder, a hub id, or a name that `paceline models` lists.")
    ] = "smollm2-135m",
    num_prompts: int = opt(4, "How many of the prompts to show.", min=1),
    svg: Path | None = opt(None, "Save the answers and the table as an image.", metavar="FILE"),
) -> None:
    """Decode the same prompts with and without speculation, and compare the speed and the text.

    Some answers copy from the prompt, others do not. The default drafter is the one recommended with the
    model's packaged head (`paceline models`), lookup+mtp for a checkpoint with an MTP module, or lookup.

    Example:  paceline demo --drafter self-int4 --max-tokens 200
    """
    chosen = speculation.choose("lookup")
    from ..system.files import check_out, write_text

    params = answers.params()
    if svg is not None:
        check_out(svg, _SVG_ID)
    chosen, llm = open_with_head(model, chosen, speculation, loading, screen)
    from ..measure.demo import speeds
    from ..measure.prompts import EXAMPLES

    pairs = _show(llm, EXAMPLES[:num_prompts], params, screen)
    total = speeds(pairs)
    sentence = _sentence(llm, chosen.config.name, pairs, total)
    if svg is not None:
        write_text(svg, _svg(llm, pairs, total, sentence))
    if not screen.json:
        screen.out.print()
        screen.out.print(_table(pairs, total))
        screen.out.print(sentence, soft_wrap=not screen.out.is_terminal)
        return
    from ..measure.record import measured_on

    screen.put_json(
        {
            **chosen.as_json(model),
            **vars(total),
            "num_identical": sum(pair.identical for pair in pairs),
            "prompts": [
                {
                    "prompt": pair.name,
                    **vars(speeds([pair])),
                    "plain_tokens": len(pair.plain.token_ids),
                    "speculative_tokens": len(pair.speculative.token_ids),
                    "text": pair.speculative.text,
                    "no_draft_reason": pair.speculative.no_draft_reason,
                }
                for pair in pairs
            ],
            **vars(answers),
            "numerics": llm.numerics,
            "lossless": llm.verifier.lossless,
            "exact": llm.verifier.exact,
            "provenance": measured_on(),
        }
    )


def open_with_head(
    model: str,
    chosen: Speculation,
    speculation: SpeculationOptions,
    loading: ModelOptions,
    screen: Screen,
    seed: int | None = None,
    adapters: Mapping[str, str] | None = None,
) -> "tuple[Speculation, LLM]":
    """The engine with the chosen drafter.

    Where none was asked for, it is the one that the packaged head for this very model recommends, if there is a head,
    or else has the MTP module of the checkpoint, if there is one.
    """
    if not speculation.is_default:
        return chosen, open_engine(model, screen, loading, chosen, seed=seed, adapters=adapters)
    from ..methods.eagle.module import mtp_files
    from ..zoo.packaged import heads_for

    plain = open_engine(model, screen, loading)
    best = next((head for head in heads_for(plain.loaded.fingerprint, plain.loaded.origin) if head.is_default), None)
    if name := best.demo if best is not None else "lookup+mtp" if mtp_files(plain.loaded) else "":
        chosen = replace(chosen, config=parse(name, speculation.num_speculative_tokens, speculation.policy))
    return chosen, open_engine(plain.loaded, screen, loading, chosen, seed=seed, adapters=adapters)


def _show(llm: "LLM", examples: "Sequence[Example]", params: "SamplingParams", screen: Screen) -> "list[Pair]":
    """Run the demo, streaming it to the screen unless JSON is wanted."""
    from ..measure.demo import Begin, Pair, demo

    pairs: list[Pair] = []
    painter = Painter(llm.tokenizer)
    with screen.stages() if screen.json else nullcontext(lambda stage, done, total: None) as report:
        for event in demo(llm, examples, params):
            if isinstance(event, Pair):
                pairs.append(event)
                report("decoding both ways", len(pairs), len(examples))
            elif screen.json:
                continue
            elif isinstance(event, Begin):
                painter = Painter(llm.tokenizer)
                label = "with speculation" if event.is_speculative else "plain"
                screen.out.print()
                screen.out.rule(f"[bold]{escape(event.name)}[/bold] · {label}", align="left", style="dim")
            else:
                screen.out.print(painter.paint(event), end="", soft_wrap=True)
                if event.completion is not None:
                    screen.out.print()
                    screen.out.print(legend(event.completion.origins))
    return pairs


def _svg(llm: "LLM", pairs: "list[Pair]", total: "Speeds", sentence: str) -> str:
    """A terminal with the speculative answers in colour, the table and the sentence below it."""
    console = Console(file=io.StringIO(), record=True, width=_SVG_COLUMNS, highlight=False, force_terminal=True)
    for pair in pairs:
        answer = pair.speculative
        console.rule(f"[bold]{escape(pair.name)}[/bold] · with speculation", align="left", style="dim")
        console.print(Painter(llm.tokenizer).paint(answer))
        console.print(legend(answer.origins), "")
    console.print(_table(pairs, total))
    console.print(sentence)
    return console.export_svg(title="paceline demo", unique_id=_SVG_ID)


def _table(pairs: "list[Pair]", total: "Speeds") -> Table:
    from ..measure.demo import speeds

    columns = {
        "Prompt": lambda row: escape(row[0]),
        "Plain\ntok/s": lambda row: number(row[1].plain_tokens_per_s, ".1f"),
        "Spec.\ntok/s": lambda row: number(row[1].speculative_tokens_per_s, ".1f"),
        "Speed-\nup": lambda row: number(row[1].speedup, unit="x"),
        "Tokens\na pass": lambda row: f"{row[1].mean_acceptance_length:.2f}",
        "Identical\nto plain": lambda row: "[green]yes[/green]" if row[1].identical else "[red]no[/red]",
    }
    table = table_of(columns, [(pair.name, speeds([pair])) for pair in pairs])
    table.show_footer = True
    for column, text in zip(table.columns, columns.values(), strict=True):
        column.footer = text(("all", total))
    return table


def _sentence(llm: "LLM", drafter: str, pairs: "list[Pair]", total: "Speeds") -> str:
    same = "every answer was" if len(pairs) > 1 else "the answer was"
    if not total.identical:
        same = f"{sum(pair.identical for pair in pairs)} of {len(pairs)} answers were"
    promise = f"numerics: {llm.numerics}"
    if not llm.verifier.lossless:
        promise = f"the {llm.verifier.name} rule is lossy"
    elif not llm.verifier.exact:
        promise = f"the {llm.verifier.name} rule keeps the distribution of the answers, not the tokens"
    elif not total.identical:
        promise = "numerics: fast, so rounding ties may differ; `paceline check` tells ties from bugs"
    answers, idle = [pair.speculative for pair in pairs], ""
    if llm.drafters and not any(answer.num_drafted for answer in answers):
        idle = f" [yellow]N{nothing_drafted(answer.no_draft_reason for answer in answers)[1:]}.[/yellow]"
    pace = "" if total.speedup is None else f"decoded {total.speedup:.2f}x as fast as plain decoding, and "
    return (
        f"With the [bold]{escape(drafter)}[/bold] drafter {escape(llm.loaded.name)} {pace}{same} token-identical to "
        f"Paceline's own plain decoding ({promise}).{idle}"
    )
