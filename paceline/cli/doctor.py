"""`paceline doctor`."""

from typing import TYPE_CHECKING, Annotated

import typer

from ..spec_config import SpecConfig
from .doctor_view import as_json, show_findings, show_machine, show_model
from .engine import (
    DeviceOption,
    DtypeOption,
    EngineOptions,
    MaxLenOption,
    NumericsOption,
    ThreadsOption,
    TrustOption,
    WeightsOption,
    open_engine,
)
from .screen import DebugOption, JsonOption, NoProgressOption, Screen, screen_of

if TYPE_CHECKING:
    from ..eval.doctor import MachineReport, ModelReport


def doctor(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A folder, a hub id, or a name that `paceline models` lists. Default: smollm2-135m if it is here, "
            "else the machine alone.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option("--batch", min=1, help="Sequences side by side that the memory plan allows for.")
    ] = 8,
    drafter_free: Annotated[
        bool, typer.Option("--drafter-free", metavar="", help="Plan no memory for an INT4 self-draft.")
    ] = False,
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
    """Measure what your machine can do with a model, and learn what limits it.

    Memory, the floor that reading the weights sets, what a pass takes by its rows, and what a drafter may cost to pay.
    Takes some ten seconds for a small model; on a busy machine the timings are worth little, and it says so.

    Example:  paceline doctor smollm2-135m
    """
    screen = screen_of(ctx)
    chosen = model if model is not None else _default_model()
    with screen.spinner("looking at the machine"):
        from ..eval.doctor import doctor_report, examine_machine
        from ..system.threads import use_threads

        use_threads(threads)
        machine = examine_machine(device)
    if not screen.json:
        show_machine(machine, screen.out)
    report = None
    if chosen is not None:
        options = EngineOptions(
            chosen,
            SpecConfig(),
            numerics=numerics,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            threads=threads,
            trust_remote_code=trust_remote_code,
            weights=weights,
        )
        report = _examine(options, machine, batch, not drafter_free, screen)
    told = doctor_report(machine, report)
    if screen.json:
        screen.put_json(as_json(machine, report, told))
    else:
        show_findings(told, screen.out)


def _default_model() -> str | None:
    """The default model where it has been pulled: looking at a machine is no reason to fetch one."""
    from .. import zoo

    return next((row.name for row in zoo.installed() if row.name == zoo.DEFAULT_MODEL and row.pulled), None)


def _examine(
    options: EngineOptions, machine: "MachineReport", slots: int, with_draft: bool, screen: Screen
) -> "ModelReport":
    from ..eval.doctor import examine_model

    llm = open_engine(options, screen)
    with screen.stages() as progress:
        report = examine_model(llm, machine, slots, with_draft, progress)
    if not screen.json:
        show_model(report, screen.out)
    return report
