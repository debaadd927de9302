"""`paceline check` and `paceline check-draft`: whether speculation is exact, and a head drafts as well as recorded."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from ..errors import ConfigError
from .audit import AuditOptions, OtherArgument, audit, is_url
from .options import (
    PROMPT_FILE,
    LoadOptions,
    ModelOptions,
    Speculation,
    SpeculationOptions,
    command,
    open_engine,
    opt,
    seed_option,
)
from .prompts import announce, remark_raw
from .screen import NEAR_TIE, Screen, mark, nothing_drafted, table_of

if TYPE_CHECKING:
    from ..llm import LLM
    from ..measure.check import CheckReport, Comparison
    from ..measure.trials import Trial, TrialCheck
    from ..methods.heads.info import HeadInfo


@command
def check(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|URL", help="A model, as everywhere; or http://HOST:PORT of a server.")
    ],
    speculation: SpeculationOptions,
    loading: ModelOptions,
    server: AuditOptions,
    screen: Screen,
    other: OtherArgument = None,
    prompts: str | None = opt(None, f"{PROMPT_FILE} Default: 8 built in.", metavar="FILE"),
    num_prompts: int | None = opt(None, "Use only this many of the prompts.", min=1),
    max_tokens: int = opt(64, "Maximum number of tokens of an answer.", min=1),
    temperature: list[float] | None = opt(
        None, "Repeat it for several; default: 0 and 0.8, of a server 0 and 1.", short="-t"
    ),
    seed: int = seed_option(),
    no_distribution_test: bool = opt(False, "Leave out the test of the sampled distribution."),
) -> None:
    """Check on your machine that speculation does not change the answers.

    Every prompt is decoded both ways. With invariant numerics a difference is a bug; with fast ones it is a near-tie if
    rounding explains it. Some answers, and all that differ, are compared with an independent pass over the whole text.
    Then the verification rule is sampled on a tiny model and compared with the exact distribution.
    Exit status 1 means a bug or a failed test of the distribution.

    With a URL, audits any server of the OpenAI API: whether it repeats its answers, alone, in batches and in other
    orders, with and without drafts where it can switch them; or against another server or a model that runs here.
    Exit status 1 then means a difference or a failed test, 2 a server that cannot be audited.

    Example:  paceline check smollm2-135m --drafter lookup --num-prompts 4
    Example:  paceline check http://127.0.0.1:8000 --against smollm2-135m --report audit.html
    """
    if is_url(model):
        if not speculation.is_default or speculation.num_speculative_tokens is not None or no_distribution_test:
            raise typer.BadParameter("a server drafts as it was started; leave out the drafter and its options")
        audit(
            model,
            other,
            server,
            loading,
            screen,
            prompts=prompts,
            num_prompts=num_prompts,
            max_tokens=max_tokens,
            temperatures=temperature,
            seed=seed,
        )
        return
    if given := ["a second argument"] * (other is not None) + server.given():
        raise typer.BadParameter(f"{', '.join(given)}: needs a URL as the first argument")
    # The default policy may draft nothing, which would prove nothing.
    chosen = speculation.choose("lookup", policy="fixed")
    from ..core.request import SamplingParams
    from ..measure.prompts import EXAMPLES, read_prompts, user_prompt

    temperatures = temperature or [0.0, 0.8]
    for value in temperatures:
        SamplingParams(temperature=value)  # refuse before minutes of loading
    own_prompts = read_prompts(prompts, num_prompts) if prompts is not None else None
    llm = open_engine(model, screen, loading, chosen, retests=True)
    remark_raw(sum(isinstance(prompt, str) for prompt in own_prompts or ()), llm, screen)
    from ..measure.check import check as run_check
    from ..measure.distribution_test import TEST_SECONDS
    from ..measure.formats import held_weights, unpacked_formats
    from ..measure.record import measured_on

    asked = own_prompts or [user_prompt(llm.loaded, example.prompt) for example in EXAMPLES[:num_prompts]]
    for prompt in asked:
        llm.encode(prompt)  # raises for a prompt that cannot be read, before anything is decoded
    count = len(asked) * len(temperatures)
    plan = f"{count} answers of up to {max_tokens} tokens, decoded plainly and with {chosen.config.name}, "
    plan += "some checked by an independent pass"
    plan += "" if no_distribution_test else "; then a test of the distribution on a tiny model"
    announce(plan, 2 * count * max_tokens, llm, screen, 0 if no_distribution_test else TEST_SECONDS)
    with screen.stages() as progress:
        report = run_check(
            llm,
            asked,
            max_tokens=max_tokens,
            temperatures=temperatures,
            seed=seed,
            with_distribution_test=not no_distribution_test,
            progress=progress,
        )
    if screen.json:
        screen.put_json(
            {
                **chosen.as_json(model),
                **{key: getattr(report, key) for key in ("passed", "verdicts", "mean_acceptance_length")},
                "num_references": sum(comparison.measured is not None for comparison in report.comparisons),
                "numerics": llm.numerics,
                "kv_cache_dtype": loading.kv_cache_dtype or "auto",
                "lossless": llm.verifier.lossless,
                "exact": llm.verifier.exact,
                "formats": [vars(weights) for weights in held_weights(llm.loaded)],
                "unpacked": unpacked_formats(llm, model),
                "distribution_test": report.distribution_test,
                "skipped_temperatures": report.skipped,
                "prompts": report.comparisons,
                "provenance": measured_on(),
            }
        )
    else:
        for weights in held_weights(llm.loaded):
            screen.print(f"[dim]{escape(str(weights))}[/dim]")
        if llm.loaded.kv_dtype is not None:
            screen.print(f"[dim]keys and values in {loading.kv_cache_dtype}, those of plain decoding too[/dim]")
        for form, why in unpacked_formats(llm, model).items():
            screen.print(f"[yellow]{form} of the file {escape(why)}[/yellow]")
        _print_report(f"{model} with {chosen.config.name}", llm, report, screen)
    if not report.passed:
        raise typer.Exit(1)


def _print_report(title: str, llm: "LLM", report: "CheckReport", screen: Screen) -> None:
    from ..measure.reference import TYPICAL

    for comparison in report.comparisons:
        screen.print(_comparison_line(comparison))
    if report.skipped:
        skipped = ", ".join(f"{t:g}" for t in report.skipped)
        reason = "not compared, the rule keeps only the distribution of the answers"
        screen.print(f"[dim]temperature {skipped}: {reason}[/dim]")
    measured = [comparison.measured for comparison in report.comparisons if comparison.measured is not None]
    sides = [side for measurement in measured for side in (measurement.plain, measurement.speculative)]
    if sides:
        most = max(side.typical or 0.0 for side in sides)
        screen.print(
            f"{mark(all(side.is_rounding for side in sides))} independent reference: {len(measured)} answers, scores "
            f"differ by up to {most:.2f} times what rounding explains [dim](fails above {TYPICAL:g})[/dim]"
        )
    if (test := report.distribution_test) is not None:
        differing = f", {test.num_different} differ from plain decoding" if test.num_different is not None else ""
        screen.print(
            f"{mark(test.passed)} distribution test: {test.samples:,} samples of {test.tokens} tokens, "
            f"p = {test.p_value:.3g} [dim](fails below {test.false_alarm:g})[/dim]{differing}"
        )
    if llm.drafters and not any(comparison.num_drafted for comparison in report.comparisons):
        idle = nothing_drafted(comparison.no_draft_reason for comparison in report.comparisons)
        screen.print(f"[yellow]{idle}; so no draft was checked[/yellow]")
    counts = report.verdicts
    verdict = "[bold green]passed[/bold green]" if report.passed else "[bold red]failed[/bold red]"
    promise = "" if llm.verifier.lossless else " The rule is lossy: it changes the answers by design."
    screen.print(
        f"\n{escape(title)}: {verdict}. Against plain decoding: {counts['identical']} identical, "
        f"{counts['near_tie']} near-ties, {counts['bug']} bugs; {report.mean_acceptance_length:.2f} tokens a pass; "
        f"numerics {llm.numerics}.{promise}"
    )


def _comparison_line(comparison: "Comparison") -> str:
    sign = NEAR_TIE if comparison.verdict == "near_tie" else mark(comparison.verdict == "identical")
    verdict = comparison.verdict.replace("_", "-")
    head = f"{sign} prompt {comparison.prompt + 1}, temperature {comparison.temperature:g}: "
    if comparison.position is None:
        reason = "" if comparison.verdict == "identical" else f" ({comparison.reason})"
        return f"{head}{verdict}, {comparison.num_tokens} tokens{reason}"
    tokens = escape(f"plain {comparison.plain_token}, speculative {comparison.speculative_token}; {comparison.reason}")
    gap = ""
    if comparison.measured is not None and comparison.measured.gap is not None:
        gap = f" [dim](gap {comparison.measured.gap:.3g}, noise {comparison.measured.noise:.3g})[/dim]"
    return f"{head}[bold]{verdict}[/bold] at token {comparison.position + 1}: {tokens}{gap}"


@command
def check_draft(
    head: Annotated[
        str,
        typer.Argument(
            metavar="HEAD", help="A folder (also of a draft model), or a name that `paceline models` lists."
        ),
    ],
    loading: LoadOptions,
    screen: Screen,
    model: str | None = opt(None, "The target model; default: the one it was trained for, by name."),
    num_prompts: int | None = opt(None, "Use only this many of the recorded prompts.", min=1),
    prompts: str | None = opt(None, "The prompt file, where the record does not contain the prompts.", metavar="FILE"),
    tolerance: float = opt(0.05, "Allowed difference, in addition to the sampling error.", min=0.0, max=1.0),
) -> None:
    """Check that a head still drafts as well as when it was recorded.

    Decodes the recorded prompts with the recorded budget, temperature, seed and dtype, and compares the mean acceptance
    length and the acceptance at each position. Exit status 1 means that they differ by more than the tolerance. Where
    far less is accepted, likely causes are named. A head that others published has no record: its first measurement is
    kept, and later ones are compared with it.

    Example:  paceline check-draft my-head --model smollm2-135m --num-prompts 4
    """
    with screen.spinner("starting"):  # importing torch takes seconds
        from ..measure.expected import alarm, is_far_below, is_published
        from ..measure.prompts import read_prompts
        from ..measure.record import measured_on
        from ..measure.trials import check_trial, trials_of
        from ..methods.heads.info import read_record, trained_info
        from ..system.provenance import hash_prompts

    llm = None
    if is_published(head):
        llm, info, first, is_new = _first_of(head, model, loading, screen)
        if is_new:
            _print_first(info, first, screen)
            return
        trials = [first]
    else:
        info = trained_info(head)
        record = read_record(info.folder)
        trials = trials_of(record)
        _check_weights(info, record)
    texts, wanted = None, [trial for trial in trials if trial.can_run]
    if prompts is not None:
        texts = [prompt if isinstance(prompt, str) else str(prompt[-1]["content"]) for prompt in read_prompts(prompts)]
        wanted = [trial for trial in trials if trial.prompts.sha256 == hash_prompts(texts[: trial.prompts.count])]
    if not wanted:
        raise ConfigError(
            f"{head!r} records no acceptance that can be measured {'here' if texts is None else 'with a file'}",
            got=", ".join(f"{trial.name} ({trial.prompts.source})" for trial in trials) or "no records",
            fix=None if not trials else "leave out --prompts" if texts else "give the file with --prompts",
        )
    checks, warnings = list["TrialCheck"](), list[str]()
    for trial in wanted:
        llm = _engine_for(trial, info, llm, model, loading, screen)
        count = len(trial.texts(texts)[:num_prompts])
        task = f"{trial.name}: {count} answers of up to {trial.params.most_tokens} tokens"
        announce(task, count * trial.params.most_tokens, llm, screen)
        with screen.stages() as progress:
            checks.append(check_trial(llm, trial, num_prompts, texts, tolerance, progress))
            if is_far_below(checks[-1]) and not warnings:
                warnings = alarm(llm, info, checks[-1], texts)
    left_out = [trial.name for trial in trials if trial not in wanted]
    passed = all(check.passed for check in checks)
    if screen.json:
        screen.put_json(
            {
                "head": info.folder.name,
                "method": info.method,
                "target": info.target.name,
                "passed": passed,
                "trials": [_trial_as_json(check) for check in checks],
                "warnings": warnings,
                "not_measured": left_out,
                "provenance": measured_on(),
            }
        )
    else:
        _print_trials(info, checks, left_out, screen)
        for sentence in warnings:
            screen.print(f"[yellow]• {escape(sentence)}[/yellow]")
    if not passed:
        raise typer.Exit(1)


def _first_of(
    head: str, model: str | None, loading: LoadOptions, screen: Screen
) -> "tuple[LLM, HeadInfo, Trial, bool]":
    """An engine, and the first measurement of a head that others published; whether that was made now."""
    from ..measure.expected import first_trial, info_of

    if model is None:
        raise ConfigError(f"{head!r} does not say which model it was trained for", fix="give --model")
    llm = open_engine(model, screen, loading)
    with screen.stages() as progress:
        return llm, info_of(head, llm.loaded), *first_trial(llm, head, progress)


def _print_first(info: "HeadInfo", first: "Trial", screen: Screen) -> None:
    if screen.json:
        screen.put_json({"head": info.folder.name, "method": info.method, "first": first.as_dict()})
        return
    length, count = first.result.mean_acceptance_length, first.prompts.count
    said = f"drafts {length:.2f} tokens a pass on {count} built-in prompts. This is kept: later checks compare with it."
    screen.print(f"{escape(info.folder.name)} {said}")


def _engine_for(
    trial: "Trial", info: "HeadInfo", before: "LLM | None", model: str | None, options: LoadOptions, screen: Screen
) -> "LLM":
    """An engine that drafts as the trial did. The first one loads the target model, in the trial's dtype."""
    from ..zoo import ZOO

    chosen = Speculation(trial.config(info.method, str(info.folder)))
    # A recorded "invariant" is not available on every device; None takes it where it is.
    recorded = "fast" if trial.setting.get("numerics") == "fast" else None
    dtype = options.dtype or str(trial.setting.get("dtype", "auto"))
    options = replace(options, numerics=options.numerics or recorded, dtype=dtype)
    if before is not None:
        return open_engine(before.loaded, screen, options, chosen)
    if model is None and info.target.name not in ZOO:
        message = f"{info.folder.name!r} was trained for {info.target.name!r}, which is no name of the zoo"
        raise ConfigError(message, fix="give --model")
    return open_engine(model or info.target.name, screen, options, chosen)


