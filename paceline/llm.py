"""The entry point: load a model and answer prompts with speculative decoding.

llm = LLM("smollm2-135m", drafter=PromptLookup())
result = llm.generate("Once upon a time", SamplingParams(max_tokens=64))[0]
"""

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
from .outputs import Completion, RequestOutput, StreamChunk
from .policy import CostModel, Fixed
from .quant import QuantReport, Weights, check_weights
from .runner import LoadedModel, load_model, make_runner, with_weights, wrap_model
from .sampling import Detokenizer
from .schema import checked_call
from .tuned import check_profile, load_tuned
from .verify import Coupled
from .zoo import resolve

Numerics: TypeAlias = Literal["fast", "invariant"]

MAX_BATCH_SIZE = 4096
"""Every slot has cache memory of its own from the start."""
MAX_WAITING_PIXEL_BYTES = 1 << 30
"""Pixels held for prompts that wait for a slot; the images of further prompts are read again when a slot is free."""


@dataclass
class _Request:
    """One prompt and its answers in progress. pixels_dropped: its images must be read again before prefill."""

    prompt: Prompt
    seqs: list[Sequence]
    detokenizers: list[Detokenizer | None]
    pixels_dropped: bool = False

    def set_vision(self, vision: VisionPrompt) -> None:
        """Give all answers the images of the prompt."""
        for seq in self.seqs:
            seq.vision = vision


