"""The options that choose a model and how it speculates, and the engine built from them."""

import json
import logging
import warnings
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from ..spec_config import SpecConfig, parse
from .screen import Screen

if TYPE_CHECKING:
    from ..llm import LLM
    from ..policy import Profile


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
    typer.Option(
        "--drafter",
        "-d",
        help="none, lookup, self-int4, model:PATH_OR_ID (@int4 rounds its weights), head:PATH_OR_NAME, or several "
        "joined by +.",
        rich_help_panel=_SPEED,
    ),
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
    typer.Option(
        "--num-speculative-tokens",
        "-k",
        min=1,
        help="Tokens to draft a round, always; without it the policy decides, down to none.",
        rich_help_panel=_SPEED,
        show_default=False,
    ),
]


class PolicyChoice(StrEnum):
    """The values of --policy."""

    cost_model = "cost_model"
    dynamic = "dynamic"
    gate = "gate"
    fixed = "fixed"


PolicyOption = Annotated[
    PolicyChoice | None,
    typer.Option(
        "--policy",
        help="How many tokens to draft. cost_model: what pays here, by measured costs; the default without -k.",
        rich_help_panel=_SPEED,
        show_default=False,
    ),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="What `paceline tune` measured: the policy starts from it, and its drafter is the default.",
        rich_help_panel=_SPEED,
        show_default=False,
    ),
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
        help="invariant: identical bit for bit; fast: up to rounding ties. Default: invariant where it can be had, "
        "and always in native passes.",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]


class WeightsChoice(StrEnum):
    """The values of --weights."""

    int8 = "int8"
    int4 = "int4"
    fp8 = "fp8"


WeightsOption = Annotated[
    WeightsChoice | None,
    typer.Option(
        "--weights",
        help="Round the model's weights when it is loaded; the answers are those of the rounded model (fp8: CUDA).",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="bfloat16, float16, float32 or float64; default: the checkpoint's, or float32 on a CPU that lacks "
        "instructions for its 16 bits.",
        rich_help_panel=_MODEL,
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


def seed_option(help: str, panel: str) -> Any:
    """--seed: a number that is a seed everywhere, also with the index of a prompt added."""
    return typer.Option("--seed", min=0, max=2**32 - 1, help=help, rich_help_panel=panel)


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
    weights: WeightsChoice | None = None
    max_batch_size: int = 1
    profile: "Profile | None" = None


def choose_config(
    drafter: str | None,
    config: str | None,
    num_tokens: int | None,
    default: str = "none",
    policy: PolicyChoice | None = None,
) -> SpecConfig:
    """The speculation asked for by either option; both at once is a usage error."""
    if drafter is not None and config is not None:
        raise typer.BadParameter("give either --drafter or --speculative-config, not both")
    chosen = parse(config if config is not None else drafter or default, num_tokens, policy)
    if chosen.method == "none" and num_tokens is not None:
        raise typer.BadParameter("--num-speculative-tokens needs a drafter, for example --drafter lookup")
    return chosen


def choose_tuned(
    drafter: str | None,
    config: str | None,
    num_tokens: int | None,
    default: str,
    policy: PolicyChoice | None,
    profile: Path | None,
) -> "tuple[SpecConfig, Profile | None]":
    """As `choose_config`, from a file of `paceline tune` where there is one; its drafter gives way to one asked for."""
    if profile is None:
        return choose_config(drafter, config, num_tokens, default, policy), None
    from ..tuned import load_tuned

    tuned = load_tuned(profile)
    if drafter is None and config is None:
        given = tuned.config.as_dict()
        if num_tokens is not None or policy is not None:  # said without the file, these replace both
            del given["policy"], given["num_speculative_tokens"]
        config = json.dumps(given)
    return choose_config(drafter, config, num_tokens, default, policy), tuned.profile


def open_engine(options: EngineOptions, screen: Screen) -> "LLM":
    """Load what was asked for, pulling a zoo model first; libraries keep quiet meanwhile."""
    with screen.spinner("starting"):  # importing torch takes seconds
        quieten(screen.debug)
        from ..llm import LLM
        from ..system.threads import use_threads
        from ..zoo import resolve

    use_threads(options.threads)
    with screen.pulling() as progress:
        folder = resolve(options.model, progress=progress)
        for name in options.config.models:
            resolve(name, progress=progress)
    with screen.spinner(f"loading {options.model}"):
        drafter, policy, verifier = options.config.build(options.allow_lossy, options.profile)
        llm = LLM(
            folder,
            drafter=drafter,
            policy=policy,
            verifier=verifier,
            numerics=options.numerics.value if options.numerics else None,
            dtype=options.dtype,
            device=options.device,
            weights=options.weights.value if options.weights else None,
            max_batch_size=options.max_batch_size,
            max_model_len=options.max_model_len,
            allow_lossy=options.allow_lossy,
            trust_remote_code=options.trust_remote_code,
        )
    if options.profile is not None:
        for warning in _check_profile(options.profile, llm):
            screen.err.print(f"[yellow]Warning:[/yellow] {escape(warning)}.", soft_wrap=True)
    return llm


def remark_raw(count: int, llm: "LLM", screen: Screen) -> None:
    """Say it where so many prompts of a file are texts to go on from and the model was made for chats."""
    from ..hf.prompts import has_chat_template

    if count and has_chat_template(llm.loaded):
        screen.say(
            f'[yellow]Prompts without the model\'s chat template: {count}.[/yellow] A "prompt" and a plain line are '
            'text to go on from; name it "question" to ask it in a chat.'
        )


def _check_profile(profile: "Profile", llm: "LLM") -> list[str]:
    """Warnings; raises `ConfigError` where the profile is another model's."""
    import torch

    from ..tuned import check_profile, dtype_label

    loaded = llm.loaded
    return check_profile(profile, loaded.name, dtype_label(loaded.dtype, loaded.device), torch.get_num_threads())


def quieten(debug: bool) -> None:
    """Libraries draw bars and warn on their own; ours replace the bars, and warnings help only in a debug run."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if not debug:
        transformers_logging.set_verbosity_error()
        warnings.simplefilter("ignore")
        for library in ("torch", "huggingface_hub"):
            logging.getLogger(library).setLevel(logging.ERROR)
