"""The front door: load a model, answer prompts."""

import copy
import secrets
import warnings
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import torch
from pydantic import Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.processing_utils import ProcessorMixin

from .core.interfaces import Drafter, DraftPolicy, Verifier
from .core.outputs import Timings
from .core.request import SamplingParams, Sequence, params_of
from .core.vision import VisionPrompt
from .decoding import SpeculativeDecoder, generate
from .drafters import Plain
from .errors import ConfigError, LossyNotAllowed
from .hf.image_prompts import pixel_bytes
from .hf.prompts import Prompt, as_list, read_prompt, tokenizer_of
from .outputs import RequestOutput, StreamChunk, completion_of
from .policy import CostModel, Fixed
from .quant import QuantReport, Weights, check_weights
from .runner import LoadedModel, load_model, make_runner, with_weights, wrap_model
from .sampling import Detokenizer
from .schema import checked_call
from .tuned import check_profile, dtype_label, load_tuned
from .verify import Coupled
from .zoo import resolve

Numerics: TypeAlias = Literal["fast", "invariant"]

MAX_BATCH_SIZE = 4096
"""Each slot has memory of its own from the start."""
PIXEL_BYTES = 1 << 30
"""Of pictures that wait for a slot; those of further prompts are opened once more when their turn comes."""


@dataclass
class _Request:
    """One prompt and its answers in the making. dropped: its pixels, until a slot is free."""

    prompt: Prompt
    seqs: list[Sequence]
    texts: list[Detokenizer | None]
    dropped: bool = False


