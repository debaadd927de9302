"""`paceline check-draft`."""

from typing import TYPE_CHECKING, Annotated, final

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from ..errors import ConfigError
from .engine import (
    DeviceOption,
    DtypeOption,
    EngineOptions,
    NumericsChoice,
    NumericsOption,
    ThreadsOption,
    open_engine,
)
from .screen import DebugOption, JsonOption, NoProgressOption, Screen, screen_of

if TYPE_CHECKING:
    from ..eval.trials import Trial, TrialCheck
    from ..heads import HeadInfo
    from ..llm import LLM


def check_draft(
    ctx: typer.Context,
    head: Annotated[
        str,
        typer.Argument(metavar="HEAD", help="A folder (a draft model's too), or a name that `paceline models` lists."),
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", help="The target; default: the one it was trained for, by name.", show_default=False),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option("--num-prompts", min=1, help="Only the first of the recorded prompts.", show_default=False),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option("--prompts", metavar="FILE", help="The file of a record whose prompts are not part of the head."),
    ] = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0.0, max=1.0, help="Allowed difference, beside the sampling error.")
    ] = 0.05,
    numerics: NumericsOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    json_output: JsonOption = False,
    no_progress: NoProgressOption = False,
    debug: DebugOption = False,
) -> None:
    """Does a trained head still draft as well as when it was recorded?

    Decodes the recorded prompts with the recorded budget, temperature, seed and dtype, and compares the mean acceptance
    length and the acceptance at each position. Exit status 1 means that they part by more than the tolerance.

    Example:  paceline check-draft my-head --model smollm2-135m --num-prompts 4
    """
    screen = screen_of(ctx)
    with screen.spinner("starting"):  # importing torch takes seconds
        from ..eval.trials import check_trial, trials_of
        from ..heads import read_record, trained_info
        from ..system.provenance import hash_prompts

    info = trained_info(head)
    record = read_record(info.folder)
    trials = trials_of(record)
    _check_weights(info, record)
    texts = None if prompts is None else _texts(prompts)
    wanted = [trial for trial in trials if trial.can_run]
    if texts is not None:
        wanted = [trial for trial in trials if trial.sha256 == hash_prompts(texts[: trial.count])]
    if not wanted:
        raise ConfigError(
            f"{head!r} records no acceptance that can be measured {'here' if texts is None else 'with a file'}",
            got=", ".join(f"{trial.name} ({trial.source})" for trial in trials) or "no records",
            fix=None if not trials else "leave out --prompts" if texts else "give the file with --prompts",
        )
    engine = _Engine(info, model or _target_of(info), numerics, dtype, device, threads, screen)
    checks: list[TrialCheck] = []
    for trial in wanted:
        llm = engine.for_trial(trial)
        with screen.stages() as progress:
            checks.append(check_trial(llm, trial, num_prompts, texts, tolerance, progress))
    passed = all(check.passed for check in checks)
    left_out = [trial.name for trial in trials if trial not in wanted]
    if screen.json:
        screen.put_json(_as_json(info, checks, passed, left_out))
    else:
        _print(info, checks, left_out, screen)
    if not passed:
        raise typer.Exit(1)


@final
class _Engine:
    """The target, loaded once, with the drafter of each trial."""

    def __init__(
        self,
        info: "HeadInfo",
        model: str,
        numerics: NumericsChoice | None,
        dtype: str | None,
        device: str | None,
        threads: int | None,
        screen: Screen,
    ):
        self._info, self._model, self._numerics, self._dtype = info, model, numerics, dtype
        self._device, self._threads, self._screen = device, threads, screen
        self._first: LLM | None = None

    def for_trial(self, trial: "Trial") -> "LLM":
        """An engine that drafts as the trial did; the first one loads the target, in the trial's dtype."""
        config = trial.config(self._info.method, str(self._info.folder))
        # "invariant" cannot be had everywhere: None takes it where it can.
        recorded = NumericsChoice.fast if trial.setting.get("numerics") == "fast" else None
        numerics = self._numerics or recorded
        if self._first is None:
            dtype = self._dtype or str(trial.setting.get("dtype", "auto"))
            options = EngineOptions(
                self._model, config, numerics=numerics, dtype=dtype, device=self._device, threads=self._threads
            )
            self._first = open_engine(options, self._screen)
            return self._first
        from ..llm import LLM

        drafter, policy, verifier = config.build()
        told = numerics.value if numerics else None
        return LLM(
            self._first.loaded, drafter=drafter, policy=policy, verifier=verifier, numerics=told, max_batch_size=1
        )


