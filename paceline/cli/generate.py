"""`paceline generate`."""

from typing import Annotated

import typer

from ..errors import ConfigError
from ..schema import validate
from ..system.files import parse_json
from .answers import print_answers, stream_answer
from .engine import (
    AllowLossyOption,
    DeviceOption,
    DrafterOption,
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
    open_engine,
)
from .prompt_source import PromptSource
from .screen import DebugOption, JsonOption, NoProgressOption, screen_of

_PROMPT, _LAW, _END, _SHOW = "Prompt (one of these)", "Sampling", "Where to stop", "Output"


def generate(
    ctx: typer.Context,
    model: ModelArgument,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Text to continue.", rich_help_panel=_PROMPT)
    ] = None,
    chat: Annotated[
        str | None,
        typer.Option("--chat", "-c", help="A message; the model's template is put around it.", rich_help_panel=_PROMPT),
    ] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option("--prompt-file", metavar="FILE", help="Text to continue; - reads stdin.", rich_help_panel=_PROMPT),
    ] = None,
    token_ids: Annotated[
        str | None, typer.Option("--token-ids", metavar="1,2,3", help="A prompt in tokens.", rich_help_panel=_PROMPT)
    ] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(
            "--image",
            "-i",
            metavar="FILE|URL",
            help="A picture before the text, for a vision-language model; repeatable.",
            rich_help_panel=_PROMPT,
            show_default=False,
        ),
    ] = None,
    drafter: DrafterOption = None,
    speculative_config: SpecConfigOption = None,
    num_speculative_tokens: NumTokensOption = None,
    policy: PolicyOption = None,
    profile: ProfileOption = None,
    allow_lossy: AllowLossyOption = False,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0: greedy.", rich_help_panel=_LAW)] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="0: off.", rich_help_panel=_LAW)] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="1: off.", rich_help_panel=_LAW)] = 1.0,
    min_p: Annotated[float, typer.Option("--min-p", help="0: off.", rich_help_panel=_LAW)] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Over prompt and answer; 1: off.", rich_help_panel=_LAW)
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", help="Over the answer; 0: off.", rich_help_panel=_LAW)
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option("--frequency-penalty", help="Over the answer; 0: off.", rich_help_panel=_LAW)
    ] = 0.0,
    no_repeat_ngram_size: Annotated[
        int, typer.Option("--no-repeat-ngram-size", help="Never repeat so many tokens; 0: off.", rich_help_panel=_LAW)
    ] = 0,
    logit_bias: Annotated[
        str | None,
        typer.Option("--logit-bias", metavar="JSON", help='By token id: {"42": -5}.', rich_help_panel=_LAW),
    ] = None,
    bad_word: Annotated[
        list[str] | None,
        typer.Option("--bad-word", help="Never say this; repeatable.", rich_help_panel=_LAW, show_default=False),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Reproduces a sampled answer; random by default.", rich_help_panel=_LAW)
    ] = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Answers to give.", rich_help_panel=_LAW)] = 1,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens.", rich_help_panel=_END)] = 256,
    min_tokens: Annotated[int, typer.Option("--min-tokens", help="Fewest tokens.", rich_help_panel=_END)] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", help="Stop before this text; repeatable.", rich_help_panel=_END, show_default=False),
    ] = None,
    stop_token_id: Annotated[
        list[int] | None,
        typer.Option(
            "--stop-token-id", help="Stop at this token; repeatable.", rich_help_panel=_END, show_default=False
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", metavar="", help="Go on past the end.", rich_help_panel=_END)
    ] = False,
    numerics: NumericsOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    max_model_len: MaxLenOption = None,
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
    weights: WeightsOption = None,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", metavar="", help="Show text as it comes.", rich_help_panel=_SHOW)
    ] = True,
    color: Annotated[
        bool,
        typer.Option("--color", metavar="", help="Colour each token by where it came from.", rich_help_panel=_SHOW),
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option("--logprobs", help="Of each token and of the K likeliest (in --json).", rich_help_panel=_SHOW),
    ] = None,
    json_output: JsonOption = False,
    no_progress: NoProgressOption = False,
    debug: DebugOption = False,
) -> None:
    """Answer a prompt; the answer goes to stdout, remarks to stderr.

    Example:  paceline generate smollm2-135m --chat "Name three rivers." --drafter lookup --color

    Example:  paceline generate ./my-vlm --image cat.jpg --image https://example.org/dog.png --prompt "Who is larger?"
    """
    screen = screen_of(ctx)
    config, learnt = choose_tuned(drafter, speculative_config, num_speculative_tokens, "none", policy, profile)
    source = PromptSource(prompt, chat, prompt_file, token_ids, tuple(image or ()))
    from ..core.request import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        no_repeat_ngram_size=no_repeat_ngram_size,
        logit_bias=_logit_bias(logit_bias),
        bad_words=tuple(bad_word or ()),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
        seed=seed,
        n=n,
        logprobs=logprobs,
    )
    text = source.read()
    options = EngineOptions(
        model,
        config,
        allow_lossy,
        numerics,
        dtype,
        device,
        max_model_len,
        threads,
        trust_remote_code,
        weights,
        profile=learnt,
    )
    llm = open_engine(options, screen)
    if image and llm.loaded.vision is None:
        count = f"{len(image)} image" + "s" * (len(image) > 1)
        raise ConfigError(
            f"{model} is a text model", got=count, fix="leave --image out, or name a vision-language model"
        )
    if color:
        screen.force_colour()
    if stream and params.n == 1 and not screen.json:
        stream_answer(llm, text, params, screen, color)
    else:
        print_answers(llm, text, params, screen, color, options)


def _logit_bias(text: str | None) -> "dict[int, float] | None":
    from ..core.request import Bias

    if text is None:
        return None
    return validate(dict[int, Bias], parse_json(text, "--logit-bias"), '--logit-bias, for example {"42": -5},')
