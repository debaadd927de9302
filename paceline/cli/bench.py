"""`paceline bench`."""

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError, PacelineError
from .bench_parts import open_engines
from .bench_report import show
from .engine import (
    AllowLossyOption,
    DeviceOption,
    DtypeOption,
    EngineOptions,
    MaxLenOption,
    ModelArgument,
    NumericsOption,
    NumTokensOption,
    PolicyOption,
    ProfileOption,
    SpecConfigOption,
    ThreadsOption,
    TrustOption,
    WeightsOption,
    choose_tuned,
    remark_raw,
    seed_option,
)
from .process import uninterrupted
from .screen import DebugOption, JsonOption, NoProgressOption, screen_of

_WHAT, _HOW = "Prompts", "Measuring"


def bench(
    ctx: typer.Context,
    model: ModelArgument,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            "-d",
            help="lookup, self-int4, model:PATH_OR_ID or none; repeat it to compare several. Default: lookup.",
            rich_help_panel="Speculation",
            show_default=False,
        ),
    ] = None,
    speculative_config: SpecConfigOption = None,
    num_speculative_tokens: NumTokensOption = None,
    policy: PolicyOption = None,
    profile: ProfileOption = None,
    allow_lossy: AllowLossyOption = False,
    suite: Annotated[
        str,
        typer.Option(
            "--suite",
            "-s",
            help="built-in, spec_bench, mt_bench, humaneval, gsm8k, mbpp, or a file: JSON lines with question, turns, "
            "messages (chats) or prompt (text to go on from), or plain lines (the same).",
            rich_help_panel=_WHAT,
        ),
    ] = "built-in",
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="DIR", help="Folder that holds the suite's files.", rich_help_panel=_WHAT),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            "--num-prompts",
            min=1,
            help="Only so many, as many of each category, always the same.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Length of an answer.", rich_help_panel=_WHAT)
    ] = 128,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0: greedy.", rich_help_panel=_WHAT)] = 0.0,
    seed: Annotated[int, seed_option("Of sampled answers and of the bootstrap.", _WHAT)] = 0,
    batch: Annotated[
        int, typer.Option("--batch", min=1, help="Prompts decoded side by side.", rich_help_panel=_HOW)
    ] = 1,
    repeat: Annotated[
        int, typer.Option("--repeat", min=1, help="Times that each prompt is measured.", rich_help_panel=_HOW)
    ] = 1,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Result folder. Default: results/DATE-MODEL-DRAFTER.",
            rich_help_panel=_HOW,
            show_default=False,
        ),
    ] = None,
    peer: Annotated[list[str] | None, typer.Option("--peer", hidden=True)] = None,
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
    """Measure what speculation gains: plain and speculative decoding of the same prompts, taking turns.

    Reports the speed-up with its 95% interval, acceptance, and whether the answers are the same.
    All of it is kept in a result folder; Ctrl-C keeps what was measured so far.

    Example:  paceline bench smollm2-135m -d lookup -s spec_bench --data DIR --num-prompts 24
    """
    screen = screen_of(ctx)
    wanted: list[str | None] = [*drafter] if drafter else [None]
    wished = [
        choose_tuned(one, speculative_config, num_speculative_tokens, "lookup", policy, profile) for one in wanted
    ]
    configs, learnt = [config for config, _ in wished], wished[0][1]
    names = [config.name for config in configs]
    if len(set(names)) < len(names):
        raise typer.BadParameter("the same --drafter is given twice")
    if peer:
        raise typer.BadParameter(
            "other systems are compared from a checkout of Paceline's repository: "
            f"python -m bench.peers {model} --peer {peer[0]} ..."
        )
    with screen.spinner("starting"):
        from ..core.request import SamplingParams
        from ..eval.results import claim
        from ..eval.run import OPEN_PEERS, PLAIN, BenchOptions, BenchRun, EngineSide, fitting, no_peers
        from ..eval.suites import choose, read_suite
        from ..eval.summary import about_run, summarise

    open_peers = OPEN_PEERS.get()
    if open_peers is not no_peers and batch > 1:
        raise typer.BadParameter("peers answer one prompt at a time: leave out --batch or --peer")
    how = BenchOptions(max_tokens, temperature, seed, batch, repeat)
    SamplingParams(temperature=temperature, max_tokens=max_tokens)  # refuse before minutes of loading
    questions = read_suite(suite, data)
    options = EngineOptions(
        model,
        configs[0],
        allow_lossy,
        numerics,
        dtype,
        device,
        max_model_len,
        threads,
        trust_remote_code,
        weights,
        batch,
        learnt,
    )
    with claim(None if out is None else Path(out), model, names) as results:
        llms = open_engines(options, configs, screen)
        plain = EngineSide(PLAIN, llms[0].plain())
        sides = [EngineSide(name, llm) for name, llm in zip(names, llms, strict=True)]
        kept, left_out = fitting(llms[0], questions)
        chosen = choose(kept, num_prompts)
        remark_raw(sum(one.chat is None for one in chosen), llms[0], screen)
        if not chosen:
            raise ConfigError(
                "no prompt fits the context",
                got=f"{left_out} prompts of {llms[0].runner.max_length} tokens or more",
                fix="raise --max-model-len if the model allows it",
            )
        missing, about, ended = dict[str, str](), dict[str, dict[str, str]](), None
        tokenizer = llms[0].loaded.tokenizer
        run = BenchRun(plain, sides, how, lambda answers: results.add(answers, {PLAIN, *names}, tokenizer))
        try:
            with (
                open_peers(configs, llms[0], model, screen, missing) as (peers, about),
                screen.stages() as progress,
            ):
                run.others = [*sides, *peers]
                run.measure(chosen, progress)
        except (Exception, KeyboardInterrupt) as error:
            if not run.answers:
                raise
            ended = error
        with uninterrupted():
            summary = {
                "model": model,
                "suite": suite,
                **summarise(run, names, missing),
                **about_run(llms, configs, chosen, len(questions), left_out, about),
            }
            try:
                results.finish(summary)
            except PacelineError as error:
                ended = ended or error
    if screen.json:
        screen.put_json({**summary, "result": str(results.path)}, is_whole=ended is None)
    else:
        show(summary, results.path, screen)
    if ended is not None:
        raise ended
