"""What `paceline bench` shows, and what it says of the run beside the numbers."""

from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from .screen import Screen, number

_SHOWN = 5
"""Bugs to tell of; the folder has all."""


def show(summary: dict[str, Any], folder: Path, screen: Screen) -> None:
    """The tables and what they do not say."""
    out = screen.out
    for run in summary["runs"]:
        out.print()
        out.print(_table(run, summary["model"]))
        for line in _remarks(run):
            out.print(line, soft_wrap=not out.is_terminal)
    for line in _machine(summary):
        out.print(line, soft_wrap=not out.is_terminal)
    if summary["peers"]:
        out.print()
        out.print(_peer_table(summary))
    for name, reason in {**summary["missing_peers"], **summary["failed_peers"]}.items():
        out.print(f"[yellow]without {escape(name)}:[/yellow] {escape(reason)}", soft_wrap=not out.is_terminal)
    for count, what in ((summary["prompts_left_out"], "prompts"), (summary["turns_left_out"], "later turns")):
        if count:
            out.print(f"[yellow]{count} {what} left out:[/yellow] longer than the context")
    if not summary["complete"]:
        out.print(
            f"[yellow]stopped early:[/yellow] {summary['prompts']} of {summary['prompts_chosen']} prompts measured"
        )
    out.print(f"[dim]kept in {escape(str(folder))}[/dim]", soft_wrap=True)


def _table(run: dict[str, Any], model: str) -> Table:
    title = f"{escape(_last(model))} with [bold]{escape(run['drafter'])}[/bold]"
    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("Category", no_wrap=True, min_width=14)
    for heading in ("Prompts", "Plain\ntok/s", "Spec.\ntok/s", "Speed-\nup", "95%\ninterval", "Tokens\na pass", "Same"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows = list(run["categories"].items())
    for name, one in rows:
        table.add_row(escape(name), *_cells(one))
    if len(rows) != 1:
        table.add_section()
        table.add_row("[bold]all[/bold]", *_cells(run), style="bold")
    return table


def _cells(one: dict[str, Any]) -> list[str]:
    compared = sum(one["verdicts"].values())
    return [
        str(one["prompts"]),
        number(one["plain_tokens_per_s"], ".1f"),
        number(one["speculative_tokens_per_s"], ".1f"),
        _times(one["speedup"]),
        # One prompt has no spread to speak of.
        "–" if one["prompts"] < 2 else _interval(one),
        number(one["mean_acceptance_length"]),
        f"{one['verdicts']['identical']} of {compared}" if compared else "–",
    ]


def _remarks(run: dict[str, Any]) -> list[str]:
    split, verdicts = run["ms_per_round"], run["verdicts"]
    told = [
        f"mean over prompts {_times(run['speedup_prompt_mean'])} "
        f"({_interval(run, 'speedup_prompt_mean')}); "
        f"with the reading of the prompts {_times(run['speedup_with_prefill'])}"
    ] if run["speedup"] is not None else []  # fmt: skip
    if run["acceptance_by_position"]:
        shares = " ".join(f"{100 * one:.0f}" for one in run["acceptance_by_position"])
        given = " ".join(_percent(one) for one in run["acceptance_by_position_conditional"])
        told.append(f"accepted by position, %: {shares} [dim](given those before: {given})[/dim]")
    told.append(
        f"a round: {split['total']:.1f} ms = draft {split['draft']:.1f} + verify {split['verify']:.1f} "
        f"+ rest {split['rest']:.1f}; {number(run['mean_drafted'], '.1f')} tokens drafted"
    )
    if run["sources"]:
        parts = (f"{name} {100 * one['share_of_tokens']:.0f}%" for name, one in run["sources"].items())
        told.append(f"tokens drafted and kept: {escape(', '.join(parts))} of the answers")
    if sum(verdicts.values()):
        mark = (
            "[red]✗[/red]" if verdicts["bug"] else "[yellow]~[/yellow]" if verdicts["near_tie"] else "[green]✓[/green]"
        )
        told.append(
            f"{mark} {verdicts['identical']} identical, {verdicts['near_tie']} near-ties, {verdicts['bug']} bugs"
        )
    for one in [one for one in run["differences"] if one["verdict"] == "bug"][:_SHOWN]:
        told.append(f"  prompt {escape(one['id'])}, turn {one['turn'] + 1}: {escape(one['reason'])}")
    if run["not_compared"]:
        told.append(f"[dim]{run['not_compared']} answers not compared: the rule promises the law, not the tokens[/dim]")
    return told


def _machine(summary: dict[str, Any]) -> list[str]:
    split = summary["plain_ms_per_pass"]
    told = [f"\nplain: {number(summary['plain_tokens_per_s'], '.1f')} tok/s, {split['total']:.1f} ms a pass"]
    if summary["floor_fraction"] is not None:
        told[0] += (
            f"; reads {summary['weight_bytes'] / 1e6:,.0f} MB a pass at {summary['achieved_bandwidth'] / 1e9:.1f} "
            f"of {summary['read_bandwidth'] / 1e9:.1f} GB/s: {100 * summary['floor_fraction']:.0f}% of the floor"
        )
    parts = [
        f"{summary[key] / 1e9:.2f} GB {what}"
        for key, what in (("peak_memory_bytes", "memory"), ("peak_gpu_memory_bytes", "on the GPU"))
        if summary[key]
    ]
    settings = summary["settings"]
    told.append(
        f"[dim]peak {', '.join(parts)}; batch {settings['batch']}, temperature {settings['temperature']:g}, "
        f"{settings['max_tokens']} tokens, numerics {summary['numerics']}[/dim]"
    )
    return told


def _peer_table(summary: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("Peer", no_wrap=True, min_width=max(len(one["side"]) for one in summary["peers"]))
    table.add_column("tok/s", justify="right")
    table.add_column("over our\nplain", justify="right")
    drafters = [run["drafter"] for run in summary["runs"]]
    for name in drafters:
        table.add_column(f"over our\n{escape(name)}", justify="right")
    table.add_column("same as\nour plain", justify="right")
    for one in summary["peers"]:
        ratios = [one["over_plain"], *(one["over_speculative"][name] for name in drafters)]
        table.add_row(
            escape(one["side"]),
            number(one["tokens_per_s"], ".1f"),
            *(_with_interval(ratio) for ratio in ratios),
            "–" if one["identical_share"] is None else _percent(one["identical_share"]) + "%",
        )
    return table


def _with_interval(one: dict[str, Any]) -> str:
    if one["speedup"] is None:
        return "–"
    return f"{_times(one['speedup'])}\n[dim]{_interval(one)}[/dim]"


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{number(ratio)}x"


def _interval(one: dict[str, Any], key: str = "speedup") -> str:
    low, high = one[f"{key}_low"], one[f"{key}_high"]
    return "–" if low is None or high is None else f"{number(low)}–{number(high)}"


def _percent(share: float | None) -> str:
    return "–" if share is None else number(100 * share, ".0f")


def _last(name: str) -> str:
    return name.rstrip("/\\").replace("\\", "/").rpartition("/")[2]
