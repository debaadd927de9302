"""`paceline bench`: the speed-up of speculation over plain decoding, and a comparison with other systems."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from rich.table import Table

from ..errors import PacelineError
from .options import (
    MEASURING,
    PROMPT_FILE,
    PROMPTS,
    AnswerOptions,
    ModelArgument,
    ModelOptions,
    SpeculationOptions,
    command,
    open_engine,
    opt,
)
from .process import uninterrupted
from .prompts import announce_run, choose_prompts
from .screen import NEAR_TIE, Screen, mark, nothing_drafted, number, table_of


@command
def bench(
    model: ModelArgument,
    speculation: SpeculationOptions,
    answers: AnswerOptions,
    loading: ModelOptions,
    screen: Screen,
    suite: str = opt(
        "built-in", f"built-in, spec_bench, mt_bench, humaneval, gsm8k, mbpp, or a file: {PROMPT_FILE}", PROMPTS, "-s"
    ),
    data: str | None = opt(None, "Folder that holds the suite's files.", PROMPTS, metavar="DIR"),
    download: bool = opt(False, "Fetch the suite's published file into your cache, once.", PROMPTS),
    num_prompts: int | None = opt(
        None, "Use only this many, evenly from each category, always the same ones.", PROMPTS, min=1
    ),
    batch: int = opt(1, "Prompts decoded at the same time.", MEASURING, min=1),
    repeat: int = opt(1, "How often each prompt is measured.", MEASURING, min=1),
    out: str | None = opt(None, "Result folder. Default: results/DATE-MODEL-DRAFTER.", MEASURING, "-o", "DIR"),
) -> None:
    """Measure the speed-up of speculation: plain and speculative decoding of the same prompts, in turns.

    Reports the speed-up with its 95% interval, acceptance, and whether the answers are the same. Repeat --drafter to
    compare several; the default is lookup. The result folder keeps all answers; Ctrl-C keeps what was measured so far.

    Example:  paceline bench smollm2-135m -d lookup -s spec_bench --data DIR --num-prompts 24
    """
    chosen = speculation.choose_each("lookup")
    configs = [choice.config for choice in chosen]
    names = [config.name for config in configs]
    if len(set(names)) < len(names):
        raise typer.BadParameter("the same --drafter is given twice")
    if download and data is not None:
        raise typer.BadParameter("give either --download or --data, not both")
    with screen.spinner("starting"):
        from ..measure.result_folder import claim
        from ..measure.run import OPEN_PEERS, PLAIN, BenchOptions, BenchRun, EngineSide
        from ..measure.suites import read_suite
        from ..measure.summary import about_run, summarise

    open_peers = OPEN_PEERS.get()
    if open_peers and batch > 1:
        raise typer.BadParameter("peers answer one prompt at a time: leave out --batch or --peer")
    how = BenchOptions(**vars(answers), batch=batch, repeat=repeat)
    answers.params()
    questions = read_suite(suite, data, download)
    with claim(None if out is None else Path(out), model, names) as results:
        llms = [open_engine(model, screen, loading, chosen[0], batch)]
        llms += [open_engine(llms[0].loaded, screen, loading, choice, batch) for choice in chosen[1:]]
        plain = EngineSide(PLAIN, llms[0].plain())
        sides = [EngineSide(name, llm) for name, llm in zip(names, llms, strict=True)]
        prompts, left_out = choose_prompts(questions, num_prompts, llms[0], screen)
        missing, about, ended = dict[str, str](), dict[str, dict[str, str]](), None
        announce_run(prompts, names, how, llms[0], screen)
        run = BenchRun(plain, sides, how, lambda answers: results.add(answers, {PLAIN, *names}, llms[0].tokenizer))
        try:
            with (
                open_peers(configs, llms[0], model, screen, missing) if open_peers else nullcontext(([], {})) as opened,
                screen.stages() as progress,
            ):
                peers, about = opened
                run.others = [*sides, *peers]
                run.measure(prompts, progress)
        except (Exception, KeyboardInterrupt) as error:
            if not run.answers:
                raise
            ended = error
        with uninterrupted():
            summary = {
                "model": model,
                "suite": suite,
                **summarise(run, names, missing),
                **about_run(llms, configs, prompts, len(questions), left_out, about),
            }
            try:
                results.finish(summary)
            except PacelineError as error:
                ended = ended or error
    if screen.json:
        screen.put_json({**summary, "result": results.path}, is_whole=ended is None)
    else:
        _show(summary, results.path, screen)
    if ended is not None:
        raise ended


def _show(summary: dict[str, Any], folder: Path, screen: Screen) -> None:
    for run in summary["runs"]:
        screen.out.print()
        screen.out.print(_table(run, summary["model"]))
        for line in _remarks(run):
            screen.print(line)
    if len(summary["runs"]) > 1:
        screen.out.print()
        screen.out.print(_side_by_side(summary["runs"]))
    for line in _machine(summary):
        screen.print(line)
    if summary["peers"]:
        screen.out.print()
        screen.out.print(_peer_table(summary))
    for name, reason in {**summary["missing_peers"], **summary["failed_peers"]}.items():
        screen.print(f"[yellow]without {escape(name)}:[/yellow] {escape(reason)}")
    for count, unit in ((summary["prompts_left_out"], "prompts"), (summary["turns_left_out"], "later turns")):
        if count:
            screen.print(f"[yellow]{count} {unit} left out:[/yellow] longer than the context")
    if not summary["complete"]:
        counts = f"{summary['prompts']} of {summary['prompts_chosen']}"
        screen.print(f"[yellow]stopped early:[/yellow] {counts} prompts measured")
    screen.out.print(f"[dim]kept in {escape(str(folder))}[/dim]", soft_wrap=True)


def _table(run: dict[str, Any], model: str) -> Table:
    from ..measure.results import last_part

    columns = {
        "Category": lambda row: escape(row["category"] or "all"),
        "Prompts": lambda row: str(row["prompts"]),
        "Plain\ntok/s": lambda row: number(row["plain_tokens_per_s"], ".1f"),
        "Spec.\ntok/s": lambda row: number(row["speculative_tokens_per_s"], ".1f"),
        "Speed-\nup": lambda row: number(row["speedup"], unit="x"),
        "95%\ninterval": _interval,
        "Tokens\na pass": lambda row: number(row["mean_acceptance_length"]),
        "Same as\nplain": lambda row: _share(row["verdicts"]["identical"], sum(row["verdicts"].values())),
    }
    rows = [{**figures, "category": name} for name, figures in run["categories"].items()]
    total = [] if len(rows) == 1 else [{**run, "category": "all"}]
    title = f"{escape(last_part(model))} with [bold]{escape(run['drafter'])}[/bold]"
    table = table_of(columns, [*rows, *total], title=title)
    table.title_style, table.padding = "", (0, 0, 0, 1)
    for column in table.columns:
        column.no_wrap = True
    if total:
        table.rows[-1].style = "bold"
        if rows:
            table.rows[-2].end_section = True
    return table


def _side_by_side(runs: list[dict[str, Any]]) -> Table:
    """A row for each drafter."""
    columns = {
        "Drafter": lambda run: escape(run["drafter"]),
        "Speed-\nup": lambda run: number(run["speedup"], unit="x"),
        "95%\ninterval": _interval,
        "Tokens\na pass": lambda run: number(run["mean_acceptance_length"]),
        "Drafts\naccepted": lambda run: number(run["draft_acceptance_rate"], ".0%"),
        "Same as\nplain": lambda run: _share(run["verdicts"]["identical"], sum(run["verdicts"].values())),
    }
    table = table_of(columns, runs)
    for column in table.columns[1:]:
        column.no_wrap = True
    return table


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}" if whole else "–"


def _remarks(run: dict[str, Any]) -> list[str]:
    split, verdicts, remarks = run["ms_per_round"], run["verdicts"], list[str]()
    if run["speedup"] is not None:
        has_interval = run["speedup_prompt_mean_low"] is not None
        between = f" ({_interval(run, 'speedup_prompt_mean')})" if has_interval else ""
        remarks.append(
            f"mean over prompts {number(run['speedup_prompt_mean'], unit='x')}{between}; "
            f"with the prefill of the prompts {number(run['speedup_with_prefill'], unit='x')}"
        )
    if run["acceptance_by_position"]:
        both = zip(run["acceptance_by_position"], run["rounds_by_position"], strict=True)
        shares = ", ".join(f"{100 * share:.0f}% [dim]of {rounds}[/dim]" for share, rounds in both)
        remarks.append(f"accepted by position, of rounds that drafted so far: {shares}")
    experts = f", {run['mean_experts']:.0f} experts read" if run["mean_experts"] else ""
    remarks.append(
        f"a round: {split['total']:.1f} ms = draft {split['draft']:.1f} + verify {split['verify']:.1f} "
        f"+ rest {split['rest']:.1f}; {number(run['mean_drafted'], '.1f')} tokens drafted{experts}"
    )
    if not run["rounds_with_draft"] and run["drafter"] != "none":
        remarks.append(f"[yellow]{nothing_drafted(run['no_draft_reasons'])}[/yellow]")
    if run["sources"]:
        parts = (f"{name} {100 * source['share_of_tokens']:.0f}%" for name, source in run["sources"].items())
        remarks.append(f"tokens drafted and accepted: {escape(', '.join(parts))} of the answers")
    if sum(verdicts.values()):
        sign = NEAR_TIE if verdicts["near_tie"] and not verdicts["bug"] else mark(not verdicts["bug"])
        remarks.append(
            f"{sign} against plain decoding: {verdicts['identical']} identical, {verdicts['near_tie']} near-ties, "
            f"{verdicts['bug']} bugs"
        )
    for bug in [case for case in run["differences"] if case["verdict"] == "bug"][:5]:  # the folder has all
        remarks.append(f"  prompt {escape(bug['id'])}, turn {bug['turn'] + 1}: {escape(bug['reason'])}")
    if run["not_compared"]:
        remarks.append(
            f"[dim]{run['not_compared']} answers not compared: the rule keeps the distribution, not the tokens[/dim]"
        )
    return remarks


def _machine(summary: dict[str, Any]) -> list[str]:
    plain = f"\nplain: {number(summary['plain_tokens_per_s'], '.1f')} tok/s, "
    plain += f"{summary['plain_ms_per_pass']['total']:.1f} ms a pass"
    if summary["floor_fraction"] is not None:
        plain += (
            f"; reads {summary['weight_bytes'] / 1e6:,.0f} MB a pass at {summary['achieved_bandwidth'] / 1e9:.1f} "
            f"of {summary['read_bandwidth'] / 1e9:.1f} GB/s: {100 * summary['floor_fraction']:.0f}% of the floor"
        )
    peaks = {"peak_memory_bytes": "memory", "peak_gpu_memory_bytes": "on the GPU"}
    peak = ", ".join(f"{summary[key] / 1e9:.2f} GB {kind}" for key, kind in peaks.items() if summary[key])
    settings = summary["settings"]
    return [
        plain,
        f"[dim]peak {peak}; batch {settings['batch']}, temperature {settings['temperature']:g}, "
        f"{settings['max_tokens']} tokens, numerics {summary['numerics']}[/dim]",
    ]


def _peer_table(summary: dict[str, Any]) -> Table:
    columns = {
        "Peer": lambda peer: escape(peer["side"]),
        "tok/s": lambda peer: number(peer["tokens_per_s"], ".1f"),
        "over our\nplain": lambda peer: _with_interval(peer["over_plain"]),
    }
    for run in summary["runs"]:
        name = run["drafter"]
        columns[f"over our\n{escape(name)}"] = lambda peer, name=name: _with_interval(peer["over_speculative"][name])
    columns["same as\nour plain"] = lambda peer: number(peer["identical_share"], ".0%")
    table = table_of(columns, summary["peers"])
    table.columns[0].no_wrap = True
    return table


def _with_interval(figures: dict[str, Any]) -> str:
    if figures["speedup"] is None:
        return "–"
    interval = "" if figures["speedup_low"] is None else f"\n[dim]{_interval(figures)}[/dim]"
    return number(figures["speedup"], unit="x") + interval


def _interval(figures: dict[str, Any], key: str = "speedup") -> str:
    low, high = figures[f"{key}_low"], figures[f"{key}_high"]
    return "–" if low is None or high is None else f"{number(low)}–{number(high)}"
