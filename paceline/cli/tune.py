"""`paceline tune`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from ..errors import ConfigError, PacelineError
from .engine import (
    DeviceOption,
    DtypeOption,
    EngineOptions,
    MaxLenOption,
    ModelArgument,
    NumericsOption,
    ThreadsOption,
    TrustOption,
    WeightsOption,
    open_engine,
    remark_raw,
    seed_option,
)
from .screen import DebugOption, JsonOption, NoProgressOption, Screen, screen_of
from .tune_view import show

if TYPE_CHECKING:
    from ..eval.suites import Question
    from ..llm import LLM
    from ..spec_config import SpecConfig

_WHAT, _HOW = "Prompts", "Measuring"


def tune(
    ctx: typer.Context,
    model: ModelArgument,
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            "-p",
            metavar="FILE",
            help="Yours: JSON lines with question, turns or messages (chats) or prompt (text to go on from), or plain "
            "lines (the same). Default: 8 built in.",
            rich_help_panel=_WHAT,
            show_default=False,
        ),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            "-d",
            help="lookup, self-int4 or model:PATH_OR_ID (@int4 rounds its weights); repeat it. Default: the first two.",
            rich_help_panel="Speculation",
            show_default=False,
        ),
    ] = None,
    num_prompts: Annotated[
        int,
        typer.Option("--num-prompts", min=1, help="At most so many, as many of each category.", rich_help_panel=_WHAT),
    ] = 24,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Length of an answer.", rich_help_panel=_WHAT)
    ] = 128,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0: greedy.", rich_help_panel=_WHAT)] = 0.0,
    seed: Annotated[int, seed_option("Of sampled answers and of the intervals.", _HOW)] = 0,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Where to keep it. Default: paceline-MODEL.json.",
            rich_help_panel=_HOW,
            show_default=False,
        ),
    ] = None,
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
    """Find out which drafter pays for a model on this machine and your prompts, and keep it in a file.

    Each drafter takes turns with plain decoding; the file is for --profile, and the words say what was found.
    Prints options of vLLM, SGLang and llama.cpp for the same choice. Ctrl-C keeps nothing.

    Example:  paceline tune smollm2-135m --prompts mine.jsonl -d lookup -d self-int4
    """
    screen = screen_of(ctx)
    with screen.spinner("starting"):
        from ..core.request import SamplingParams
        from ..eval.run import BenchOptions
        from ..eval.suites import choose
        from ..eval.tune import candidates_of, measure, read_questions
        from ..spec_config import SpecConfig
        from ..system.files import check_out, claimed
        from ..tuned import default_file, is_tuned, save_tuned

    configs = candidates_of(drafter)
    SamplingParams(temperature=temperature, max_tokens=max_tokens)  # refuse before minutes of loading
    questions = read_questions(prompts)
    path = Path(out) if out is not None else default_file(model)
    check_out(path, is_tuned)
    options = EngineOptions(
        model, SpecConfig(), False, numerics, dtype, device, max_model_len, threads, trust_remote_code, weights
    )
    with claimed(path):
        try:
            plain = open_engine(options, screen)
            kept = _fitting(plain, questions, screen)
            chosen = choose(kept, num_prompts)
            remark_raw(sum(one.chat is None for one in chosen), plain, screen)
            configs, llms = _open_candidates(plain, configs, options, screen, is_default=not drafter)
            how = BenchOptions(max_tokens, temperature, seed)
            with screen.stages() as progress:
                candidates = measure(configs, llms, chosen, how, progress)
        except KeyboardInterrupt:
            screen.err.print("Nothing was kept: half a measurement chooses nothing.")
            raise
        from ..eval.suites import hash_questions
        from .tune_result import Prompts, result_of

        asked = Prompts(prompts, len(chosen), len(questions), hash_questions(chosen))
        tuned = result_of(plain, candidates, llms, how, asked)
        save_tuned(path, tuned)
    if screen.json:
        screen.put_json({"model": model, "file": str(path), **tuned.as_dict()})
    else:
        show(tuned, candidates, model, path, screen)


def _fitting(llm: "LLM", questions: "list[Question]", screen: Screen) -> "list[Question]":
    from ..eval.run import fitting

    kept, left_out = fitting(llm, questions)
    if not kept:
        raise ConfigError(
            "no prompt fits the context",
            got=f"{left_out} prompts of {llm.runner.max_length} tokens or more",
            fix="raise --max-model-len if the model allows it",
        )
    if left_out:
        screen.say(f"[yellow]{left_out} prompts left out:[/yellow] longer than the context")
    return kept


def _open_candidates(
    plain: "LLM", configs: "list[SpecConfig]", options: EngineOptions, screen: Screen, is_default: bool
) -> "tuple[list[SpecConfig], list[LLM]]":
    """An engine for each candidate, all on the same weights; a default that this model cannot have is left out."""
    from ..llm import LLM
    from ..zoo import resolve

    opened, llms, without = list["SpecConfig"](), list["LLM"](), list[str]()
    for config in configs:
        if any(member.name in without for member in config.drafters):
            continue
        with screen.pulling() as progress:
            for name in config.models:
                resolve(name, progress=progress)
        try:
            with screen.spinner(f"preparing {config.name}"):
                drafter, policy, verifier = config.build()
                llm = LLM(
                    plain.loaded,
                    drafter=drafter,
                    policy=policy,
                    verifier=verifier,
                    numerics=options.numerics.value if options.numerics else None,
                    max_batch_size=1,
                    max_model_len=options.max_model_len,
                )
        except PacelineError as error:
            if not is_default:
                raise
            without.append(config.name)
            screen.say(f"[yellow]without {escape(config.name)}:[/yellow] {escape(str(error))}")
        else:
            opened.append(config)
            llms.append(llm)
    return opened, llms