class LLM:
    """A causal or vision-language model that decodes speculatively and gives the answers of plain decoding.

    model: a folder, a hub id, a name that `paceline models` lists, or a loaded model.
    drafter: proposes tokens; None decodes plainly.
    policy: decides how many tokens to draft. Default: `CostModel()`, which drafts as many as pay on this machine.
    verifier: accepts or rejects drafts. Default: `Coupled()`, token-identical to plain decoding, greedy and sampled.
    numerics: "invariant" makes answers bit-identical to plain decoding, "fast" identical up to rounding ties. None
        takes "invariant" where the device and dtype allow it; native passes always are. `llm.numerics` has the result.
    weights: "int8", "int4" or, on CUDA, "fp8" quantizes the linear layers when the model is loaded; the answers are
        those of the quantized model. `llm.quantized` reports on the layers.
    profile: a file of `paceline tune`: `CostModel` starts from it, and its drafter is used unless one is given.
    dtype, device: as in torch; None takes the checkpoint's dtype and a GPU if there is one.
    tokenizer, processor: for a model that is passed loaded; a vision-language model needs a processor.
    max_batch_size: sequences decoded side by side, 1 to 4096.
    max_model_len: tokens of prompt and answer together; None: the model's context.
    allow_lossy: permit verifiers that change the distribution of the answers.
    trust_remote_code: run Python code that comes with the model.

    Raises `ConfigError` for wrong arguments, `IncompatibleModels` where the draft does not fit the model or the model
    cannot verify trees, `NumericsError` where "invariant" is impossible, and `LossyNotAllowed`.
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
        measured = None
        if profile is not None:
            tuned = load_tuned(str(profile))
            measured = tuned.profile
            for warning in check_profile(measured, self.loaded):
                warnings.warn(warning, stacklevel=2)
            if drafter is None:
                drafter, tuned_policy, _ = tuned.config.build(allow_lossy, measured)
                policy = policy or tuned_policy
        if policy is None:
            policy = Fixed(0) if drafter is None else CostModel(profile=measured)
        self.decoder = SpeculativeDecoder(self.runner, drafter or Plain(), self.verifier, policy)
        if isinstance(policy, CostModel) and drafter is not None:
            policy.measure(self.runner.max_length)

    def plain(self) -> "LLM":
        """An `LLM` on the same weights and cache that decodes without speculation: the baseline for comparisons."""
        other = copy.copy(self)
        other.verifier = self.verifier if self.verifier.exact else Coupled()
        other.decoder = SpeculativeDecoder(self.runner, Plain(), other.verifier, Fixed(0))
        return other

    @property
    def numerics(self) -> str:
        """What the numerics became: "invariant" or "fast"."""
        return self.runner.numerics

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer. Raises `ConfigError` where it has none."""
        return tokenizer_of(self.loaded)

    def generate(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answer one prompt or many; results are in the order of the prompts.

        prompts: each a string to continue, a chat, or a list or array of token ids. A chat is a list of messages whose
            content is text, or a list of {"type": "text", "text": ...} and {"type": "image", "image": ...}.
        params: one for all, or one for each prompt. Default: `SamplingParams()`.

        Every prompt is read before any is answered. Where images take more than `MAX_WAITING_PIXEL_BYTES`, those of
        later prompts are read again when it is their turn, and must not have changed. Calls from several threads are
        answered one after the other. Raises `ConfigError` for a prompt or parameters that cannot be used, and
        `CacheFull` where a prompt does not fit.
        """
        many = as_list(prompts)
        each = params_of(params, len(many))
        with self.runner.lock:
            requests = list(self._requests(many, each))
            self.decoder.timings = timings = Timings()
            for stepped in generate(self.decoder, self._with_pixels(requests)):
                for seq in stepped:
                    if seq.is_finished and seq.vision is not None:
                        seq.vision = seq.vision.without_pixels()
            results = []
            for one in requests:
                pairs = zip(one.seqs, one.detokenizers, strict=True)
                outputs = [self._completion(seq, detokenizer) for seq, detokenizer in pairs]
                results.append(RequestOutput(list(one.seqs[0].prompt_ids), outputs, timings))
            return results

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamChunk]:
        """Answer one prompt and yield a chunk after every round; the last one has the `Completion`.

        It holds one of the `max_batch_size` slots until it ends or is closed; other calls, from any thread, may come
        between its rounds. Raises what `generate` raises, and `ConfigError` for `n` > 1.
        """
        (params,) = params_of(params, 1)
        if params.n != 1:
            raise ConfigError("a stream carries one answer", got=f"n={params.n}", fix="use generate for n > 1")
        with self.runner.lock:
            (seq,), (detokenizer,) = self._sequences(prompt, params)
        rounds, sent = generate(self.decoder, [seq]), 0
        self.decoder.timings = Timings()
        try:
            while not seq.is_finished:
                with self.runner.lock:
                    next(rounds)
                    new = seq.output_ids[sent:]
                    if detokenizer is not None and seq.stops is None:
                        for token in new:
                            detokenizer.feed(token)
                    completion = self._completion(seq, detokenizer) if seq.is_finished else None
                    text = "" if detokenizer is None else detokenizer.take()
                    if detokenizer is not None and seq.is_finished:
                        text += detokenizer.finish()
                yield StreamChunk(text, new, seq.origins[sent:], seq.finish_reason, completion)
                sent += len(new)
        finally:
            with self.runner.lock:
                rounds.close()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; a chat goes through the model's template. Raises `ConfigError` for an empty one."""
        with self.runner.lock:
            return read_prompt(self.loaded, prompt, self.runner.max_length)[0]

    def _requests(self, prompts: Seq[Prompt], params: Seq[SamplingParams]) -> Iterator[_Request]:
        """Read every prompt. Pixels beyond `MAX_WAITING_PIXEL_BYTES` are dropped where their prompt must wait."""
        held = waiting = 0
        for prompt, one in zip(prompts, params, strict=True):
            request = _Request(prompt, *self._sequences(prompt, one))
            vision = request.seqs[0].vision
            if vision is not None:
                held += (size := pixel_bytes(vision))
                if size > 0 and held > MAX_WAITING_PIXEL_BYTES and waiting >= self.runner.cache.num_slots:
                    request.pixels_dropped = True
                    request.set_vision(vision.without_pixels())
            waiting += len(request.seqs)
            yield request

    def _with_pixels(self, requests: Seq[_Request]) -> Iterator[Sequence]:
        """The sequences, each taken when a slot is free; dropped pixels are read again. Raises `ConfigError`."""
        for request in requests:
            if request.pixels_dropped:
                before = request.seqs[0]
                ids, vision = read_prompt(self.loaded, request.prompt, self.runner.max_length)
                before_keys = None if before.vision is None else before.vision.keys
                if vision is None or (ids, vision.keys) != (before.prompt_ids, before_keys):
                    raise ConfigError(
                        "an image changed while its prompt waited for a slot",
                        fix="pass opened images, or leave the files as they are until generate returns",
                    )
                request.set_vision(vision)
            yield from request.seqs

    def _sequences(self, prompt: Prompt, params: SamplingParams) -> tuple[list[Sequence], list[Detokenizer | None]]:
        """`params.n` sequences of one prompt, each with its own seed, and their detokenizers."""
        ids, vision = read_prompt(self.loaded, prompt, self.runner.max_length)
        for token in (*(params.logit_bias or {}), *params.stop_token_ids):
            if not 0 <= token < self.runner.vocab_size:
                raise ConfigError(
                    "logit_bias or stop_token_ids names no token",
                    got=token,
                    expected=f"0 to {self.runner.vocab_size - 1}",
                )
        base = params.seed if params.seed is not None else secrets.randbits(62)
        tokenizer, bad_word_ids = self.loaded.tokenizer, self._bad_word_ids(params)
        if params.stop and tokenizer is None:
            raise ConfigError("stop strings need a tokenizer", fix="use stop_token_ids, or pass tokenizer=...")
        seqs, detokenizers = [], []
        for index in range(params.n):
            detokenizer = None if tokenizer is None else Detokenizer(tokenizer, tuple(params.stop))
            seqs.append(
                Sequence(
                    ids,
                    params,
                    (base + index * 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63,  # a signed 64-bit integer
                    self.loaded.eos_ids,
                    self.runner.max_length,
                    bad_word_ids,
                    detokenizer if params.stop else None,
                    vision,
                )
            )
            detokenizers.append(detokenizer)
        return seqs, detokenizers

    def _bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences of the bad words, at the start of a text and after a space."""
        found = dict[tuple[int, ...], None]()
        for word in params.bad_words:
            forms = [self.tokenizer.encode(form, add_special_tokens=False) for form in (word, " " + word.lstrip())]
            if not any(forms):
                raise ConfigError("a bad word has no tokens", got=repr(word), fix="leave it out")
            found |= {tuple(form): None for form in forms if form}
        return tuple(found)

    def _completion(self, seq: Sequence, detokenizer: Detokenizer | None) -> Completion:
        if detokenizer is None:
            text = ""
        elif seq.stops is not None:
            if seq.finish_reason != "stop":
                detokenizer.decline()  # min_tokens or the context overruled the stop string
            seq.stop_reason = seq.stop_reason if detokenizer.stop_hit is None else detokenizer.stop_hit
            text = detokenizer.text
        else:
            text = str(self.tokenizer.decode(seq.output_ids, skip_special_tokens=True))
        return Completion(
            text,
            list(seq.output_ids),
            list(seq.origins),
            list(seq.sources),
            list(seq.logprobs) if seq.params.logprobs is not None else None,
            list(seq.rounds),
            seq.finish_reason,
            seq.stop_reason,
            seq.seed,
            self.verifier.lossless,
            self.verifier.exact,
            self.numerics,
            len(seq.vision.images) if seq.vision else 0,
            seq.vision.num_tokens if seq.vision else 0,
        )
