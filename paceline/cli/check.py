"""`paceline check`."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from .engine import (
    AllowLossyOption,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    EngineOptions,
    MaxLenOption,
    ModelArgument,
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
    remark_raw,
)
from .screen import DebugOption, JsonOption, NoProgressOption, Screen, screen_of

if TYPE_CHECKING:
    from ..eval.check import CheckReport, Comparison


def check(
    ctx: typer.Context,
    model: ModelArgument,
    drafter: DrafterOption = None,
    speculative_config: SpecConfigOption = None,
    num_speculative_tokens: NumTokensOption = None,
    policy: PolicyOption = None,
    profile: ProfileOption = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="JSON lines with question, turns (the first) or messages (chats) or prompt (text to go on from), or "
            "plain lines (the same). Default: 8 built in.",
            show_default=False,
        ),
    ] = None,
    num_prompts: Annotated[int | None, typer.Option("--num-prompts", min=1, help="Only the first of them.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Length of an answer.")] = 64,
    temperature: Annotated[
        list[float] | None,
        typer.Option("--temperature", "-t", help="Repeat it for several; default: 0 and 0.8.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the sampled answers.")] = 0,
    no_law_test: Annotated[
        bool, typer.Option("--no-law-test", metavar="", help="Leave out the test on a tiny model.")
    ] = False,
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
    """Prove on your machine that speculation leaves the answers alone, or learn where it does not.

    Every prompt is decoded both ways. With invariant numerics a difference is a bug; with fast ones it is a near-tie if
    rounding explains it. Some answers, and all that differ, are held against an independent pass over the whole text.
    Then the rule that judges drafts is sampled on a tiny model and held against its exact law.
    Exit status 1 means a bug or a failed law test.

    Example:  paceline check smollm2-135m --drafter lookup --num-prompts 4
    """
    screen = screen_of(ctx)
    if policy is None and profile is None:
        policy = PolicyChoice.fixed  # one that drafts nothing would prove nothing
    config, learnt = choose_tuned(drafter, speculative_config, num_speculative_tokens, "lookup", policy, profile)
    from ..core.request import SamplingParams
    from ..eval.examples import EXAMPLES
    from ..eval.prompt_files import read_prompts

    temperatures = temperature or [0.0, 0.8]
    for one in temperatures:
        SamplingParams(temperature=one)  # refuse before minutes of loading
    texts = read_prompts(prompts, num_prompts) if prompts is not None else None
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
    llm = open_engine(options, screen)
    remark_raw(sum(isinstance(one, str) for one in texts or ()), llm, screen)
    from ..eval.check import check as run_check
    from ..eval.demo import as_prompt

    if texts is None:
        texts = [as_prompt(llm, example) for example in EXAMPLES[:num_prompts]]
    with screen.stages() as progress:
        report = run_check(
            llm,
            texts,
            max_tokens=max_tokens,
            temperatures=temperatures,
            seed=seed,
            with_law_test=not no_law_test,
            progress=progress,
        )
    if screen.json:
        screen.put_json(_as_json(options, report))
    else:
        _print(options, report, screen)
    if not report.passed:
        raise typer.Exit(1)


def _print(options: EngineOptions, report: "CheckReport", screen: Screen) -> None:
    from ..eval.reference import TYPICAL

    out = screen.out
    for one in report.comparisons:
        out.print(_line(one), soft_wrap=not out.is_terminal)
    if report.skipped:
        skipped = ", ".join(f"{t:g}" for t in report.skipped)
        out.print(f"[dim]temperature {skipped}: not compared, the rule promises the law of the answers only[/dim]")
    measured = [one.measured for one in report.comparisons if one.measured is not None]
    held = [side for one in measured for side in (one.plain, one.speculative)]
    if held:
        mark = "[green]✓[/green]" if all(side.is_rounding for side in held) else "[red]✗[/red]"
        most = max(side.typical or 0.0 for side in held)
        out.print(
            f"{mark} independent reference: {len(measured)} answers, scores off by up to {most:.2f} of what rounding "
            f"moves them [dim](fails above {TYPICAL:g})[/dim]",
            soft_wrap=not out.is_terminal,
        )
    law = report.law_test
    if law is not None:
        mark = "[green]✓[/green]" if law.passed else "[red]✗[/red]"
        out.print(
            f"{mark} law test: {law.samples:,} samples of {law.tokens} tokens, p = {law.p_value:.3g} "
            f"[dim](fails below {law.false_alarm:g})[/dim]"
            + (f", {law.num_different} differ from plain decoding" if law.num_different is not None else "")
        )
    counts = report.verdicts
    told = f"{counts['identical']} identical, {counts['near_tie']} near-ties, {counts['bug']} bugs"
    mark = "[bold green]passed[/bold green]" if report.passed else "[bold red]failed[/bold red]"
    promise = "" if report.lossless else " The rule is lossy: it is meant to change the answers."
    out.print(
        f"\n{escape(options.model)} with {escape(options.config.name)}: {mark}. {told}; "
        f"{report.mean_acceptance_length:.2f} tokens a pass; numerics {report.numerics}.{promise}",
        soft_wrap=not out.is_terminal,
    )


def _line(one: "Comparison") -> str:
    marks = {"identical": "[green]✓[/green]", "near_tie": "[yellow]~[/yellow]", "bug": "[red]✗[/red]"}
    head = f"{marks[one.verdict.value]} prompt {one.prompt + 1}, temperature {one.temperature:g}: "
    if one.position is None:
        return (
            head
            + f"{one.verdict.value.replace('_', '-')}, {one.num_tokens} tokens"
            + ("" if one.verdict.value == "identical" else f" ({one.reason})")
        )
    told = f"[bold]{one.verdict.value.replace('_', '-')}[/bold] at token {one.position + 1}: "
    told += escape(f"plain {one.plain_token}, speculative {one.speculative_token}; {one.reason}")
    if one.measured is not None and one.measured.gap is not None:
        told += f" [dim](gap {one.measured.gap:.3g}, noise {one.measured.noise:.3g})[/dim]"
    return head + told


def _as_json(options: EngineOptions, report: "CheckReport") -> dict[str, object]:
    from dataclasses import asdict

    from ..system.provenance import provenance

    return {
        "model": options.model,
        "drafter": options.config.name,
        "speculative_config": options.config.as_dict(),
        "passed": report.passed,
        "verdicts": report.verdicts,
        "mean_acceptance_length": report.mean_acceptance_length,
        "num_references": report.num_references,
        "numerics": report.numerics,
        "lossless": report.lossless,
        "exact": report.exact,
        "law_test": None if report.law_test is None else asdict(report.law_test),
        "skipped_temperatures": report.skipped,
        "prompts": [one.as_dict() for one in report.comparisons],
        "provenance": provenance(),
    }
