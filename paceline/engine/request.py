"""Requests: from a prompt and its parameters to sequences, and from these to the user's `RequestOutput`."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from transformers import GenerationConfig

from ..core.request import SamplingParams, TokenLogprob, TokenSequence
from ..errors import ConfigError, EngineStopped
from ..hf.image_prompts import pixel_bytes
from ..methods.plain import Plain
from ..methods.prediction import PredictedOutput
from ..methods.spec import one_of
from ..sampling.detokenize import Detokenizer
from ..sampling.grammar import make_grammar
from ..schema import brief
from ..target import LoadedModel, ModelRunner
from ..target.prompts import ImageText, Prompt, ReadPrompt, TemplatedChat, as_prompt, is_chat, tokenizer_of
from ..target.prompts import read_prompt as tokens_of
from ..target.readings import PromptLogprobs
from .loop import SpeculativeDecoder
from .output import Completion, RequestOutput

MAX_WAITING_PIXEL_BYTES = 1 << 30
"""Pixels held for prompts that wait for a slot; the images of further prompts are read again when a slot is free."""


@dataclass(eq=False)
class Answer:
    """One of the answers of a request, in progress.

    num_fed: tokens given to its detokenizer. sent: tokens and rounds in its parts so far, see `part`.
    since: when it got its slot or began to wait for one, by time.perf_counter. read_s: what reading its text took then.
    served_s: how long it has had slots before.
    """

    request: "Request" = field(repr=False)
    seq: TokenSequence
    detokenizer: Detokenizer | None = None
    index: int = 0
    num_fed: int = 0
    sent: tuple[int, int] = (0, 0)
    is_settled: bool = False
    since: float = 0.0
    read_s: float = 0.0
    served_s: float = 0.0

    def take_text(self) -> str:
        """Text that became certain since the last call; the rest of it once the answer has ended."""
        if self.detokenizer is None:
            return ""
        self._feed(self.detokenizer)
        return self.detokenizer.take() + (self.detokenizer.finish() if self.seq.is_finished else "")

    def part(self) -> Completion:
        """The part of the answer since the last call."""
        completion = self._completion(self.take_text(), *self.sent)
        self.sent = self.seq.num_output, len(self.seq.rounds)
        return completion

    def nothing(self) -> Completion:
        """An empty part."""
        return self._completion("", self.seq.num_output, len(self.seq.rounds))

    def completion(self) -> Completion:
        """The whole answer, which has ended."""
        seq, text = self.seq, ""
        is_plain = seq.params.spaces_between_special_tokens and not seq.params.shown_special_tokens
        if self.detokenizer is not None and seq.stops is None and is_plain:
            tokenizer = tokenizer_of(self.request.decoder.runner.loaded)
            text = str(tokenizer.decode(shown_ids(seq), skip_special_tokens=seq.params.skip_special_tokens))
        elif self.detokenizer is not None:
            self._feed(self.detokenizer)
            text = self.detokenizer.text
        return self._completion(text)

    def _completion(self, text: str, begin: int = 0, begin_round: int = 0) -> Completion:
        seq, runner, verifier = self.seq, self.request.decoder.runner, self.request.decoder.verifier
        logprobs = None if seq.params.logprobs is None else with_texts(seq.logprobs[begin:], runner.loaded, seq.params)
        return Completion(
            index=self.index,
            text=text,
            token_ids=seq.token_ids[len(seq.prompt_ids) + begin :],
            logprobs=logprobs,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            origins=seq.origins[begin:],
            sources=seq.sources[begin:],
            rounds=seq.rounds[begin_round:],
            seed=seq.seed,
            lossless=verifier.lossless,
            exact=verifier.exact,
            numerics=runner.numerics,
            num_images=len(seq.vision.images) if seq.vision else 0,
            num_image_tokens=seq.vision.num_tokens if seq.vision else 0,
            no_draft_reason=seq.no_draft_reason,
            num_cached_tokens=seq.num_cached_tokens,
        )

    def _feed(self, detokenizer: Detokenizer) -> None:
        """Give the detokenizer the tokens that it does not have; one that looks for stop strings has all."""
        if self.seq.stops is None:
            for token in shown_ids(self.seq)[self.num_fed :]:
                detokenizer.feed(token)
            self.num_fed = self.seq.num_output
        elif self.seq.is_finished and not self.is_settled:
            self.is_settled = True
            if not isinstance(self.seq.stop_reason, str):
                if self.seq.is_ended_by_token and self.seq.params.include_stop_str_in_output:
                    detokenizer.feed(self.seq.token_ids[-1])
                detokenizer.decline()  # min_tokens, the context or a stop token overruled the stop string


@dataclass(eq=False)
class Request:
    """One prompt and its answers in progress.

    text: the prompt as text; None where it was given as token ids.
    pixels_dropped: its images must be read again before prefill.
    error: why it cannot go on.
    read_output: makes the output of a request that ends when its prompt is read, of no answers.
    begin: when it was made, by time.perf_counter.
    """

    decoder: SpeculativeDecoder
    request_id: str = ""
    prompt: Prompt = ""
    text: str | None = None
    answers: list[Answer] = field(default_factory=list[Answer])
    pixels_dropped: bool = False
    error: Exception | None = None
    read_output: Callable[[], Any] | None = None
    begin: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(cls, decoder: SpeculativeDecoder, seq: TokenSequence) -> "Request":
        """A request of one sequence, without a text."""
        request = cls(decoder)
        request.answers.append(Answer(request, seq))
        return request

    @cached_property
    def seqs(self) -> list[TokenSequence]:
        """The sequences of its answers."""
        return [answer.seq for answer in self.answers]

    @property
    def is_finished(self) -> bool:
        """Whether every answer has ended."""
        return all(seq.is_finished for seq in self.seqs)

    def output(self, parts: list[Completion] | None = None) -> RequestOutput:
        """The `RequestOutput`: of all answers, which have ended, or of these parts of them."""
        first = self.seqs[0]
        if self.read_output is not None:
            if self.seqs[0].finish_reason == "abort":
                raise EngineStopped("the request was aborted", got=f"request_id={self.request_id!r}")
            return self.read_output()
        outputs = [answer.completion() for answer in self.answers] if parts is None else parts
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.text,
            prompt_token_ids=list(first.prompt_ids),
            prompt_logprobs=first.reading.entries if isinstance(first.reading, PromptLogprobs) else None,
            outputs=outputs,
            all_rounds=[seq.rounds for seq in self.seqs],
            num_cached_tokens=first.num_cached_tokens,
        )

    def result(self, return_exceptions: bool = False) -> RequestOutput | Exception:
        """The output of all answers, which have ended, or the error of the request, which is raised or returned."""
        try:
            if self.error is not None:
                raise self.error
            return self.output()
        except Exception as error:
            if not return_exceptions:
                raise
            return error


def check_drafting(decoder: SpeculativeDecoder, params: SamplingParams) -> None:
    """Raise `ConfigError` for a request that asks for a drafter that is not there."""
    known = decoder.drafters
    if params.method not in (None, Plain.name, *known):
        message = 'SamplingParams.extra_args["method"] is no drafter of this LLM'
        raise ConfigError(message, got=brief(params.method), expected=one_of([Plain.name, *known]))
    if params.prediction and PredictedOutput.name not in known:
        fix = f"make it with drafter={'+'.join([*known, PredictedOutput.name])!r}"
        raise ConfigError("this LLM has no drafter for a prediction", got=", ".join(known) or "none", fix=fix)


def encode(runner: ModelRunner, prompt: Prompt, check: Callable[[], None] = lambda: None) -> ReadPrompt:
    """`target.prompts.read_prompt`, without opened images where no drafter reads them."""
    ids, vision = tokens_of(runner.loaded, prompt, runner.max_length, check)
    if vision is not None and not runner.keeps_images:
        vision = vision.without_sources()
    return ids, vision


def open_request(
    decoder: SpeculativeDecoder, prompt: Prompt, read: ReadPrompt, params: SamplingParams, seed: int, request_id: str
) -> Request:
    """Make a sequence for each of `params.n` answers to a prompt. Raises `ConfigError`.

    read: see `encode`. seed: of the first answer; those of the others are derived from it.
    """
    prompt, loaded, max_length = as_prompt(prompt), decoder.runner.loaded, decoder.runner.max_length
    ids, vision = read
    _check_tokens(params, loaded.vocab_size)
    tokenizer, bad_word_ids = loaded.tokenizer, _bad_word_ids(loaded, params)
    if params.stop and tokenizer is None:
        raise ConfigError("stop strings need a tokenizer", fix="use stop_token_ids, or pass tokenizer=...")
    prediction = params.prediction
    if isinstance(prediction, str):
        prediction = tokenizer_of(loaded).encode(prediction, add_special_tokens=False) if prediction else ()
    adapter = decoder.runner.adapters.get(params.adapter) if params.adapter else None
    form, facts = params.structured_outputs, (loaded.vocab_size, loaded.eos_ids, params.ignore_eos)
    request = Request(decoder, request_id, prompt, _prompt_text(prompt, ids, loaded))
    for index in range(params.n):
        detokenizer = None
        if tokenizer is not None and params.detokenize:
            shows = params.skip_special_tokens, params.include_stop_str_in_output, params.spaces_between_special_tokens
            detokenizer = Detokenizer(tokenizer, params.stop or (), *shows, params.shown_special_tokens)
        seq = TokenSequence(
            ids,
            params,
            (seed + index * 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63,  # a signed 64-bit integer
            loaded.eos_ids,
            max_length,
            bad_word_ids,
            detokenizer if params.stop else None,
            vision,
            None if form is None else make_grammar(form, tokenizer_of(loaded), *facts),
            tuple(prediction),
            adapter,
        )
        if params.prompt_logprobs is not None and index == 0:
            texts = partial(with_texts, loaded=loaded, params=params)
            seq.reading = PromptLogprobs(ids, params.prompt_logprobs, texts, params.max_tokens == 0)
        request.answers.append(Answer(request, seq, detokenizer, index))
    return request


def default_params(config: GenerationConfig | None) -> SamplingParams:
    """The sampling options of a generation_config.json: greedy unless it samples or has a temperature."""
    if config is None:
        return SamplingParams()
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size")
    values = {name: value for name in names if (value := getattr(config, name, None)) is not None}
    if config.do_sample is False:
        values["temperature"] = 0.0
    elif config.do_sample:
        values.setdefault("temperature", 1.0)
    if config.max_new_tokens is not None:
        values["max_tokens"] = config.max_new_tokens
    return SamplingParams(**values)


def drop_waiting_pixels(requests: Iterable[Request], num_slots: int) -> Iterator[Request]:
    """The requests; beyond `MAX_WAITING_PIXEL_BYTES` pixels are dropped where their prompt must wait for a slot."""
    held = waiting = 0
    for request in requests:
        vision = request.seqs[0].vision if request.seqs else None
        if vision is not None:
            held += (size := pixel_bytes(vision))
            if size > 0 and held > MAX_WAITING_PIXEL_BYTES and waiting >= num_slots:
                request.pixels_dropped = True
                vision = vision.without_pixels()
                for seq in request.seqs:
                    seq.vision = vision
        waiting += len(request.seqs)
        yield request


def read_pixels(request: Request) -> None:
    """Read dropped pixels again. Raises `ConfigError` where an image changed."""
    seq = request.seqs[0]
    if request.pixels_dropped:
        ids, vision = encode(request.decoder.runner, request.prompt)
        if vision is None or seq.vision is None or (ids, vision.keys) != (seq.prompt_ids, seq.vision.keys):
            raise ConfigError(
                "an image changed while its prompt waited for a slot",
                fix="pass opened images, or leave the files as they are until generate returns",
            )
        for own in request.seqs:
            own.vision = vision
        request.pixels_dropped = False


def shown_ids(seq: TokenSequence) -> list[int]:
    """The tokens whose text an answer shows: without the token that ended it, unless that was asked for."""
    hidden = seq.is_ended_by_token and not seq.params.include_stop_str_in_output
    return seq.output_ids[:-1] if hidden else seq.output_ids


def with_texts(logprobs: Iterable[TokenLogprob], loaded: LoadedModel, params: SamplingParams) -> list[TokenLogprob]:
    """The same with the text of each token, see `Pieces`."""
    pieces = loaded.pieces
    if pieces is None or not params.detokenize:
        return list(logprobs)
    return [replace(entry, texts={token: pieces.text(token) for token in entry}) for entry in logprobs]


def _prompt_text(prompt: Prompt, ids: list[int], loaded: LoadedModel) -> str | None:
    """The prompt as text, a chat as its template writes it; None for one of token ids."""
    if isinstance(prompt, str | ImageText):
        return prompt if isinstance(prompt, str) else prompt.text
    written = isinstance(prompt, TemplatedChat) or is_chat(prompt)
    return str(tokenizer_of(loaded).decode(ids)) if written else None


def _check_tokens(params: SamplingParams, vocab_size: int) -> None:
    """Raise `ConfigError` for a token id outside the vocabulary."""
    by_option = {name: getattr(params, name) or () for name in ("logit_bias", "stop_token_ids", "allowed_token_ids")}
    by_option["prediction"] = () if isinstance(params.prediction, str) else params.prediction
    for name, tokens in by_option.items():
        bad = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise ConfigError(f"{name} names no token", got=brief(bad), expected=f"0 to {vocab_size - 1}")


def _bad_word_ids(loaded: LoadedModel, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
    """Token sequences of the bad words, at the start of a text and after a space."""
    words = dict[tuple[int, ...], None]()
    for word in params.bad_words or ():
        tokenizer = tokenizer_of(loaded)
        forms = [tokenizer.encode(form, add_special_tokens=False) for form in (word, " " + word.lstrip())]
        if not any(forms):
            raise ConfigError("a bad word has no tokens", got=brief(word), fix="leave it out")
        words |= {tuple(form): None for form in forms if form}
    return tuple(words)
