"""`paceline calibrate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from ..errors import ConfigError
from .engine import (
    DeviceOption,
    DtypeOption,
    EngineOptions,
    MaxLenOption,
    NumericsChoice,
    NumericsOption,
    ThreadsOption,
    TrustOption,
    WeightsChoice,
    open_engine,
    remark_raw,
    seed_option,
)
from .screen import DebugOption, JsonOption, NoProgressOption, Screen, screen_of

if TYPE_CHECKING:
    from ..cascade import Calibration
    from ..llm import LLM

_WHAT, _PROMISE = "Prompts", "Promise"


def calibrate(
    ctx: typer.Context,
    small: Annotated[str, typer.Argument(metavar="SMALL", help="The model that is to answer alone where it is sure.")],
    large: Annotated[str, typer.Argument(metavar="LARGE", help="The model whose answers count; same tokenizer.")],
    prompts: Annotated[
        Path,
        typer.Option(
            "--prompts",
            "-p",
            metavar="FILE",
            help="JSON lines with question, turns (the first) or chat, or prompt (text to go on from), and image or "
            "images; drawn as later ones will be.",
            rich_help_panel=_WHAT,
        ),
    ],
    max_disagreement: Annotated[
        float,
        typer.Option(
            "--max-disagreement",
            help="Of all prompts, at most this share may get another answer than the large model's.",
            rich_help_panel=_PROMISE,
        ),
    ] = 0.01,
    confidence: Annotated[
        float, typer.Option("--confidence", help="How sure the promise is to be.", rich_help_panel=_PROMISE)
    ] = 0.95,
    short_limit: Annotated[
        int,
        typer.Option(
            "--short-limit", min=1, help="Tokens within which a small answer must end.", rich_help_panel=_PROMISE
        ),
    ] = 16,
    signal: Annotated[
        list[str] | None,
        typer.Option(
            "--signal",
            help="min_prob, mean_prob or margin; repeat it to choose the best, each then tested more strictly. "
            "Default: min_prob.",
            rich_help_panel=_PROMISE,
            show_default=False,
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option("--num-prompts", min=1, help="Only the first so many.", rich_help_panel=_WHAT, show_default=False),
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0: greedy.", rich_help_panel=_WHAT)] = 0.0,
    seed: Annotated[int, seed_option("Of sampled answers.", _WHAT)] = 0,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The calibration; a picture is put beside it.")
    ] = Path("calib.json"),
    small_weights: Annotated[
        WeightsChoice | None, typer.Option("--small-weights", help="Round the small model.", rich_help_panel="Model")
    ] = None,
    large_weights: Annotated[
        WeightsChoice | None, typer.Option("--large-weights", help="Round the large model.", rich_help_panel="Model")
    ] = None,
    numerics: NumericsOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    max_model_len: MaxLenOption = None,
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
    json_output: JsonOption = False,
    no_progress: NoProgressOption = False,
    debug: DebugOption = False,
) -> None:
    """Find out when a small model may answer alone, so that hardly an answer differs from a large model's.

    The bound is exact for prompts drawn like these; where they are too few it is refused, and the number that is
    missing is told. An interrupted run goes on where it stopped.

    Example:  paceline calibrate small-model large-model --prompts mine.jsonl --max-disagreement 0.01
    """
    screen = screen_of(ctx)
    with screen.spinner("starting"):
        from ..cascade.calibration import Signal, is_calibration
        from ..cascade.measure import calibrate as measure
        from ..cascade.measure import check_sample, hash_contents
        from ..cascade.report import draw
        from ..core.request import SamplingParams
        from ..eval.plots import drawn_by, load_matplotlib
        from ..eval.prompt_files import read_prompts
        from ..system.files import check_out, claimed

    signals = [Signal(name) for name in _checked(signal or [Signal.MIN_PROB.value], [s.value for s in Signal])]
    load_matplotlib()  # refuse now what would fail after an hour
    asked = read_prompts(prompts, num_prompts)
    check_sample(len(asked), max_disagreement, confidence, len(signals))
    if out.suffix != ".json":
        raise ConfigError("a calibration is a .json file", got=str(out), fix="give another --out")
    picture = out.with_suffix(".svg")
    check_out(out, is_calibration)
    check_out(picture, drawn_by("paceline calibrate"))
    repeats = len(asked) - len({repr(prompt) for prompt in asked})
    if repeats:
        screen.say(
            f"[yellow]{repeats} prompts are repeated.[/yellow] The bound counts each as drawn anew: right for a sample "
            "of real traffic, wrong for copies."
        )
    common = (numerics, dtype, device, max_model_len, threads, trust_remote_code)
    with claimed(out):
        try:
            engines = open_pair((small, small_weights), (large, large_weights), *common, screen)
            remark_raw(sum(isinstance(one, str) for one in asked), engines[1], screen)
            with screen.stages() as progress:
                made = measure(
                    *engines,
                    asked,
                    max_disagreement=max_disagreement,
                    confidence=confidence,
                    short_limit=short_limit,
                    signals=signals,
                    params=SamplingParams(temperature=temperature, seed=seed),
                    prompts_info={
                        "file": prompts.name,
                        "sha256": hash_contents(asked),
                        "paths": {"small": small, "large": large},
                        "weights": {"small": small_weights, "large": large_weights},
                        "max_model_len": max_model_len,
                    },
                    out=out,
                    progress=progress,
                )
        except KeyboardInterrupt:
            screen.err.print("What was measured is kept; the same command goes on from there.")
            raise
        draw(made, picture)
    _tell(made, out, picture, screen)


def open_pair(
    small: tuple[str, WeightsChoice | None],
    large: tuple[str, WeightsChoice | None],
    numerics: NumericsChoice | None,
    dtype: str | None,
    device: str | None,
    max_model_len: int | None,
    threads: int | None,
    trust_remote_code: bool,
    screen: Screen,
) -> "tuple[LLM, LLM]":
    """Two plain engines, the small one first."""
    from ..spec_config import SpecConfig

    def opened(model: str, weights: WeightsChoice | None) -> "LLM":
        options = EngineOptions(
            model, SpecConfig(), False, numerics, dtype, device, max_model_len, threads, trust_remote_code, weights
        )
        return open_engine(options, screen)

    return opened(*small), opened(*large)


def _checked(names: list[str], known: list[str]) -> list[str]:
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"unknown signal {name!r}: one of {', '.join(known)}")
    return list(dict.fromkeys(names))


def _tell(made: "Calibration", out: Path, picture: Path, screen: Screen) -> None:
    choice = made.choose()
    rate, bound = choice.wrong_alone
    if screen.json:
        screen.put_json(
            {
                "file": str(out),
                "picture": str(picture),
                "prompts": made.count,
                "ended": made.ended,
                "signal": choice.signal.value,
                "threshold": choice.threshold,
                "coverage": choice.coverage,
                "differ": choice.point.differ,
                "max_disagreement": choice.max_disagreement,
                "confidence": choice.confidence,
                "differ_when_alone": {"seen": rate, "upper_bound_not_promised": bound},
            }
        )
        return
    alone = f"{choice.point.covered} of {made.count} prompts ({100 * choice.coverage:.1f}%)"
    screen.out.print(
        f"Answered by the small model alone: {alone}, where {choice.signal} >= {choice.threshold:.5g}", soft_wrap=True
    )
    screen.out.print(
        f"Promised: at most {100 * choice.max_disagreement:g}% of all prompts answered alone and differently, "
        f"with confidence {100 * choice.confidence:g}%; seen: {choice.point.differ}",
        soft_wrap=True,
    )
    screen.out.print(
        f"Of the answers given alone {100 * rate:.2f}% differed (at most {100 * bound:.2f}%: told, not promised)",
        soft_wrap=True,
    )
    screen.out.print(escape(str(out)), soft_wrap=True)
    screen.out.print(escape(str(picture)), soft_wrap=True)
    if not choice.point.covered:
        screen.say("[yellow]No answer would be given alone: the small model is never both sure and right.[/yellow]")
