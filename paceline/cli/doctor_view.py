"""How a doctor's report looks: tables for people, a mapping for JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from ..eval.doctor import MachineReport, ModelReport


def show_machine(machine: "MachineReport", out: Console) -> None:
    """Hardware, versions, threads, load and bandwidth."""
    facts, found, load = machine.facts, machine.processors, machine.load
    table = _table("Machine")
    table.add_row("CPU", escape(f"{facts['cpu'] or 'unknown'}, {found.cores} cores, {found.cpus} logical"))
    table.add_row("instructions", ", ".join(machine.flags) or "unknown")
    table.add_row("kernels", escape(machine.kernels))
    memory = facts["memory_bytes"]
    total = "unknown" if not isinstance(memory, int) else _size(memory)
    table.add_row("memory", f"{total}, {_size(machine.available)} available")
    table.add_row("GPU", escape(str(facts["gpu"] or "none")))
    table.add_row(
        "versions", f"paceline {facts['paceline']}, torch {facts['torch']}, transformers {facts['transformers']}"
    )
    table.add_row("threads", f"{machine.threads}, where {found.reason}; they {machine.waiting}")
    busy = "unknown" if load.busy_cores is None else f"others use {load.busy_cores:.1f} cores"
    state = "[bold yellow]busy[/bold yellow]" if load.disturbs else "quiet" if load.busy_cores is not None else ""
    stolen = f", {load.stolen:.0%} stolen" if load.stolen else ""
    average = "" if load.average is None else f"; average of a minute {load.average:.1f}"
    table.add_row("load", f"{state}{', ' if state else ''}{busy}{stolen}{average}")
    table.add_row("reads", f"{machine.bandwidth / 1e9:.1f} GB/s")
    out.print(table)


def show_model(report: "ModelReport", out: Console) -> None:
    """Memory plan, kinds of layers and the times of passes."""
    memory, costs = report.memory, report.costs
    table = _table(escape(f"{report.name}, {report.dtype} on {report.device}"))
    table.add_row("weights", _size(memory.weights))
    table.add_row(
        "cache",
        f"{_size(memory.kv_cache)} for {memory.slots} x {memory.length:,} tokens at most, "
        f"{_size(memory.kv_per_token)} a token",
    )
    table.add_row("INT4 self-draft", _size(memory.draft) if memory.draft else "not planned for")
    verdict = {True: "[green]fits[/green]", False: "[bold red]does not fit[/bold red]", None: "unknown whether it fits"}
    table.add_row("together", f"{_size(memory.total)} of {_size(memory.available)} available: {verdict[memory.fits]}")
    layers = (f"{count} {name} ({_size(size)})" for name, (count, size) in report.layers.items())
    table.add_row("layers", escape(", ".join(layers)))
    padded = f", passes padded to a multiple of {report.row_multiple} rows" if report.row_multiple > 1 else ""
    table.add_row("numerics", report.numerics + padded)
    trees = "through our attention" if report.attends_trees else "through masks of its own attention"
    trees = "in native passes" if report.native else trees
    table.add_row("self-test", f"[green]passed[/green]: trees give the logits of plain transformers, {trees}")
    table.add_row(
        "floor", f"{_size(costs.weight_bytes)} at {costs.bandwidth / 1e9:.1f} GB/s: {_ms(costs.floor)} a pass"
    )
    out.print(table)
    passes = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title=f"Passes behind {report.context} tokens", title_justify="left"
    )
    for column in ("rows", "ms", "times one row", "of the floor", "tokens/s if all are kept"):
        passes.add_column(column, justify="right")
    for rows, seconds in sorted(costs.seconds.items()):
        passes.add_row(
            str(rows),
            f"{1e3 * seconds:.2f}",
            f"{seconds / costs.seconds[1]:.2f}",
            f"{costs.floor / seconds:.0%}",
            f"{rows / seconds:,.0f}",
        )
    out.print(passes)


def show_findings(told: Sequence[str], out: Console) -> None:
    """The sentences."""
    for sentence in told:
        out.print(f"• {escape(sentence)}", soft_wrap=not out.is_terminal)


def as_json(machine: "MachineReport", report: "ModelReport | None", told: Sequence[str]) -> dict[str, object]:
    """Everything, in bytes, seconds and bytes per second; what is of the model is null without one."""
    shown: dict[str, object] = {
        "provenance": dict(machine.facts),
        "cpu_flags": list(machine.flags),
        "kernels": machine.kernels,
        "processors": {**asdict(machine.processors), "threads": machine.processors.threads},
        "reason": machine.processors.reason,
        "threads": machine.threads,
        "waiting": machine.waiting,
        "load": {**asdict(machine.load), "disturbs": machine.load.disturbs},
        "available_bytes": machine.available,
        "bandwidth": machine.bandwidth,
        "findings": list(told),
        "model": None,
        "pass_times": None,
        "floor_s": None,
    }
    if report is None:
        return shown
    memory, costs = report.memory, report.costs
    extra = {"kv_cache": memory.kv_cache, "total": memory.total, "fits": memory.fits}
    return shown | {
        "model": report.name,
        "dtype": report.dtype,
        "device": report.device,
        "numerics": report.numerics,
        "row_multiple": report.row_multiple,
        "native": report.native,
        "self_test": "passed",
        "attends_trees": report.attends_trees,
        "context": report.context,
        "layers": {name: {"count": count, "bytes": size} for name, (count, size) in report.layers.items()},
        "memory": asdict(memory) | extra,
        "weight_bytes": costs.weight_bytes,
        "bandwidth": costs.bandwidth,
        "floor_s": costs.floor,
        "floor_fraction": costs.floor_fraction,
        "overhead_s": costs.overhead,
        "flat_rows": costs.flat_rows,
        "pass_times": {str(rows): seconds for rows, seconds in costs.seconds.items()},
    }


def _table(title: str) -> Table:
    table = Table(box=None, show_header=False, title=title, title_justify="left", title_style="bold", pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _size(size: int | None) -> str:
    """Bytes in a unit of three digits."""
    if size is None:
        return "unknown"
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}" if size < 100 * factor else f"{size / factor:,.0f} {unit}"
    return f"{size} bytes"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
