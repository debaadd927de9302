"""The options that commands share, each declared once, and `@command`, which makes a typer command of them.

A parameter of a command that is a dataclass of options becomes one option for each of its fields:

    @command
    def doctor(model: ModelArgument, loading: ModelOptions, screen: Screen, batch: int = opt(8, "...", min=1)): ...

    paceline doctor MODEL [--batch ...] [--numerics ...] [--dtype ...] ... [--json] [--no-progress] [--debug]
"""

import inspect
import re
import warnings
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer
from rich.markup import escape

from ..config import SpecConfig, parse
from ..integrations.vllm_options import as_flag
from ..methods.spec import usages
from ..system.files import read_text
from .others import TABLE, Others
from .process import silence_loggers
from .screen import FLAGS, Screen

if TYPE_CHECKING:
    from ..core.request import SamplingParams
    from ..llm import LLM
    from ..policy import Profile
    from ..target import LoadedModel


def opt(
    default: Any, help: str, panel: str | None = None, short: str = "", metavar: str | None = None, **more: Any
) -> Any:
    """The default of a parameter of a command, or of a field in a class of options.

    default: `MISSING` for an option that must be given. panel: the box of the help text that shows it. more: what else
    `typer.Option` takes; and name, if its long names are not the parameter's.
    """
    return field(
        default=default, metadata={"help": help, "rich_help_panel": panel, "short": short, "metavar": metavar, **more}
    )


def command(function: Callable[..., None]) -> Callable[..., None]:
    """A typer command of a function whose parameters are options, classes of options, `Others`, and the `Screen`.

    Every command gets --json, --no-progress and --debug as well.
    """
    wanted = inspect.signature(function, eval_str=True).parameters
    options = [inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    others = list[inspect.Parameter]()
    for name, parameter in wanted.items():
        kind = parameter.annotation
        if kind is Others:
            others = [_other_option(text) for text in parameter.default.given]
        elif is_dataclass(kind):
            hints = get_type_hints(kind, include_extras=True)
            options += [_option(option.name, hints[option.name], option) for option in fields(kind)]
        elif kind is not Screen:
            options.append(_option(name, kind, parameter.default))
    options += [_option(name, flag, False) for name, flag in FLAGS.items()]
    own = {option.name for option in options}
    others = [option for option in others if option.name not in own]
    options += others

    def run(ctx: typer.Context, **values: Any) -> None:
        arguments: dict[str, Any] = {}
        for name, parameter in wanted.items():
            kind = parameter.annotation
            if kind is Others:
                arguments[name] = Others({option.name: values[option.name] for option in others})
            elif is_dataclass(kind):
                arguments[name] = parameter.annotation(**{option.name: values[option.name] for option in fields(kind)})
            else:
                arguments[name] = ctx.obj if kind is Screen else values[name]
        function(**arguments)

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__annotations__ = {option.name: option.annotation for option in options}
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return run


def _other_option(name: str) -> inspect.Parameter:
    """An option of vLLM, which the help does not show."""
    option = TABLE[name]
    if option.is_flag:
        both = f"{as_flag(name)}/{as_flag(f'no_{name}')}"
        return _option(name, bool | None, opt(None, "", short=option.short, name=both, hidden=True))
    return _option(name, str | None, opt(None, "", short=option.short, hidden=True))


def _option(name: str, kind: Any, default: Any) -> inspect.Parameter:
    """A parameter as typer reads it; one without `opt` has typer's annotation already."""
    if isinstance(default, Field):
        metadata, default = dict(default.metadata), default.default
        if metadata:
            names = [*metadata.pop("name", f"--{name.replace('_', '-')}").split(), metadata.pop("short")]
            metavar = "" if kind is bool else metadata.pop("metavar")
            kind = Annotated[kind, typer.Option(*filter(None, names), **{**metadata, "metavar": metavar})]
    default = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


SPECULATION, MODEL, PROMPTS, MEASURING = "Speculation", "Model", "Prompts", "Measuring"
DRAFTER_NAMES = usages()
PROMPT_FILE = (
    'JSON lines with "question", "turns" or "messages" (chats) or "prompt" (text to continue), or lines of text.'
)
Policy = Literal["cost_model", "dynamic", "fixed"]
BlockMix = Literal[
    "q8_0", "q6_k", "q5_k_m", "q5_k", "q5_1", "q5_0", "q4_k_m", "q4_k", "q4_1", "q4_0", "iq4_xs",
    "iq4_nl", "mxfp4", "q3_k_m", "q3_k", "q2_k",
]  # fmt: skip
Weights = Literal["int8", "int4", "fp8", BlockMix]
FileWeights = Literal["bf16", "f16", "f32", BlockMix]
_TO_LLM = "numerics max_model_len kv_cache_memory_bytes"
_LOADING = "dtype device tokenizer mmproj revision trust_remote_code weights activations kv_cache_dtype experts_in"
FORMATS = "int8, int4, fp8 (CUDA), or a format of llama.cpp: q8_0, q6_k, q5_k_m, q4_k_m, q4_k, q4_0, q3_k_m, ..."
ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A folder, a GGUF file, a hub id, or a name that `paceline models` lists."),
]


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "K": 1 << 10, "M": 1 << 20}


