"""`paceline show --cascade`: find an example of each case in the user's prompts and put them on a page."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from ..errors import ConfigError
from .calibrate import open_pair
from .engine import WeightsChoice
from .screen import Screen

if TYPE_CHECKING:
    from ..cascade import Calibration, Cascade
    from ..cascade.report import Case, Example
    from ..llm import LLM


@dataclass(frozen=True)
class CascadeOptions:
    """What is to be shown. small, large: None takes the models from where they were calibrated."""

    calibration: Path
    prompts: Path
    small: str | None
    large: str | None
    num_prompts: int
    max_tokens: int
    device: str | None
    threads: int | None


def show_cascade(options: CascadeOptions, out: Path, screen: Screen) -> Path:
    """Write the page. Raises `ConfigError` and `IncompatibleModels`, for other models than those calibrated."""
    with screen.spinner("starting"):
        from ..cascade import Cascade, load_calibration
        from ..cascade.report import find_examples, page
        from ..eval.page import is_page
        from ..eval.prompt_files import read_prompts
        from ..system.files import check_out, write_text

    check_out(out, is_page)
    made = load_calibration(options.calibration)
    prompts = read_prompts(options.prompts, options.num_prompts)
    small, large = _models(made, options, screen)
    params = made.params(options.max_tokens)
    with Cascade(small, large, made, allow_lossy=True, audit_share=0.0) as cascade, screen.stages() as progress:
        told = f"Looking for an example of each case in {len(prompts)} prompts, which both models answer."
        screen.say(f"[dim]{told}[/dim]")
        found = find_examples(cascade, prompts, params, progress)
        text = page(cascade, found, len(prompts))
    write_text(out, text)
    _tell(cascade, found, out, text, screen)
    return out


def _models(made: "Calibration", options: CascadeOptions, screen: Screen) -> "tuple[LLM, LLM]":
    paths, weights = made.prompts.get("paths"), made.prompts.get("weights")
    paths = paths if isinstance(paths, dict) else {}
    weights = weights if isinstance(weights, dict) else {}

    def told(role: str, given: str | None) -> tuple[str, WeightsChoice | None]:
        name = given or paths.get(role)
        if not isinstance(name, str):
            raise ConfigError(f"the calibration does not say where its {role} model was", fix=f"give --{role}")
        return name, WeightsChoice(weights[role]) if weights.get(role) else None

    dtype = made.small.dtype if made.small.dtype == made.large.dtype else None
    pair = told("small", options.small), told("large", options.large)
    length = made.prompts.get("max_model_len")
    length = length if isinstance(length, int) else None
    return open_pair(*pair, None, dtype, options.device, length, options.threads, False, screen)


def _tell(cascade: "Cascade", found: "dict[Case, Example | None]", out: Path, text: str, screen: Screen) -> None:
    missing = [case.value for case, one in found.items() if one is None]
    if screen.json:
        cases = {case.value: None if one is None else one.index for case, one in found.items()}
        screen.put_json({"page": str(out), "bytes": len(text.encode()), "cases": cases})
        return
    screen.out.print(escape(str(out)), soft_wrap=True)
    if missing:
        screen.say(f"[yellow]No example among these prompts:[/yellow] {', '.join(missing)}")
