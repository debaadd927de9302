"""The options that choose a model and how it speculates, and the engine built from them."""

import logging
import warnings
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from ..spec_config import SpecConfig, parse
from .screen import Screen

if TYPE_CHECKING:
    from ..llm import LLM


class NumericsChoice(StrEnum):
    """The values of --numerics."""

    fast = "fast"
    invariant = "invariant"


_SPEED, _MODEL = "Speculation", "Model"
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder, a hub id, or a name that `paceline models` lists.")
]
DrafterOption = Annotated[
    str | None,
    typer.Option("--drafter", "-d", help="none, lookup, self-int4 or model:PATH_OR_ID.", rich_help_panel=_SPEED),
]
SpecConfigOption = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        "-sc",
        metavar="JSON",
        help="The drafter as JSON with vLLM's keys, in the place of --drafter.",
        rich_help_panel=_SPEED,
    ),
]
NumTokensOption = Annotated[
    int | None,
    typer.Option("--num-speculative-tokens", "-k", min=1, help="Tokens to draft a round.", rich_help_panel=_SPEED),
]
AllowLossyOption = Annotated[
    bool,
    typer.Option(
        "--allow-lossy", metavar="", help="Permit rules that change the answers (typical).", rich_help_panel=_SPEED
    ),
]
NumericsOption = Annotated[
    NumericsChoice | None,
    typer.Option(
        "--numerics",
        help="invariant: identical bit for bit; fast: up to rounding ties. Default: invariant where it can be had.",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype", help="bfloat16, float16, float32 or float64; default: the checkpoint's.", rich_help_panel=_MODEL
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda, cuda:1; default: a GPU if there is one.", rich_help_panel=_MODEL),
]
MaxLenOption = Annotated[
    int | None,
    typer.Option("--max-model-len", min=1, help="Prompt and answer together, in tokens.", rich_help_panel=_MODEL),
]
ThreadsOption = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads.", rich_help_panel=_MODEL)]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", metavar="", help="Run Python code that comes with the model.", rich_help_panel=_MODEL
    ),
]


@dataclass(frozen=True)
class EngineOptions:
    """Everything that is decided when a model is loaded."""

    model: str
    config: SpecConfig
    allow_lossy: bool = False
    numerics: NumericsChoice | None = None
    dtype: str | None = None
    device: str | None = None
    max_model_len: int | None = None
    threads: int | None = None
    trust_remote_code: bool = False


def choose_config(drafter: str | None, config: str | None, num_tokens: int | None, default: str = "none") -> SpecConfig:
    """The speculation asked for by either option; both at once is a usage error."""
    if drafter is not None and config is not None:
        raise typer.BadParameter("give either --drafter or --speculative-config, not both")
    chosen = parse(config if config is not None else drafter or default, num_tokens)
    if chosen.method == "none" and num_tokens is not None:
        raise typer.BadParameter("--num-speculative-tokens needs a drafter, for example --drafter lookup")
    return chosen


def open_engine(options: EngineOptions, screen: Screen) -> "LLM":
    """Load what was asked for, pulling a zoo model first; libraries keep quiet meanwhile."""
    with screen.spinner("starting"):  # importing torch takes seconds
        _quieten(screen.debug)
        import torch

        from ..llm import LLM
        from ..zoo import resolve

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with screen.pulling() as progress:
        folder = resolve(options.model, progress=progress)
        if options.config.model is not None:
            resolve(options.config.model, progress=progress)
    with screen.spinner(f"loading {options.model}"):
        drafter, policy, verifier = options.config.build(options.allow_lossy)
        return LLM(
            folder,
            drafter=drafter,
            policy=policy,
            verifier=verifier,
            numerics=options.numerics.value if options.numerics else None,
            dtype=options.dtype,
            device=options.device,
            max_batch_size=1,
            max_model_len=options.max_model_len,
            allow_lossy=options.allow_lossy,
            trust_remote_code=options.trust_remote_code,
        )


def _quieten(debug: bool) -> None:
    """Libraries draw bars and warn on their own; ours replace the bars, and warnings help only in a debug run."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if not debug:
        transformers_logging.set_verbosity_error()
        warnings.simplefilter("ignore")
        for library in ("torch", "huggingface_hub"):
            logging.getLogger(library).setLevel(logging.ERROR)