def _target_of(info: "HeadInfo") -> str:
    from ..zoo import ZOO

    if info.target_name in ZOO:
        return info.target_name
    raise ConfigError(
        f"{info.folder.name!r} was trained for {info.target_name!r}, which is no name of the zoo", fix="give --model"
    )


def _check_weights(info: "HeadInfo", record: "dict[str, object]") -> None:
    """Raises `ConfigError` unless the weights are those that the record is about."""
    from ..system.provenance import sha256_of

    path = info.folder / "model.safetensors"
    recorded = record.get("weights_sha256")
    if path.is_file() and recorded != (found := sha256_of(path)):
        raise ConfigError(
            f"{path} is not the file that training.json is about",
            got=f"sha256 {found[:12]}",
            expected=f"sha256 {str(recorded)[:12]}",
            fix="fetch the head again",
        )


def _texts(path: str) -> list[str]:
    from ..eval.prompt_files import read_prompts

    return [one if isinstance(one, str) else str(one[-1]["content"]) for one in read_prompts(path)]


def _print(info: "HeadInfo", checks: "list[TrialCheck]", left_out: list[str], screen: Screen) -> None:
    out = screen.out
    for check in checks:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in (f"{check.trial.name}, {len(check.measured.answers)} prompts", "Now", "Recorded", "Allowed", ""):
            table.add_column(escape(column), justify="left" if column.startswith(check.trial.name) else "right")
        for one in check.differences:
            mark = "[green]✓[/green]" if one.holds else "[red]✗[/red]"
            table.add_row(one.what, f"{one.measured:.3f}", f"{one.recorded:.3f}", f"±{one.allowed:.3f}", mark)
        out.print(table)
        for what, now, then in check.changed:
            out.print(f"[dim]{what}: {escape(now)}; recorded with {escape(then)}[/dim]")
    for name in left_out:
        out.print(f"[dim]{escape(name)}: not measured[/dim]")
    name = escape(info.folder.name)
    if all(check.is_identical for check in checks):
        told = f"[bold green]✓[/bold green] {name} drafts exactly as recorded: every count is the same."
    elif all(check.passed for check in checks):
        told = f"[bold green]✓[/bold green] {name} drafts as recorded, within the tolerance."
    else:
        told = (
            f"[bold red]✗[/bold red] {name} does not draft as recorded. "
            "The target, the head or the code that runs it has changed since."
        )
    out.print(told, soft_wrap=not out.is_terminal)


def _as_json(info: "HeadInfo", checks: "list[TrialCheck]", passed: bool, left_out: list[str]) -> dict[str, object]:
    from dataclasses import asdict

    from ..system.provenance import provenance

    rows = [
        {
            "name": check.trial.name,
            "passed": check.passed,
            "identical": check.is_identical,
            "measured": check.measured.as_dict(),
            "recorded": check.recorded.as_dict(),
            "differences": [{**asdict(one), "holds": one.holds} for one in check.differences],
            "changed": [{"what": what, "now": now, "recorded": then} for what, now, then in check.changed],
        }
        for check in checks
    ]
    return {
        "head": info.folder.name,
        "method": info.method,
        "target": info.target_name,
        "passed": passed,
        "trials": rows,
        "not_measured": left_out,
        "provenance": provenance(),
    }
