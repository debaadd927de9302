"""`paceline generate`: answer one prompt."""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from ..core.round import MIN_TIMED, Timings
from ..errors import ConfigError
from ..schema import brief, validate
from ..system.files import parse_json, read_stdin, read_text
from .options import MODEL, ModelArgument, ModelOptions, SpeculationOptions, command, open_engine, opt
from .others import LOADING, Others
from .screen import Painter, Screen, legend, nothing_drafted

if TYPE_CHECKING:
    from ..core.request import SamplingParams
    from ..engine.output import Completion, RequestOutput, StreamChunk
    from ..llm import LLM, Prompt

_PROMPT, _SAMPLING, END, _OUTPUT = "Prompt (one of these)", "Sampling", "Where to stop", "Output"
_FORM = "Structured outputs (one of these)"


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """The ways to give a prompt, of which exactly one must be used, and images that come before the text."""

    text: Annotated[str | None, typer.Argument(metavar="[PROMPT]", help="Text to continue, as --prompt.")] = None
    prompt: str | None = opt(None, "Text to continue.", _PROMPT, "-p")
    chat: str | None = opt(None, "A message; the model's chat template is applied to it.", _PROMPT, "-c")
    system: str | None = opt(None, "With --chat or --image: the system message before it.", _PROMPT, "-sys")
    prompt_file: str | None = opt(None, "A file with text to continue; - reads stdin.", _PROMPT, metavar="FILE")
    token_ids: str | None = opt(None, "A prompt as token ids.", _PROMPT, metavar="1,2,3")
    image: list[str] | None = opt(
        None, "An image before the text, for a vision-language model; repeatable.", _PROMPT, "-i", "FILE|URL"
    )

    def __post_init__(self) -> None:
        count = sum(form is not None for form in (self.text, self.prompt, self.chat, self.prompt_file, self.token_ids))
        if count != 1:
            trouble = "there is more than one prompt" if count else "there is no prompt"
            raise typer.BadParameter(f"{trouble}: give one of --prompt, --chat, --prompt-file and --token-ids")
        if self.image and self.token_ids is not None:
            raise typer.BadParameter("--image goes with --prompt, --chat or --prompt-file, not with --token-ids")
        if self.system is not None and self.chat is None and not self.image:
            raise typer.BadParameter("--system goes with --chat or --image: a text to continue has no messages")

    def read(self) -> "str | list[dict[str, object]] | list[int]":
        """The prompt as `LLM.generate` takes it. Raises `ConfigError` for what cannot be read or is empty."""
        if self.token_ids is not None:
            try:
                return [int(part) for part in self.token_ids.replace(",", " ").split()]
            except ValueError as error:
                got, expected = brief(self.token_ids), "numbers, for example 1,2,3"
                raise ConfigError("--token-ids cannot be read", got=got, expected=expected) from error
        if self.prompt_file == "-":
            text = read_stdin("the prompt in the standard input")
        elif self.prompt_file is not None:
            text = read_text(self.prompt_file, "the prompt in")
        else:
            text = self.text or self.prompt or self.chat or ""
        if not text.strip():
            raise ConfigError("the prompt is empty", expected="at least one character that is not a space")
        system = list[dict[str, object]]()
        if self.system is not None:
            system.append({"role": "system", "content": self.system})
        if self.image:
            from ..hf.images import OWN_CHOICE, open_image

            parts: list[object] = [{"type": "image", "image": open_image(source, OWN_CHOICE)} for source in self.image]
            return [*system, {"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
        return text if self.chat is None else [*system, {"role": "user", "content": text}]


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """`SamplingParams` of one answer as options."""

    temperature: float = opt(0.0, "0: greedy.", _SAMPLING, "-t", name="--temperature --temp")
    top_k: int = opt(0, "0: off.", _SAMPLING)
    top_p: float = opt(1.0, "1: off.", _SAMPLING)
    min_p: float = opt(0.0, "0: off.", _SAMPLING)
    repetition_penalty: float = opt(1.0, "Over prompt and answer; 1: off.", _SAMPLING)
    presence_penalty: float = opt(0.0, "Over the answer; 0: off.", _SAMPLING)
    frequency_penalty: float = opt(0.0, "Over the answer; 0: off.", _SAMPLING)
    no_repeat_ngram_size: int = opt(0, "Never repeat this many tokens in a row; 0: off.", _SAMPLING)
    logit_bias: str | None = opt(None, 'By token id: {"42": -5}.', _SAMPLING, metavar="JSON")
    bad_words: list[str] | None = opt(None, "Never generate this word; repeatable.", _SAMPLING, name="--bad-word")
    seed: int | None = opt(None, "Reproduces a sampled answer; random by default.", _SAMPLING)
    max_tokens: int | None = opt(256, "Maximum number of tokens.", END)
    min_tokens: int = opt(0, "Minimum number of tokens.", END)
    stop: list[str] | None = opt(None, "Stop before this text; repeatable.", END)
    stop_token_ids: list[int] | None = opt(None, "Stop at this token; repeatable.", END, name="--stop-token-id")
    ignore_eos: bool = opt(False, "Go on past the end-of-sequence token.", END)
    json_schema: str | None = opt(None, "JSON that matches the schema in this file.", _FORM, metavar="FILE")
    regex: str | None = opt(None, "Text that matches this whole regular expression.", _FORM)
    choice: list[str] | None = opt(None, "One of these texts; repeat the option for each.", _FORM)
    adapter: str | None = opt(None, "Folder of a LoRA adapter (peft), which answers.", MODEL, metavar="DIR")

    @property
    def adapters(self) -> dict[str, str]:
        """Of `LLM`."""
        return {} if self.adapter is None else {self.adapter: self.adapter}

    def params(self) -> "SamplingParams":
        """Raises `ConfigError` for wrong values."""
        from ..core.request import Bias, SamplingParams

        values: dict[str, Any] = dict(vars(self))
        if self.logit_bias is not None:
            bias = parse_json(self.logit_bias, "--logit-bias")
            values["logit_bias"] = validate(dict[int, Bias], bias, '--logit-bias, for example {"42": -5},')
        if (adapter := values.pop("adapter")) is not None:
            values["extra_args"] = {"adapter": adapter}
        schema, regex, choice = (values.pop(key) for key in ("json_schema", "regex", "choice"))
        form = {"json": schema and read_text(schema, "the schema in"), "regex": regex, "choice": choice}
        if any(value is not None for value in form.values()):
            values["structured_outputs"] = form
        return SamplingParams(**values)


@dataclass(frozen=True, kw_only=True)
class SeveralOptions(SamplingOptions):
    """`SamplingParams` as options."""

    n: int = opt(1, "Number of answers.", _SAMPLING)
    logprobs: int | None = opt(None, "Log-probabilities of each token and of the top K (in --json).", _OUTPUT)


@command
def generate(
    model: ModelArgument,
    source: PromptOptions,
    speculation: SpeculationOptions,
    sampling: SeveralOptions,
    loading: ModelOptions,
    screen: Screen,
    others: Others = LOADING,
    stream: bool = opt(True, "Print the text while it is decoded.", _OUTPUT, name="--stream/--no-stream"),
    color: bool = opt(False, "Colour each token by its origin.", _OUTPUT),
) -> None:
    """Answer a prompt; the answer goes to stdout, messages to stderr.

    Example:  paceline generate smollm2-135m --chat "Name three rivers." --drafter lookup --color

    Example:  paceline generate smollm2-135m --chat "Is a whale a fish?" --choice Yes --choice No

    Example:  paceline generate ./my-vlm --image cat.jpg --image https://example.org/dog.png --prompt "Who is larger?"
    """
    chosen = speculation.choose("none")
    params = sampling.params()
    prompt = source.read()
    (loading,) = others.applied("generate", screen, loading)
    llm = open_engine(model, screen, loading, chosen, adapters=sampling.adapters)
    if source.image and llm.loaded.vision is None:
        count = f"{len(source.image)} image" + "s" * (len(source.image) > 1)
        fix = "leave --image out, or name a vision-language model"
        raise ConfigError(f"{model} is a text model", got=count, fix=fix)
    if color:
        screen.force_colour()
    if stream and params.n == 1 and not screen.json:
        _stream(llm, prompt, params, screen, color)
        return
    with screen.spinner("decoding"):
        result = llm.generate([prompt], params)[0]  # type: ignore[list-item]
    if not screen.json:
        _print(llm, result, params, screen, color)
        return
    answers = [answer.to_dict() for answer in result.outputs]
    seconds, tokens = result.metrics.decode, sum(answer.num_decoded for answer in result.outputs)
    screen.put_json(
        {
            **chosen.as_json(model),
            **answers[0],
            "tokens_per_s": tokens / seconds if seconds else 0.0,
            "timings": {**vars(result.metrics), "decode": seconds},
            "num_prompt_tokens": len(result.prompt_token_ids),
            "outputs": answers,
        }
    )


def _stream(llm: "LLM", prompt: "Prompt", params: "SamplingParams", screen: Screen, color: bool) -> None:
    with closing(print_stream(llm, llm.stream(prompt, params), params, screen, color)) as chunks:
        *_, last = chunks
    assert last.completion is not None
    remark(llm, last.completion, params, Timings.of(last.completion.rounds), screen, color)


def print_stream(
    llm: "LLM", chunks: "Iterator[StreamChunk]", params: "SamplingParams", screen: Screen, color: bool
) -> "Generator[StreamChunk, None, None]":
    """Print each chunk of `LLM.stream`, then yield it. The line is ended also where the answer is stopped."""
    painter = Painter(llm.tokenizer, params.stop or ()) if color else None
    ended_in_newline = True
    try:
        for chunk in chunks:
            if painter is not None:
                screen.out.print(painter.paint(chunk), end="", soft_wrap=True)
            else:
                print(chunk.text, end="", flush=True)
            ended_in_newline = chunk.text.endswith("\n") if chunk.text else ended_in_newline
            yield chunk
    finally:
        chunks.close()  # type: ignore[attr-defined]  # releases the slot before anything else happens
        if not ended_in_newline:
            print(flush=True)


def _print(llm: "LLM", result: "RequestOutput", params: "SamplingParams", screen: Screen, color: bool) -> None:
    for index, answer in enumerate(result.outputs, start=1):
        if len(result.outputs) > 1:
            screen.say(f"[bold]answer {index}[/bold] [dim]seed {answer.seed}[/dim]")
        if color:
            screen.out.print(Painter(llm.tokenizer, params.stop or ()).paint(answer), soft_wrap=True)
        else:
            print(answer.text, flush=True)
    if len(result.outputs) == 1:
        remark(llm, result.outputs[0], params, result.metrics, screen, color)


def remark(
    llm: "LLM", answer: "Completion", params: "SamplingParams", timings: Timings, screen: Screen, color: bool
) -> None:
    """Say how an answer was decoded, and how fast."""
    if color:
        screen.err.print(legend(answer.origins), soft_wrap=True)
    is_timed = timings.decode and answer.num_decoded >= MIN_TIMED
    pace = f"{answer.num_decoded / timings.decode:.1f} tok/s, " if is_timed else ""
    promise = f"the tokens of plain decoding, numerics {answer.numerics}" if answer.exact else "same distribution"
    promise = promise if answer.lossless else "lossy"
    text = f"{len(answer.token_ids)} tokens, {pace}{answer.mean_acceptance_length:.2f} tokens a pass, {promise}"
    if answer.finish_reason == "length":
        text += ", cut at the length limit"
    if answer.stop_reason is not None:
        text += f", stopped at {answer.stop_reason!r}"
    if params.temperature:
        text += f", seed {answer.seed}"
    screen.say(f"[dim]{escape(text)}[/dim]")
    if llm.drafters and not answer.num_drafted:
        screen.say(f"[yellow]{nothing_drafted([answer.no_draft_reason])}[/yellow]")
    if answer.num_images:
        images = f"{answer.num_images} image{'s' * (answer.num_images > 1)}, {answer.num_image_tokens} image tokens"
        parts = ("vision", "prefill", "draft", "verify", "rest")
        split = ", ".join(f"{part} {getattr(timings, part):.2f} s" for part in parts)
        screen.say(f"[dim]{images}; {split}[/dim]")
