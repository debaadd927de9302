"""`paceline check URL`: the options, and what is printed."""

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape

from ..errors import ConfigError, PacelineError
from .options import ModelOptions, open_engine, opt
from .screen import NEAR_TIE, Screen, mark

if TYPE_CHECKING:
    from ..audit.answers import Server, Side
    from ..audit.audit import Audit, Plan
    from ..audit.client import Client
    from ..audit.record import Comparison, Record
    from ..measure.prompts import Prompt

SERVERS = "Servers"
_DEFAULT_TEMPERATURES = [0.0, 1.0]
OtherArgument = Annotated[
    str | None,
    typer.Argument(metavar="[OTHER]", help="After a URL: another URL, or a model to run here, to compare it with."),
]


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """The options that only a URL takes."""

    against: str | None = opt(None, "The same as OTHER.", SERVERS, metavar="URL|MODEL")
    served_model: list[str] | None = opt(
        None, "Name of the model at the server; default: its only one. Twice: of both servers.", SERVERS, metavar="NAME"
    )
    api_key: list[str] | None = opt(None, "Default: $OPENAI_API_KEY. Twice: of both servers.", SERVERS, metavar="KEY")
    repeats: int = opt(
        2, "How often each prompt is asked again alone, in another order, and in batches.", SERVERS, min=1
    )
    concurrency: int = opt(4, "Requests at a time.", SERVERS, min=1, max=256)
    samples: int = opt(100, "Sampled answers to each of four prompts.", SERVERS, min=10, max=100_000)
    timings: int = opt(2, "How often each prompt is timed; 0: not at all.", SERVERS, min=0)
    tolerance: float | None = opt(
        None, "Nats that the tokens of a near-tie may be apart; default: 0.25, or the noise of OTHER.", SERVERS, min=0.0
    )
    raw: bool = opt(False, "Ask all prompts as text to continue, by /v1/completions.", SERVERS)
    chat: bool = opt(False, "Ask all prompts in a chat, by /v1/chat/completions.", SERVERS)
    timeout: float = opt(120.0, "Seconds for one answer.", SERVERS, min=0.1, max=86400.0)
    report: list[Path] | None = opt(
        None,
        "Write a report, by its suffix .md, .html or .xml (JUnit). Repeat it for several.",
        SERVERS,
        metavar="FILE",
    )
    card: str | None = opt(
        None, "Acceptance that the drafts should have: a head, or JSON with mean_acceptance_length.", SERVERS,
        metavar="FILE|HEAD",
    )  # fmt: skip
    fail_on: Literal["different", "unstable", "near-tie"] = opt(
        "different", "unstable: also where a server does not repeat itself by a near-tie; near-tie: at any.", SERVERS
    )

    def given(self) -> list[str]:
        """The options that differ from their defaults, as written on the command line."""
        return [f"--{f.name.replace('_', '-')}" for f in fields(self) if getattr(self, f.name) != f.default]


def is_url(text: str) -> bool:
    """Whether an argument names a server."""
    return text.lower().startswith(("http://", "https://"))