def token_count(text: str) -> int | None:
    """A number of tokens, also with a unit, as vLLM reads it: 8k is 8000, 8K 8192; auto and -1: None."""
    if text in ("auto", "-1"):
        return None
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)([kmKM]?)", text)
    count = Fraction(match[1]) * _UNITS[match[2]] if match else Fraction(0)
    if count < 1 or count.denominator > 1:
        raise typer.BadParameter(f"{text!r} is no number of tokens, such as 8192, 8k or 8K")
    return int(count)


def seed_option() -> Any:
    """The option --seed. Its maximum leaves room to add the index of a prompt."""
    return opt(0, "For sampled answers and confidence intervals.", PROMPTS, metavar="INT", min=0, max=2**32 - 1)


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Length and sampling of the answers that are measured."""

    max_tokens: int = opt(128, "Maximum number of tokens of an answer.", PROMPTS, min=1)
    temperature: float = opt(0.0, "0: greedy.", PROMPTS, "-t")
    seed: int = seed_option()

    def params(self) -> "SamplingParams":
        """Raises `ConfigError` for wrong values; call it before loading a model, which takes minutes."""
        from ..core.request import SamplingParams

        return SamplingParams(**vars(self))


@dataclass(frozen=True)
class Speculation:
    """A drafter with its policy and its verification rule. profile: what `paceline tune` measured, if anything."""

    config: SpecConfig = field(default_factory=SpecConfig)
    allow_lossy: bool = False
    profile: "Profile | None" = None

    def as_json(self, model: str) -> dict[str, object]:
        """The first keys of --json."""
        return {"model": model, "drafter": self.config.name, "speculative_config": self.config.as_dict()}


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """The drafter, how much it drafts, and the verification of its drafts."""

    drafter: list[str] | None = opt(None, f"{DRAFTER_NAMES}.", SPECULATION, "-d", "DRAFTER")
    speculative_config: str | None = opt(
        None, "The drafter as JSON with vLLM's keys, instead of --drafter.", SPECULATION, "-sc", "JSON"
    )
    num_speculative_tokens: int | None = opt(
        None,
        "Tokens to draft in every round; default: the policy decides, and may draft none.",
        SPECULATION,
        "-k",
        min=1,
    )
    policy: Policy | None = opt(
        None,
        "cost_model: by expected speed (default without -k); dynamic: by acceptance; fixed: always -k.",
        SPECULATION,
    )
    profile: Path | None = opt(
        None, "A file written by `paceline tune`: its drafter and measurements.", SPECULATION, metavar="FILE"
    )
    allow_lossy: bool = opt(False, "Permit a verifier that changes the answers (typical).", SPECULATION)

    def choose(self, default: str, policy: Policy | None = None) -> Speculation:
        """The chosen drafter. default, policy: used where neither an option nor the profile decides.

        A drafter that is given replaces the profile's. Raises `ConfigError`, and usage errors for contradictions.
        """
        if self.drafter is not None and len(self.drafter) > 1:
            raise typer.BadParameter(f"give one --drafter; to combine several: --drafter {'+'.join(self.drafter)}")
        return self.choose_each(default, policy)[0]

    def choose_each(self, default: str, policy: Policy | None = None) -> list[Speculation]:
        """As `choose`, for every --drafter."""
        return [self._choose(drafter, default, policy) for drafter in self.drafter or [None]]

    @property
    def is_default(self) -> bool:
        """Whether no drafter is given, nor a profile that has one."""
        return self.drafter is None and self.speculative_config is None and self.profile is None

    def _choose(self, drafter: str | None, default: str, policy: Policy | None) -> Speculation:
        if drafter is not None and self.speculative_config is not None:
            raise typer.BadParameter("give either --drafter or --speculative-config, not both")
        config, profile = self.speculative_config if drafter is None else drafter, None
        if self.profile is not None:
            from ..tuned import load_tuned

            tuned = load_tuned(self.profile)
            profile = tuned.profile
            if config is None:
                config = tuned.config.as_dict()
                if self.num_speculative_tokens is not None or self.policy is not None:  # they replace both keys
                    del config["policy"], config["num_speculative_tokens"]
        policy = self.policy or (policy if profile is None else None)
        chosen = parse(default if config is None else config, self.num_speculative_tokens, policy)
        if chosen.method == "none" and self.num_speculative_tokens is not None:
            raise typer.BadParameter("--num-speculative-tokens needs a drafter, for example --drafter lookup")
        return Speculation(chosen, self.allow_lossy, profile)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How models are loaded and run."""

    device: str | None = opt(None, "cpu, cuda, cuda:1; default: a GPU if there is one.", MODEL)
    threads: int | None = opt(None, "CPU threads.", MODEL, min=1)
    numerics: Literal["fast", "invariant"] | None = opt(
        None, "invariant: bit-identical to plain decoding, the default where possible; fast: up to rounding.", MODEL
    )
    dtype: str | None = opt(
        None, "bfloat16, float16, float32 or float64; default: the checkpoint's, or float32 if the CPU lacks it.", MODEL
    )
    max_model_len: int | None = opt(
        None,
        "Maximum tokens of prompt and answer together; 8k: 8000, 8K: 8192.",
        MODEL,
        metavar="N",
        parser=token_count,
    )
    tokenizer: str | None = opt(None, "Folder or hub id of another tokenizer.", MODEL, metavar="MODEL")
    mmproj: str | None = opt(None, "Vision projector of a GGUF model, to ask about images.", MODEL, metavar="FILE")
    chat_template: str | None = opt(None, "Template of chats instead of the model's.", MODEL, metavar="FILE")
    revision: str | None = opt(None, "Branch, tag or commit of a hub id.", MODEL)
    trust_remote_code: bool = opt(False, "Run Python code that comes with the model.", MODEL)

    def template(self) -> str | None:
        """The chat template that was given, in a file or, as vLLM also takes it, as text. Raises `ConfigError`."""
        text = self.chat_template
        return text if text is None or "{" in text else read_text(text, "the chat template in")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(LoadOptions):
    """How a model is loaded and run."""

    weights: Weights | None = opt(
        None, f"Quantize the weights at loading; answers are the quantized model's. {FORMATS}", MODEL, metavar="FORMAT"
    )
    activations: Literal["int8", "int16"] | None = opt(
        None, "What inputs are rounded to before they meet quantized weights on a CPU (int8).", MODEL
    )
    kv_cache_dtype: Literal["auto", "int8", "fp8"] | None = opt(None, "Round cached keys and values to 8 bits.", MODEL)
    kv_cache_memory_bytes: int | None = opt(None, "Limit of keys and values.", MODEL, min=1, metavar="N")
    experts_in: Literal["auto", "memory", "disk"] | None = opt(None, "Where experts lie; auto: disk if need be.", MODEL)


