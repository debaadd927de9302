"""`paceline demo`."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from ..spec_config import parse
from .engine import (
    AllowLossyOption,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    EngineOptions,
    MaxLenOption,
    NumericsOption,
    NumTokensOption,
    PolicyChoice,
    PolicyOption,
    ProfileOption,
    SpecConfigOption,
    ThreadsOption,
    TrustOption,
    WeightsOption,
    choose_tuned,
    open_engine,
)
from .screen import DebugOption, JsonOption, NoProgressOption, Screen, screen_of

if TYPE_CHECKING:
    from ..eval.demo import Pair, Totals
    from ..llm import LLM


def demo(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="A folder, a hub id, or a name of the zoo.")
    ] = "smollm2-135m",
    drafter: DrafterOption = None,
    speculative_config: SpecConfigOption = None,
    num_speculative_tokens: NumTokensOption = None,
    policy: PolicyOption = None,
    profile: ProfileOption = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Length of an answer.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0: greedy.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Of a sampled answer.")] = 0,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="How many of the prompts to show.")] = 4,
    allow_lossy: AllowLossyOption = False,
    numerics: NumericsOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    max_model_len: MaxLenOption = None,
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
    weights: WeightsOption = None,
    json_output: JsonOption = False,
    no_progress: NoProgressOption = False,
    debug: DebugOption = False,
) -> None:
    """Watch the same prompts decoded plainly and with speculation, and compare the speed and the text.

    Three prompts have answers that copy from the prompt, one does not. The default drafter is what a trained head for
    this model recommends (`paceline models`), else lookup.

    Example:  paceline demo --drafter self-int4 --max-tokens 200
    """
    screen = screen_of(ctx)
    config, learnt = choose_tuned(drafter, speculative_config, num_speculative_tokens, "lookup", policy, profile)
    from ..core.request import SamplingParams

    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    options = EngineOptions(
        model,
        config,
        allow_lossy,
        numerics,
        dtype,
        device,
        max_model_len,
        threads,
        trust_remote_code,
        weights,
        profile=learnt,
    )
    if drafter is None and speculative_config is None and profile is None:
        options, llm = _open_with_head(options, num_speculative_tokens, policy, screen)
    else:
        llm = open_engine(options, screen)
    from ..eval.demo import totals
    from ..eval.examples import EXAMPLES

    pairs = _show(llm, EXAMPLES[:num_prompts], params, screen)
    total = totals(pairs)
    if screen.json:
        screen.put_json(_as_json(options, llm, pairs, total, params))
        return
    screen.out.print()
    screen.out.print(_table(pairs, total))
    screen.out.print(_sentence(llm, options.config.name, pairs, total), soft_wrap=not screen.out.is_terminal)


def _open_with_head(
    options: EngineOptions, num_tokens: int | None, policy: PolicyChoice | None, screen: Screen
) -> "tuple[EngineOptions, LLM]":
    """The engine with the drafter that the packaged head for this very model recommends; without one, as asked for."""
    from ..zoo.packaged import best_head, packaged_heads

    if not packaged_heads():
        return options, open_engine(options, screen)
    plain = open_engine(replace(options, config=parse("none")), screen)
    best = best_head(plain.loaded.fingerprint)
    if best is not None:
        options = replace(options, config=parse(best.demo, num_tokens, policy))
    from ..llm import LLM

    with screen.spinner(f"preparing {options.config.name}"):
        drafter, rule, verifier = options.config.build(options.allow_lossy, options.profile)
        llm = LLM(
            plain.loaded,
            drafter=drafter,
            policy=rule,
            verifier=verifier,
            numerics=options.numerics.value if options.numerics else None,
            max_batch_size=options.max_batch_size,
            max_model_len=options.max_model_len,
            allow_lossy=options.allow_lossy,
        )
    return options, llm


def _show(llm: "LLM", examples, params, screen: Screen) -> "list[Pair]":
    """Run the demo, streaming it to the screen unless it is JSON that is wanted."""
    from ..core.outputs import Origin
    from ..eval.demo import Begin, Pair, demo
    from .tokens import Painter, legend

    pairs: list[Pair] = []
    painter, origins = None, list[Origin]()
    with screen.stages() if screen.json else _no_bar() as report:
        for event in demo(llm, examples, params):
            if isinstance(event, Pair):
                pairs.append(event)
                report("decoding both ways", len(pairs), len(examples))
            elif screen.json:
                continue
            elif isinstance(event, Begin):
                painter, origins = Painter(llm.tokenizer), []
                label = "with speculation" if event.is_speculative else "plain"
                screen.out.print()
                screen.out.rule(f"[bold]{escape(event.name)}[/bold] · {label}", align="left", style="dim")
            else:
                assert painter is not None  # a Begin comes first
                origins += event.origins
                screen.out.print(painter.paint(event), end="", soft_wrap=True)
                if event.finish_reason is not None:
                    screen.out.print()
                    screen.out.print(legend(origins))
    return pairs


def _table(pairs: "list[Pair]", total: "Totals") -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_footer=True, pad_edge=False)
    table.add_column("Prompt", footer="all")
    table.add_column("Plain\ntok/s", footer=f"{total.plain_tokens_per_s:.1f}", justify="right")
    table.add_column("Spec.\ntok/s", footer=f"{total.speculative_tokens_per_s:.1f}", justify="right")
    table.add_column("Speed-\nup", footer=_times(total.speedup), justify="right")
    table.add_column("Tokens\na pass", footer=f"{total.mean_acceptance_length:.2f}", justify="right")
    table.add_column("Identical", footer=_yes(total.identical), justify="center")
    for pair in pairs:
        table.add_row(
            escape(pair.name),
            f"{pair.plain.tokens_per_s:.1f}",
            f"{pair.speculative.tokens_per_s:.1f}",
            _times(pair.speedup),
            f"{pair.speculative.completion.mean_acceptance_length:.2f}",
            _yes(pair.identical),
        )
    return table


def _sentence(llm: "LLM", drafter: str, pairs: "list[Pair]", total: "Totals") -> str:
    same = (
        f"{total.num_identical} of {len(pairs)} answers were token-identical"
        if not total.identical
        else ("every answer was token-identical" if len(pairs) > 1 else "the answer was token-identical")
    )
    pace = f"{_times(total.speedup)} as fast as plain decoding"
    told = f"With the [bold]{escape(drafter)}[/bold] drafter {escape(llm.loaded.name)} decoded {pace}, and {same}"
    promise = f"(numerics: {llm.numerics})."
    if not llm.verifier.lossless:
        promise = f"(the {llm.verifier.name} rule is lossy)."
    elif not llm.verifier.exact:
        promise = f"(the {llm.verifier.name} rule promises the same law, not the same tokens)."
    elif not total.identical:
        promise = "(numerics: fast, so rounding ties may differ; `paceline check` tells ties from bugs)."
    return f"{told} {promise}"


def _as_json(options: EngineOptions, llm: "LLM", pairs: "list[Pair]", total: "Totals", params) -> dict[str, object]:
    from ..system.provenance import provenance

    rows = [
        {
            "prompt": pair.name,
            "plain_tokens_per_s": pair.plain.tokens_per_s,
            "speculative_tokens_per_s": pair.speculative.tokens_per_s,
            "speedup": pair.speedup,
            "mean_acceptance_length": pair.speculative.completion.mean_acceptance_length,
            "identical": pair.identical,
            "plain_tokens": len(pair.plain.completion.token_ids),
            "speculative_tokens": len(pair.speculative.completion.token_ids),
            "text": pair.speculative.completion.text,
        }
        for pair in pairs
    ]
    return {
        "model": options.model,
        "drafter": options.config.name,
        "speculative_config": options.config.as_dict(),
        "plain_tokens_per_s": total.plain_tokens_per_s,
        "speculative_tokens_per_s": total.speculative_tokens_per_s,
        "speedup": total.speedup,
        "mean_acceptance_length": total.mean_acceptance_length,
        "identical": total.identical,
        "prompts": rows,
        "temperature": params.temperature,
        "max_tokens": params.max_tokens,
        "seed": params.seed,
        "numerics": llm.numerics,
        "lossless": llm.verifier.lossless,
        "exact": llm.verifier.exact,
        "provenance": provenance(),
    }


def _no_bar():
    from contextlib import nullcontext

    return nullcontext(lambda stage, done, total: None)


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x"


def _yes(value: bool) -> str:
    return "[green]yes[/green]" if value else "[red]no[/red]"