def audit(
    url: str,
    other: str | None,
    options: AuditOptions,
    loading: ModelOptions,
    screen: Screen,
    *,
    prompts: str | None,
    num_prompts: int | None,
    max_tokens: int,
    temperatures: list[float] | None,
    seed: int,
) -> None:
    """Audit a server. Exits with 1 for a difference, with 2 for a server that cannot be audited."""
    other = _one_other(other, options)
    try:
        with screen.spinner("starting"):
            from ..audit.audit import Audit, Plan
            from ..audit.report import check_files

            check_files(options.report or [])
            drawn = [t for t in temperatures or _DEFAULT_TEMPERATURES if t > 0]
            if len(drawn) > 1:
                raise typer.BadParameter("a server is sampled at one --temperature above 0; give at most one, and 0")
            plan = Plan(
                _asked(prompts, num_prompts, options),
                max_tokens=max_tokens,
                is_greedy=0.0 in (temperatures or _DEFAULT_TEMPERATURES),
                temperature=drawn[0] if drawn else None,
                seed=seed,
                repeats=options.repeats,
                concurrency=options.concurrency,
                samples=options.samples,
                timings=options.timings,
                tolerance=options.tolerance,
                card=None if options.card is None else _card(options.card),
            )
        sides = _sides(url, other, options, loading, screen)
        run = Audit(sides, plan)
        run.record.settings = _settings(plan, options)
        said = f"About {plan.num_requests(sides)} requests to {' and '.join(side.name for side in sides)}"
        screen.say(escape(f"{said}. Ctrl-C stops, and keeps what was found."))
        try:
            with screen.stages() as run.progress:
                run.run()
        except PacelineError:
            _publish(run, options, screen)
            raise
        except KeyboardInterrupt:
            _publish(run, options, screen, is_whole=False)
            raise
    except PacelineError as error:
        if not isinstance(error, _refusals()):
            raise
        screen.put_error(type(error).__name__, error.what, error.got, error.expected, error.fix)
        screen.say_error(str(error))
        raise typer.Exit(2) from error
    _publish(run, options, screen)
    if run.record.failures(options.fail_on):
        raise typer.Exit(1)


# Helpers


def _refusals() -> tuple[type[PacelineError], ...]:
    """The errors of what cannot be audited."""
    from ..audit.client import AuditError

    return AuditError, ConfigError


def _one_other(other: str | None, options: AuditOptions) -> str | None:
    if other is not None and options.against is not None:
        raise typer.BadParameter("give the other side once: as the second argument, or by --against")
    if options.raw and options.chat:
        raise typer.BadParameter("give --raw or --chat, not both")
    return options.against if other is None else other


def _asked(prompts: str | None, num_prompts: int | None, options: AuditOptions) -> "list[Prompt]":
    """The prompts, in the form that was chosen."""
    from ..measure.prompts import EXAMPLES, read_prompts

    if prompts is not None:
        found = read_prompts(prompts, num_prompts)
    else:
        found = [_chat(example.prompt) for example in EXAMPLES[:num_prompts]]
    if any(not isinstance(m["content"], str) for one in found if not isinstance(one, str) for m in one):
        raise ConfigError("prompts with images cannot be audited", got=prompts, fix="leave out those with images")
    if options.chat:
        return [_chat(one) if isinstance(one, str) else one for one in found]
    if options.raw:
        return [one if isinstance(one, str) else _text(one) for one in found]
    return found


def _chat(text: str) -> "Prompt":
    return [{"role": "user", "content": text}]


def _text(chat: "Prompt") -> str:
    said = [message["content"] for message in chat if not isinstance(message, str)]
    if len(said) != 1 or not isinstance(said[0], str):
        raise ConfigError("a chat of several messages or of parts is no text to continue", fix="leave out --raw")
    return said[0]


def _sides(url: str, other: str | None, options: AuditOptions, loading: ModelOptions, screen: Screen) -> "list[Side]":
    from ..audit.client import Client

    keys = options.api_key or [os.environ.get("OPENAI_API_KEY", "")]
    names = options.served_model or []
    first = _server(Client(url, keys[0], options.timeout), names[0] if names else None, screen)
    if other is None:
        if first.engine.off is None:
            return [replace(first, name="the server")]
        plain = replace(first, name="without drafts", extra=first.engine.off, refused={})
        return [replace(first, name="with drafts"), plain]
    if is_url(other):
        same = Client(other).parts.netloc == first.client.parts.netloc
        key = keys[1] if len(keys) > 1 else keys[0] if same else None
        second = _server(Client(other, key, options.timeout), names[1] if len(names) > 1 else None, screen)
        if second.name == first.name:
            first.name, second.name = f"{first.name} (first)", f"{second.name} (second)"
        return [first, second]
    from ..audit.local import Local

    return [
        first,
        Local(open_engine(other, screen, loading, max_num_seqs=options.concurrency), f"{Path(other).name} here"),
    ]


def _server(client: "Client", wanted: str | None, screen: Screen) -> "Server":
    from ..audit.answers import Server, chosen_model
    from ..audit.engines import identify

    with screen.spinner(f"asking {client.url}"):
        model = chosen_model(client, wanted)
        engine = identify(client)
    return Server(client, engine, model, client.parts.netloc + client.base)


