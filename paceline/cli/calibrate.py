"""`paceline calibrate`: the confidence from which a small model may answer in place of a large one."""

from dataclasses import MISSING
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError
from .options import (
    FORMATS,
    MODEL,
    PROMPT_FILE,
    PROMPTS,
    LoadOptions,
    ModelOptions,
    Weights,
    command,
    open_engine,
    opt,
    seed_option,
)
from .prompts import remark_raw
from .screen import Screen

if TYPE_CHECKING:
    from ..cascade import Calibration

_GUARANTEE = "Guarantee"


@command
def calibrate(
    small: Annotated[str, typer.Argument(metavar="SMALL", help="The model that answers alone where it is confident.")],
    large: Annotated[str, typer.Argument(metavar="LARGE", help="The model whose answers count; same tokenizer.")],
    *,
    prompts: Path = opt(
        MISSING, f"A random sample of future prompts, with their images. {PROMPT_FILE}", PROMPTS, "-p", "FILE"
    ),
    loading: LoadOptions,
    screen: Screen,
    max_disagreement: float = opt(
        0.01, "At most this share of all prompts may get another answer than the large model's.", _GUARANTEE
    ),
    confidence: float = opt(0.95, "Confidence with which the bound holds.", _GUARANTEE),
    short_limit: int = opt(16, "Tokens within which an answer of the small model must end.", _GUARANTEE, min=1),
    signal: list[str] | None = opt(
        None,
        "min_prob (default), mean_prob or margin; of several the best, each tested more strictly.",
        _GUARANTEE,
    ),
    num_prompts: int | None = opt(None, "Use only this many of the prompts.", PROMPTS, min=1),
    temperature: float = opt(0.0, "0: greedy.", PROMPTS, "-t"),
    seed: int = seed_option(),
    out: Path = opt(
        Path("calib.json"),
        "The calibration file; a plot is written beside it if matplotlib is installed.",
        short="-o",
        metavar="FILE",
    ),
    small_weights: Weights | None = opt(None, f"Quantize the small model: {FORMATS}", MODEL, metavar="FORMAT"),
    large_weights: Weights | None = opt(None, "The same of the large model.", MODEL, metavar="FORMAT"),
) -> None:
    """Find the confidence from which a small model may answer alone, with a bound on how many answers differ.

    The bound is exact for prompts drawn like these. With too few prompts the command fails and says how many it needs.
    An interrupted run resumes where it stopped.

    Example:  paceline calibrate small-model large-model --prompts mine.jsonl --max-disagreement 0.01
    """
    with screen.spinner("starting"):
        from ..cascade.calibration import SIGN, Signal
        from ..cascade.measure import calibrate as measure
        from ..cascade.measure import check_sample, draw
        from ..core.request import SamplingParams
        from ..measure.prompts import read_prompts
        from ..system.files import check_out, claimed

    if loading.mmproj is not None:
        raise typer.BadParameter("--mmproj is of one model, and here are two: name their Hugging Face folders")
    for name in signal or ():
        if name not in list(Signal):
            raise typer.BadParameter(f"unknown signal {name!r}: one of {', '.join(Signal)}")
    signals = [Signal(name) for name in dict.fromkeys(signal or [Signal.MIN_PROB])]
    texts = read_prompts(prompts, num_prompts)
    check_sample(len(texts), max_disagreement, confidence, len(signals))
    if out.suffix != ".json":
        raise ConfigError("a calibration is a .json file", got=str(out), fix="give another --out")
    check_out(out, SIGN)
    plot = out.with_suffix(".svg") if find_spec("matplotlib") else None
    if plot is None:
        screen.warn("No plot:", "that needs matplotlib, pip install 'paceline[plots]'")
    else:
        check_out(plot, "paceline calibrate")
    repeats = len(texts) - len({repr(prompt) for prompt in texts})
    if repeats:
        text = "The bound counts each as an independent draw, which is right for real traffic and wrong for copies."
        screen.warn(f"{repeats} prompts are repeated.", text)
    with claimed(out):
        try:
            alone = open_engine(small, screen, ModelOptions(**vars(loading), weights=small_weights))
            reference = open_engine(large, screen, ModelOptions(**vars(loading), weights=large_weights))
            remark_raw(sum(isinstance(prompt, str) for prompt in texts), reference, screen)
            with screen.stages() as progress:
                calibration = measure(
                    alone,
                    reference,
                    texts,
                    max_disagreement=max_disagreement,
                    confidence=confidence,
                    short_limit=short_limit,
                    signals=signals,
                    params=SamplingParams(temperature=temperature, seed=seed),
                    prompts_info={
                        "file": prompts.name,
                        "paths": {"small": small, "large": large},
                        "weights": {"small": small_weights, "large": large_weights},
                        "max_model_len": loading.max_model_len,
                    },
                    out=out,
                    progress=progress,
                )
        except KeyboardInterrupt:
            screen.err.print("What was measured is kept; the same command resumes there.")
            raise
        if plot is not None:
            draw(calibration, plot)
    _show(calibration, out, plot, screen)


def _show(calibration: "Calibration", out: Path, plot: Path | None, screen: Screen) -> None:
    choice = calibration.choose()
    rate, bound = choice.wrong_alone
    if screen.json:
        keys = ("threshold", "coverage", "max_disagreement", "confidence")
        about = {"file": out, "picture": plot, "prompts": calibration.count, "ended": calibration.ended}
        about |= {"signal": choice.signal.value, "differ": choice.point.differ}
        about |= {key: getattr(choice, key) for key in keys}
        screen.put_json({**about, "differ_when_alone": {"seen": rate, "upper_bound_not_promised": bound}})
        return
    alone = f"{choice.point.covered} of {calibration.count} prompts ({100 * choice.coverage:.1f}%)"
    for line in (
        f"Answered by the small model alone: {alone}, where {choice.signal} >= {choice.threshold:.5g}",
        f"Promised: at most {100 * choice.max_disagreement:g}% of all prompts answered alone and differently, "
        f"with confidence {100 * choice.confidence:g}%; seen: {choice.point.differ}",
        f"Of the answers given alone {100 * rate:.2f}% differed (estimated bound {100 * bound:.2f}%, not promised)",
    ):
        screen.out.print(line, soft_wrap=True)
    screen.print_path(out)
    if plot is not None:
        screen.print_path(plot)
    if not choice.point.covered:
        screen.warn("The small model would answer no prompt alone: it is never both confident and right.")