def open_engine(
    model: "str | LoadedModel",
    screen: Screen,
    options: LoadOptions,
    speculation: Speculation | None = None,
    max_num_seqs: int = 1,
    seed: int | None = None,
    retests: bool = False,
    **more: Any,
) -> "LLM":
    """An `LLM` for a model that is given by name, and pulled if necessary, or that is loaded already.

    retests: compare it with plain transformers even if it has passed before. more: further arguments of `LLM`.
    """
    speculation, template = speculation or Speculation(), options.template()
    with screen.spinner("starting"):  # importing torch takes seconds
        quieten(screen.debug)
        from .. import LLM
        from ..system.hardware import use_threads
        from ..target.verdicts import forget
        from ..zoo import resolve

    if retests:
        forget()
    source, settings = model, {name: getattr(options, name, None) for name in _TO_LLM.split()}
    with screen.pulling() as progress:
        if isinstance(model, str):
            use_threads(options.threads)
            source = resolve(model, progress=progress)
            settings |= {name: getattr(options, name) for name in _LOADING.split() if hasattr(options, name)}
        for name in speculation.config.models:
            resolve(name, progress=progress)
    with screen.spinner(f"loading {model}" if isinstance(model, str) else f"preparing {speculation.config.name}"):
        drafter, policy, verifier = speculation.config.build(speculation.allow_lossy, speculation.profile)
        llm = LLM(
            source,
            drafter=drafter,
            policy=policy,
            verifier=verifier,
            max_num_seqs=max_num_seqs,
            seed=seed,
            allow_lossy=speculation.allow_lossy,
            **settings,
            **more,
        )
    if template is not None:
        from ..target.prompts import set_chat_template

        set_chat_template(llm.loaded, template)
    if speculation.profile is not None and isinstance(model, str):
        from ..tuned import check_profile

        for warning in check_profile(speculation.profile, llm.loaded):
            screen.err.print(f"[yellow]Warning:[/yellow] {escape(warning)}.", soft_wrap=True)
    return llm


def quieten(debug: bool) -> None:
    """Silence the progress bars and warnings of libraries; warnings come back with --debug."""
    if not debug:
        warnings.simplefilter("ignore")
        silence_loggers()
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if not debug:
        transformers_logging.set_verbosity_error()