def _card(source: str) -> float:
    """The mean acceptance length that a head's record or a file states. Raises `ConfigError`."""
    from ..measure.trials import trials_of
    from ..methods.heads.info import read_record
    from ..schema import validate
    from ..system.files import read_object

    record = read_object(source) if Path(source).is_file() else read_record(source)
    if "mean_acceptance_length" in record:
        return validate(float, record["mean_acceptance_length"], f"mean_acceptance_length of {source}")
    trials = trials_of(record)
    if not trials:
        raise ConfigError(f"{source} records no acceptance", expected="a head, or JSON with mean_acceptance_length")
    return trials[0].result.mean_acceptance_length


def _settings(plan: "Plan", options: AuditOptions) -> dict[str, object]:
    shown = ("max_tokens", "temperature", "seed", "repeats", "concurrency", "samples", "timings", "card")
    return {
        "prompts": len(plan.prompts),
        **{name: getattr(plan, name) for name in shown},
        "timeout_s": options.timeout,
        "fail_on": options.fail_on,
    }


def _publish(run: "Audit", options: AuditOptions, screen: Screen, is_whole: bool = True) -> None:
    """Print what was found, and write the reports."""
    from ..audit.report import as_json, write_report

    if screen.json:
        screen.put_json(as_json(run.record, options.fail_on), is_whole)
    else:
        _print(run.record, options, screen)
    for file in options.report or []:
        write_report(run.record, file, options.fail_on)
        if not screen.json:
            screen.print_path(file)


def _print(record: "Record", options: AuditOptions, screen: Screen) -> None:
    from ..audit.report import about_side, context, draft_rows, speed_rows, test_rows, title
    from ..audit.verdicts import Verdict

    for name, about in record.sides.items():
        screen.print(f"[bold]{escape(name)}[/bold] [dim]{escape(about_side(about))}[/dim]")
    for one in record.comparisons:
        screen.print(_line(one))
        for case in one.cases:
            if case.worst.verdict is Verdict.IDENTICAL:
                continue
            screen.print(f"    prompt {case.prompt + 1}: {case.worst.verdict.value}, {escape(case.worst.reason)}")
            if case.worst.difference is not None:
                for line in context(case.worst.difference):
                    screen.print(f"      [dim]{escape(line)}[/dim]")
    for test, row in zip(record.tests, test_rows(record), strict=True):
        screen.print(
            f"{mark(test.passed)} {escape(test.name)}: {row[1]} samples, p = {row[2]} [dim](fails below {row[3]}, "
            f"notices a shift of {row[4]})[/dim]"
        )
    for drafts, row in zip(record.drafts, draft_rows(record), strict=True):
        card = "" if drafts.card is None else f"; the card says {row[4]}"
        sign = mark(not drafts.is_below_card)
        screen.print(
            f"{sign} {escape(drafts.name)}: {row[2]} of {row[1]} drafts accepted, {row[3]} tokens a pass{card}"
        )
    for fault in record.faults:
        screen.print(f"{NEAR_TIE if fault.is_unstable else mark(False)} {escape(f'{fault.subject}: {fault.text}')}")
    for row in speed_rows(record):
        ratio = "" if row[3] == "–" else f", {row[3]} times the first"
        screen.print(f"  {escape(row[0])}: {row[1]} tokens a second, first token after {row[2]} ms{ratio}")
    for remark in record.remarks:
        screen.print(f"[dim]{escape(remark)}[/dim]")
    screen.print(f"\n[bold]{escape(title(record, options.fail_on))}[/bold]")
    for reason in record.failures(options.fail_on):
        screen.print(f"  {escape(reason)}")


def _line(one: "Comparison") -> str:
    from ..audit.verdicts import Verdict

    counts = one.counts
    bad = counts[Verdict.DIFFERENT] + counts[Verdict.FAILED]
    sign = mark(not bad) if bad or not counts[Verdict.NEAR_TIE] else NEAR_TIE
    told = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items() if count)
    return f"{sign} {escape(one.name)}: {told}"
