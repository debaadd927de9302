"""What `paceline tune` shows."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich import box
from rich.markup import escape
from rich.table import Table

from .screen import Screen

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from ..eval.tune import Candidate
    from ..tuned import Tuned


def show(tuned: "Tuned", candidates: "Seq[Candidate]", model: str, path: Path, screen: Screen) -> None:
    """The table, what it means, the options of other engines, and how to use the file."""
    out = screen.out
    out.print(_table(candidates))
    for index, line in enumerate(tuned.words):
        out.print(f"[bold]{escape(line)}[/bold]" if index == 0 else escape(line), soft_wrap=not out.is_terminal)
    out.print("\nThe same choice elsewhere:")
    for one in cast("list[dict[str, Any]]", tuned.measured["flags"]):
        remark = f"[dim]# {escape(one['remark'])}[/dim]" if one["remark"] else ""
        parts = [escape(one["flags"]), remark] if one["flags"] else [remark]
        # Flags are to be copied: no line of them may be broken.
        out.print(f"[bold]{one['engine']:<9}[/bold] " + "  ".join(part for part in parts if part), soft_wrap=True)
    use = f"paceline generate {shlex.quote(model)} --profile {shlex.quote(str(path))} --chat ..."
    out.print(f"\n[dim]kept in {escape(str(path))}; use it:[/dim] {escape(use)}", soft_wrap=True)


def _table(candidates: "Seq[Candidate]") -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("Drafter", overflow="fold")
    headings = ("Plain\ntok/s", "Spec.\ntok/s", "Speed-\nup", "95%\ninterval", "Tokens\na pass", "Drafts\nat a time")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for one in candidates:
        gain = one.overall
        table.add_row(
            escape(one.config.name),
            f"{one.plain_tokens_per_s:.1f}",
            f"{one.tokens_per_s:.1f}",
            f"{gain.value:.2f}x",
            "–" if gain.prompts < 2 else f"{gain.low:.2f}–{gain.high:.2f}",
            f"{one.mean_acceptance_length:.2f}",
            ", ".join(str(depth) for depth in one.depths.values()) or "–",
            style="bold" if gain.pays else "",
        )
    return table
