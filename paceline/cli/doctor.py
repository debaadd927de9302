"""`paceline doctor`: how fast this machine can run a model, and what limits it."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from ..errors import ConfigError
from .options import ModelOptions, command, open_engine, opt
from .screen import Screen, table_of

if TYPE_CHECKING:
    from ..measure.doctor import MachineReport, ModelReport


@command
def doctor(
    loading: ModelOptions,
    screen: Screen,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A folder, a hub id, or a name of `paceline models`. Default: smollm2-135m if it is here.",
            show_default=False,
        ),
    ] = None,
    batch: int = opt(8, "Sequences decoded at the same time, for the memory plan.", min=1),
    drafter_free: bool = opt(False, "Plan no memory for an INT4 self-draft."),
    head: str | None = opt(None, "Compare what this head drafts with its record, on two prompts."),
) -> None:
    """Measure how fast your machine can run a model, and what limits it.

    Reports the memory of the model and of drafters, in which formats weights are held and why some are not packed, the
    shortest time in which the weights can be read, the time of a pass by its number of rows, and how much time a
    drafter may take to be worth it. Takes some ten seconds for a small model. Timings on a busy machine mean little;
    the report warns of this.

    Example:  paceline doctor smollm2-135m
    """
    with screen.spinner("looking at the machine"):
        from .. import zoo
        from ..measure.doctor import doctor_report, examine_machine, examine_model
        from ..measure.expected import examine_head
        from ..system.hardware import use_threads

        use_threads(loading.threads)
        machine = examine_machine(loading.device)
    if model is None:  # the default model only where it has been pulled: looking at a machine is no reason to fetch one
        model = next((row.name for row in zoo.installed() if row.name == zoo.DEFAULT_MODEL and row.pulled), None)
    if not screen.json:
        _print_machine(machine, screen)
    report, about_head = None, list[str]()
    if model is None and head is not None:
        raise ConfigError("a head drafts for a model", got=f"--head {head} alone", fix="name the model")
    if model is not None:
        llm = open_engine(model, screen, loading, retests=True)
        with screen.stages() as progress:
            report = examine_model(llm, machine, batch, not drafter_free, progress, model)
            if head is not None:
                about_head = examine_head(llm, head, 2, progress)
        if not screen.json:
            _print_model(report, screen)
    sentences = [*doctor_report(machine, report), *about_head]
    if screen.json:
        screen.put_json(_as_json(machine, report, sentences))
        return
    for sentence in sentences:
        screen.print(f"• {escape(sentence)}")


def _print_machine(machine: "MachineReport", screen: Screen) -> None:
    facts, processors, load = machine.provenance, machine.processors, machine.load
    memory = facts["memory_bytes"]
    busy = "unknown" if load.busy_cores is None else f"others use {load.busy_cores:.1f} cores"
    state = "[bold yellow]busy[/bold yellow], " if load.disturbs else "quiet, " if load.busy_cores is not None else ""
    stolen = f", {load.stolen:.0%} stolen" if load.stolen else ""
    average = "" if load.average is None else f"; average of a minute {load.average:.1f}"
    rows = {
        "CPU": escape(f"{facts['cpu'] or 'unknown'}, {processors.cores} cores, {processors.cpus} logical"),
        "instructions": ", ".join(machine.cpu_flags) or "unknown",
        "kernels": escape(machine.kernels),
        "memory": f"{_size(memory if isinstance(memory, int) else None)}, {_size(machine.available_bytes)} available",
        "GPU": escape(str(facts["gpu"] or "none")),
        "versions": ", ".join(f"{name} {facts[name]}" for name in ("paceline", "torch", "transformers")),
        "threads": f"{machine.threads}, where {processors.reason}; they {machine.waiting}",
        "load": f"{state}{busy}{stolen}{average}",
        "reads": f"{machine.bandwidth / 1e9:.1f} GB/s",
    }
    screen.out.print(_table("Machine", rows))


def _print_model(report: "ModelReport", screen: Screen) -> None:
    memory, costs = report.memory, report.costs
    verdict = {True: "[green]fits[/green]", False: "[bold red]does not fit[/bold red]", None: "unknown whether it fits"}
    padded = f", passes padded to a multiple of {report.row_multiple} rows" if report.row_multiple > 1 else ""
    trees = "through Paceline's attention" if report.attends_trees else "through masks of its own attention"
    trees = "in native passes" if report.native else trees
    rows = {
        "weights": _size(memory.weights),
        "cache": f"{_size(memory.kv_cache)} for {memory.slots} x {memory.length:,} tokens at most, "
        f"{_size(memory.kv_per_token)} a token",
        "INT4 self-draft": _size(memory.draft) if memory.draft else "not planned for",
        "together": f"{_size(memory.total)} of {_size(memory.available)} available: {verdict[memory.fits]}",
        "numerics": report.numerics + padded,
        "self-test": f"[green]passed[/green]: trees give the logits of plain transformers, {trees}",
        "floor": f"{_size(costs.weight_bytes)} at {costs.bandwidth / 1e9:.1f} GB/s: {1e3 * costs.floor:.2f} ms a pass",
    }
    if report.images is not None:
        generic = "generic: transformers reads all images of a prompt together"
        rows["images"] = generic if report.images == "generic" else "each is encoded once"
    screen.out.print(_table(escape(f"{report.model}, {report.dtype} on {report.device}"), rows))
    formats = {
        "weights": lambda group: f"{group.count} {group.what}",
        "format": lambda group: group.form,
        "size": lambda group: _size(group.num_bytes),
        "": lambda group: "packed" if group.reason is None else f"[dim]not packed: {escape(group.reason)}[/dim]",
    }
    screen.out.print(table_of(formats, report.formats))
    passes = {
        "rows": lambda cost: str(cost[0]),
        "ms": lambda cost: f"{1e3 * cost[1]:.2f}",
        "times one row": lambda cost: f"{cost[1] / costs.seconds[1]:.2f}",
        "of the floor": lambda cost: f"{costs.floor / cost[1]:.0%}",
        "tokens/s if all are accepted": lambda cost: f"{cost[0] / cost[1]:,.0f}",
    }
    title = f"Passes after {report.context} tokens of context"
    screen.out.print(table_of(passes, sorted(costs.seconds.items()), 0, title))
    bounds = {
        "drafter": lambda drafter: drafter.drafter,
        "memory at most": lambda drafter: _size(drafter.total),
        "for each": lambda drafter: f"{drafter.each} bytes a {drafter.of}",
        "of these": lambda drafter: f"{drafter.count:,}",
    }
    screen.out.print(table_of(bounds, report.drafters, title=f"Drafters without weights, {memory.slots} texts"))


def _as_json(machine: "MachineReport", report: "ModelReport | None", sentences: list[str]) -> dict[str, object]:
    """Everything, in bytes, seconds and bytes per second."""
    shown: dict[str, object] = vars(machine) | {
        "processors": {**vars(machine.processors), "threads": machine.processors.threads},
        "reason": machine.processors.reason,
        "load": {**vars(machine.load), "disturbs": machine.load.disturbs},
        "findings": sentences,
    }
    if report is None:
        return shown | {"model": None, "pass_times": None, "floor_s": None}
    memory, costs = report.memory, report.costs
    return shown | {
        **{key: value for key, value in vars(report).items() if key != "costs"},
        "self_test": "passed",
        "memory": {**vars(memory), "kv_cache": memory.kv_cache, "total": memory.total, "fits": memory.fits},
        "formats": [vars(group) for group in report.formats],
        "drafters": [{**vars(drafter), "total": drafter.total} for drafter in report.drafters],
        **{key: getattr(costs, key) for key in ("weight_bytes", "bandwidth", "floor_fraction", "flat_rows")},
        "floor_s": costs.floor,
        "overhead_s": max(0.0, costs.seconds[1] - costs.floor),
        "pass_times": costs.seconds,
    }


def _table(title: str, rows: dict[str, str]) -> Table:
    table = Table(box=None, show_header=False, title=title, title_justify="left", title_style="bold", pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows.items():
        table.add_row(label, text)
    return table


def _size(size: int | None) -> str:
    return "unknown" if size is None else decimal(size)