def _check_weights(info: "HeadInfo", record: "dict[str, object]") -> None:
    """Raises `ConfigError` unless the weights are those that the record is about."""
    from ..system.provenance import sha256_of

    path, recorded = info.folder / "model.safetensors", str(record.get("weights_sha256"))
    if path.is_file() and recorded != (digest := sha256_of(path)):
        message, got = f"{path} is not the file that training.json is about", f"sha256 {digest[:12]}"
        raise ConfigError(message, got=got, expected=f"sha256 {recorded[:12]}", fix="fetch the head again")


def _print_trials(info: "HeadInfo", checks: "list[TrialCheck]", left_out: list[str], screen: Screen) -> None:
    for check in checks:
        columns = {
            escape(f"{check.trial.name}, {len(check.measured.answers)} prompts"): lambda difference: difference.what,
            "Now": lambda difference: f"{difference.measured:.3f}",
            "Recorded": lambda difference: f"{difference.recorded:.3f}",
            "Allowed": lambda difference: f"±{difference.allowed:.3f}",
            "": lambda difference: mark(difference.holds),
        }
        screen.out.print(table_of(columns, check.differences))
        for name, now, then in check.changed:
            screen.out.print(f"[dim]{name}: {escape(now)}; recorded with {escape(then)}[/dim]")
    for name in left_out:
        screen.out.print(f"[dim]{escape(name)}: not measured[/dim]")
    passed, name = all(check.passed for check in checks), escape(info.folder.name)
    verdict = "drafts as recorded, within the tolerance."
    if all(check.is_identical for check in checks):
        verdict = "drafts exactly as recorded: every count is the same."
    elif not passed:
        verdict = "does not draft as recorded: the target model, the head or the code has changed since."
    screen.print(f"[bold]{mark(passed)}[/bold] {name} {verdict}")


def _trial_as_json(check: "TrialCheck") -> dict[str, object]:
    return {
        "name": check.trial.name,
        "passed": check.passed,
        "identical": check.is_identical,
        "measured": check.measured.as_dict(),
        "recorded": check.recorded.as_dict(),
        "differences": [{**vars(difference), "holds": difference.holds} for difference in check.differences],
        "changed": [{"what": name, "now": now, "recorded": then} for name, now, then in check.changed],
    }