class LLM:
    """A causal or vision-language model that decodes speculatively and answers exactly as it would without.

    model: a folder, a hub id, a name that `paceline models` lists, or a loaded model.
    tokenizer, processor: of a model that is passed loaded; a vision-language model takes a processor.
    drafter: None decodes plainly. policy: how much to draft; by default `CostModel()`: what pays on this machine, down
        to nothing.
    verifier: `Coupled()` by default: token-identical to plain decoding, greedy and sampled.
    numerics: "invariant" makes that identity hold bit for bit, "fast" up to rounding ties; None takes "invariant"
        where this device can give it. Native passes always do. `llm.numerics` tells which it became.
    weights: "int8", "int4" or, on CUDA, "fp8" rounds the model's own weights when it is loaded: smaller and faster,
        and its answers are those of the rounded model. `llm.quantized` tells what became of the layers.
    profile: a file of `paceline tune`: its drafter is used unless one is given, and `CostModel` starts from it.
    max_batch_size: sequences decoded side by side. max_model_len: prompt and answer together; None: the context.
    allow_lossy: permit verifiers that change the answers.

    Raises `ConfigError`, `IncompatibleModels`, `NumericsError` or `LossyNotAllowed`.
    """

    @checked_call
    def __init__(
        self,
        model: str | Path | PreTrainedModel | LoadedModel,
        *,
        drafter: Drafter | None = None,
        policy: DraftPolicy | None = None,
        verifier: Verifier | None = None,
        numerics: Numerics | None = None,
        weights: Weights | None = None,
        profile: str | PathLike[str] | None = None,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        processor: ProcessorMixin | None = None,
        max_batch_size: Annotated[int, Field(ge=1, le=MAX_BATCH_SIZE)] = 8,
        max_model_len: Annotated[int, Field(ge=1)] | None = None,
        allow_lossy: bool = False,
        trust_remote_code: bool = False,
    ):
        self.verifier = verifier or Coupled()
        if not self.verifier.lossless and not allow_lossy:
            raise LossyNotAllowed(
                f"{self.verifier.name} changes what the model answers", fix="pass allow_lossy=True to accept that"
            )
        if isinstance(model, LoadedModel):
            self.loaded = model
        elif isinstance(model, PreTrainedModel):
            self.loaded = wrap_model(model, tokenizer, processor=processor)
        else:
            self.loaded = load_model(resolve(model), dtype, device, trust_remote_code)
        self.quantized: QuantReport | None = None
        if (kind := check_weights(weights)) is not None:
            self.loaded, self.quantized = with_weights(self.loaded, kind)
        invariant = {"fast": False, "invariant": True, None: None}[numerics]
        self.runner = make_runner(self.loaded, max_batch_size, max_model_len, invariant)
        learnt = None
        if profile is not None:
            tuned = load_tuned(str(profile))
            where = dtype_label(self.loaded.dtype, self.loaded.device)
            for remark in check_profile(tuned.profile, self.loaded.name, where, torch.get_num_threads()):
                warnings.warn(remark, stacklevel=2)
            learnt = tuned.profile
            if drafter is None:
                drafter, tuned_policy, _ = tuned.config.build(allow_lossy, learnt)
                policy = policy or tuned_policy
        if policy is None:
            policy = Fixed(0) if drafter is None else CostModel(profile=learnt)
        self.decoder = SpeculativeDecoder(self.runner, drafter or Plain(), self.verifier, policy)
        if isinstance(policy, CostModel) and drafter is not None:
            policy.measure(self.runner.max_length)

    def plain(self) -> "LLM":
        """The same model and cache, decoding without speculation: the baseline of `check`, `demo` and `bench`."""
        other = copy.copy(self)
        other.verifier = self.verifier if self.verifier.exact else Coupled()
        other.decoder = SpeculativeDecoder(self.runner, Plain(), other.verifier, Fixed(0))
        return other

    @property
    def numerics(self) -> str:
        """ "invariant" or "fast"."""
        return self.runner.numerics

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer. Raises `ConfigError` where it has none."""
        return tokenizer_of(self.loaded)

    def generate(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answer one prompt or many; each is a string, a chat or a list of token ids. Results keep the order.

        Token ids may be an array, and what a tokenizer returns is taken too, see `hf.prompts.as_prompt`.
        A chat's contents are texts, or lists of {"type": "text", "text": ...} and {"type": "image", "image": ...}.
        Every prompt is read, and refused if it must be, before any is answered. Where pictures of many chats take more
        than `PIXEL_BYTES`, the rest are read again in their turn, and must not have changed. Calls from several threads
        are answered one after the other.
        """
        many = as_list(prompts)
        each = params_of(params, len(many))
        with self.runner.lock:
            requests = list(self._requests(many, each))
            self.decoder.timings = timings = Timings()
            for took_part in generate(self.decoder, self._in_turn(requests)):
                for seq in took_part:
                    if seq.is_finished and seq.vision is not None:
                        seq.vision = seq.vision.without_pixels()
            results = []
            for one in requests:
                outputs = [self._completion(seq, text) for seq, text in zip(one.seqs, one.texts, strict=True)]
                results.append(RequestOutput(list(one.seqs[0].prompt_ids), outputs, timings))
            return results

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamChunk]:
        """Answer one prompt round by round. Abandoning the iterator leaves the engine usable.

        It holds one of `max_batch_size` slots until it ends; other calls, from any thread, may come between its rounds.
        """
        (params,) = params_of(params, 1)
        if params.n != 1:
            raise ConfigError("a stream carries one answer", got=f"n={params.n}", fix="use generate for n > 1")
        with self.runner.lock:
            (seq,), (text,) = self._sequences(prompt, params)
        rounds, sent = generate(self.decoder, [seq]), 0
        self.decoder.timings = Timings()
        try:
            while not seq.is_finished:
                with self.runner.lock:
                    next(rounds)
                    new = seq.output_ids[sent:]
                    if text is not None and seq.stops is None:
                        for token in new:
                            text.feed(token)
                    done = self._completion(seq, text) if seq.is_finished else None
                    piece = "" if text is None else text.take() + (text.finish() if seq.is_finished else "")
                yield StreamChunk(piece, new, seq.origins[sent:], seq.finish_reason, done)
                sent += len(new)
        finally:
            with self.runner.lock:
                rounds.close()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; a chat goes through the model's template. Raises `ConfigError` for an empty one."""
        with self.runner.lock:
            return read_prompt(self.loaded, prompt, self.runner.max_length)[0]

    # Helpers

    def _requests(self, prompts: Seq[Prompt], params: Seq[SamplingParams]) -> Iterator[_Request]:
        """Read every prompt; the pixels of those are dropped that wait while `PIXEL_BYTES` are held already."""
        held = waiting = 0
        for prompt, one in zip(prompts, params, strict=True):
            seqs, texts = self._sequences(prompt, one)
            vision, dropped = seqs[0].vision, False
            if vision is not None:
                held += (size := pixel_bytes(vision))
                dropped = size > 0 and held > PIXEL_BYTES and waiting >= self.runner.cache.num_slots
                _see(seqs, vision.without_pixels() if dropped else vision)
            waiting += len(seqs)
            yield _Request(prompt, seqs, texts, dropped)

    def _in_turn(self, requests: Seq[_Request]) -> Iterator[Sequence]:
        """The sequences, each asked for when there is a slot; pixels that were dropped are there again."""
        for request in requests:
            if request.dropped:
                _see(request.seqs, self._seen_again(request))
            yield from request.seqs

    def _seen_again(self, request: _Request) -> VisionPrompt:
        """What the pictures of a prompt are to the engine, read once more. Raises `ConfigError` where they differ."""
        before = request.seqs[0]
        ids, vision = read_prompt(self.loaded, request.prompt, self.runner.max_length)
        if vision is None or before.vision is None or (ids, vision.keys) != (before.prompt_ids, before.vision.keys):
            raise ConfigError(
                "a picture changed while its prompt waited for a slot",
                fix="pass opened images, or leave the files as they are until generate returns",
            )
        return vision

    def _sequences(self, prompt: Prompt, params: SamplingParams) -> tuple[list[Sequence], list[Detokenizer | None]]:
        """`n` sequences of one prompt, each with a seed of its own, and what turns their tokens into text."""
        ids, vision = read_prompt(self.loaded, prompt, self.runner.max_length)
        for token in (*(params.logit_bias or {}), *params.stop_token_ids):
            if not 0 <= token < self.runner.vocab_size:
                raise ConfigError(
                    "logit_bias or stop_token_ids names no token",
                    got=token,
                    expected=f"0 to {self.runner.vocab_size - 1}",
                )
        base = params.seed if params.seed is not None else secrets.randbits(62)
        seqs, texts = [], []
        for index in range(params.n):
            text = Detokenizer(self.loaded.tokenizer, tuple(params.stop)) if self.loaded.tokenizer is not None else None
            if params.stop and text is None:
                raise ConfigError("stop strings need a tokenizer", fix="use stop_token_ids, or pass tokenizer=...")
            seqs.append(
                Sequence(
                    ids,
                    params,
                    _signed(base + index * 0x9E3779B97F4A7C15),
                    self.loaded.eos_ids,
                    self.runner.max_length,
                    self._bad_word_ids(params),
                    text if params.stop else None,
                    vision,
                )
            )
            texts.append(text)
        return seqs, texts

    def _bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences of the bad words, at the start of a text and after a space."""
        found = dict[tuple[int, ...], None]()
        for word in params.bad_words:
            forms = [self.tokenizer.encode(form, add_special_tokens=False) for form in (word, " " + word.lstrip())]
            if not any(forms):
                raise ConfigError("a bad word has no tokens", got=repr(word), fix="leave it out")
            found |= {tuple(form): None for form in forms if form}
        return tuple(found)

    def _completion(self, seq: Sequence, text: Detokenizer | None):
        if text is None:
            string = ""
        elif seq.stops is not None:
            if seq.finish_reason != "stop":
                text.decline()  # min_tokens, or the context, had the last word
            seq.stop_reason = seq.stop_reason if text.stop_hit is None else text.stop_hit
            string = text.text
        else:
            string = str(self.tokenizer.decode(seq.output_ids, skip_special_tokens=True))
        return completion_of(seq, string, self.verifier.lossless, self.verifier.exact, self.numerics)


def _see(seqs: Seq[Sequence], vision: VisionPrompt) -> None:
    for seq in seqs:
        seq.vision = vision


def _signed(value: int) -> int:
    """Wrap to a signed 64-bit integer."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
