"""The entry point: load a model and answer prompts with speculative decoding.

llm = LLM("smollm2-135m", drafter=PromptLookup())
result = llm.generate("Once upon a time", SamplingParams(max_tokens=64))[0]
"""

import copy
import itertools
import secrets
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from os import PathLike
from pathlib import Path
from random import Random
from types import EllipsisType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import torch
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from .config import parse
from .core.interfaces import Drafter, DraftPolicy, Verifier
from .core.request import SEED_BITS, SamplingParams
from .engine.adapters import LoRARequest
from .engine.batch import answer_all, stream
from .engine.loop import SpeculativeDecoder
from .engine.output import RequestOutput, StreamChunk
from .engine.request import Request, check_drafting, default_params, encode, open_request
from .engine.stats import Counter, EngineStats, Vector
from .engine.texts import ReadsTexts
from .errors import ConfigError
from .hf.classes import PreTrainedModel, ProcessorMixin
from .integrations.other_names import INSTEAD
from .methods.plain import Plain
from .policy import CostModel, Fixed
from .quant.blocks import Activations
from .quant.file_arena import ExpertsIn
from .quant.linears import Weights
from .schema import checked_call, checked_names
from .system.hardware import return_free_memory
from .target import LoadedModel, make_runner, rounded
from .target.lora import MAX_LORAS
from .target.open_model import open_model
from .target.prompts import Chat, Prompt, ReadPrompt, TemplatedChat, as_chats, as_list, holds_images, tokenizer_of
from .tuned import check_profile, load_tuned
from .verify import Coupled, check_lossy

Numerics: TypeAlias = Literal["fast", "invariant"]


class LLM(ReadsTexts):
    """A causal or vision-language model that decodes speculatively and gives the answers of plain decoding.

    model: a folder, a GGUF file, a hub id, a name that `paceline models` lists, or a loaded model.
    drafter: proposes tokens: an object, or a short name such as "lookup" or "lookup+head:FOLDER"; None decodes plainly.
    speculative_config: drafter, policy and verifier by vLLM's keys, for example {"method": "ngram",
        "num_speculative_tokens": 8, "prompt_lookup_max": 4}. See `paceline.config`.
    policy: decides how many tokens to draft. Default: `CostModel()`, which maximises the expected speed.
    verifier: accepts or rejects drafts. Default: `Coupled()`, token-identical to plain decoding, greedy and sampled.
    numerics: "invariant" makes answers bit-identical to plain decoding, "fast" identical up to near-ties. None
        takes "invariant" where it is possible, as in native passes. `llm.numerics` has the result.
    weights: "int8", "int4" or, on CUDA, "fp8" quantizes the linear layers when the model is loaded; a block format of
        llama.cpp, such as "q8_0", or a mix, such as "q4_k_m", all matrices. The answers are those of the quantized
        model. `llm.quantized` reports on the layers.
    activations: "int8" (default) or "int16", what inputs are rounded to on a CPU before they are multiplied with
        weights in blocks. "int16" takes as long as twice the rows.
    kv_cache_dtype: "int8" (CPU) or "fp8": cached keys and values of half the bytes, and the answers of such a cache.
    experts_in: "disk": packed experts are in a temporary file of the cache, and read as they are used. "auto" and None:
        where a model is larger than the available memory; else in "memory".
    profile: a file of `paceline tune`: `CostModel` starts from it, and its drafter is used unless one is given.
    dtype, device: as in torch; None and "auto" take the checkpoint's dtype, None a GPU if there is one.
    tokenizer: an object, or the folder or hub id of one; None: the model's. A loaded model has none by itself.
    processor: for a loaded vision-language model.
    mmproj: the GGUF file of the vision projector, for a GGUF file of its language model.
    max_num_seqs: sequences at the same time, 1 to 4096. max_model_len: tokens of each; None: the model's context.
    kv_cache_memory_bytes: memory of keys and values, which sequences share in turns; None: what is free.
    prefix_cache_bytes: memory of the prefix cache, whose keys and values later prompts with the same beginning reuse.
        0: off; None: 1 GiB, for prompts with images only. An `AsyncLLM` caches all prompts.
    adapters: folders of LoRA adapters by name, as of `add_adapter`; at most max_loras at the same time.
    seed: for the seeds of requests that have none, in their order; None: they are drawn at random.
    generation_config: "auto" takes the sampling options of the model's generation_config.json where a call gives none;
        "vllm" and None: those of `SamplingParams`.
    revision, token: of a hub id. cache_dir: the folder for downloads.
    allow_lossy: permit verifiers that change the distribution of the answers.
    trust_remote_code: run Python code that comes with the model.

    Of vLLM's other arguments, those that change nothing here are logged, and the rest is refused (`vllm_options`).

    Raises `ConfigError` for wrong arguments, `IncompatibleModels` where the draft does not fit the model or the model
    cannot verify trees, `NumericsError` where "invariant" is impossible, and `LossyNotAllowed`.
    """

    @checked_call
    def __init__(
        self,
        model: str | Path | PreTrainedModel | LoadedModel,
        *,
        drafter: Drafter | str | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        policy: DraftPolicy | None = None,
        verifier: Verifier | None = None,
        numerics: Numerics | None = None,
        weights: Weights | None = None,
        activations: Activations | None = None,
        kv_cache_dtype: Literal["auto", "int8", "fp8"] | None = None,
        experts_in: ExpertsIn | None = None,
        profile: str | PathLike[str] | None = None,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        processor: ProcessorMixin | None = None,
        mmproj: str | Path | None = None,
        max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 8,
        max_model_len: Annotated[int, Field(ge=1)] | None = None,
        kv_cache_memory_bytes: Annotated[int, Field(ge=1)] | None = None,
        prefix_cache_bytes: Annotated[int, Field(ge=0)] | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        max_loras: Annotated[int, Field(ge=1, le=MAX_LORAS)] = 16,
        seed: int | None = None,
        generation_config: Literal["auto", "vllm"] | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        allow_lossy: bool = False,
        trust_remote_code: bool = False,
    ):
        if drafter is not None and speculative_config is not None:
            raise ConfigError("drafter and speculative_config both name a drafter", fix="give one of them")
        named = drafter if isinstance(drafter, str) else speculative_config
        self._config = None if named is None else parse(named)
        check_lossy(verifier, allow_lossy)
        hub = {"revision": revision, "token": token, "cache_dir": cache_dir}
        loaded = open_model(model, dtype, device, tokenizer, processor, mmproj, hub, trust_remote_code, experts_in)
        self.loaded, self.quantized = rounded(loaded, weights, activations, kv_cache_dtype)
        self.runner = make_runner(self.loaded, max_num_seqs, max_model_len, numerics and numerics == "invariant")
        if kv_cache_memory_bytes is not None:
            self.runner.cache.limit(kv_cache_memory_bytes)
        if prefix_cache_bytes is not None:
            self.runner.prefixes.resize(prefix_cache_bytes)
        self._take(adapters or {}, max_loras)
        self._measured = None
        if profile is not None:
            tuned = load_tuned(str(profile))
            self._measured = tuned.profile
            for warning in check_profile(self._measured, self.loaded):
                warnings.warn(warning, stacklevel=2)
            self._config = self._config or (tuned.config if drafter is None else None)
        if self._config is not None:
            drafter, chosen_policy, chosen_verifier = self._config.build(allow_lossy, self._measured)
            policy, verifier = policy or chosen_policy, verifier or chosen_verifier
        assert not isinstance(drafter, str)
        vision = self.loaded.vision
        self.tokenizing = threading.RLock() if vision is None else vision.tokenizing
        self._count, self._draw = itertools.count(), secrets.randbits if seed is None else Random(seed).getrandbits
        self._default = default_params(self.loaded.model.generation_config if generation_config == "auto" else None)
        self._speculate(drafter, policy, verifier or Coupled())
        return_free_memory()

    def _speculate(self, drafter: Drafter | None, policy: DraftPolicy | None, verifier: Verifier) -> None:
        if policy is None:
            policy = Fixed(0) if drafter is None else CostModel(profile=self._measured)
        self.verifier, self._stats = verifier, EngineStats()
        self.decoder = SpeculativeDecoder(self.runner, drafter or Plain(), verifier, policy)
        if isinstance(policy, CostModel) and drafter is not None:
            policy.measure(self.runner.max_length)

    @checked_call
    def using(
        self,
        *,
        drafter: Drafter | str | EllipsisType | None = ...,
        policy: DraftPolicy | None = None,
        verifier: Verifier | None = None,
        allow_lossy: bool = False,
    ) -> "LLM":
        """An `LLM` on the same weights, cache and lock with another drafter, policy or verifier.

        What is left out stays as it is, and a policy begins anew. drafter: as in `LLM`; None decodes plainly, by
        `Coupled` unless the verifier is exact or given. A name with "num_speculative_tokens" brings its policy, and a
        drafter for a plain LLM gets `CostModel()`. A drafter of another kind of verifier, exact or not, is made again
        by its name.

        Raises what `LLM` raises, and `ConfigError` for a drafter that serves another kind of verifier and has no name.
        """
        check_lossy(verifier, allow_lossy)
        other, kept = copy.copy(self), None if isinstance(self.decoder.drafter, Plain) else self.decoder.drafter
        fresh = copy.copy(self.decoder.policy) if kept else None  # its state is bound to the drafter
        if isinstance(drafter, str):
            config = other._config = parse(drafter)
            drafter, its_policy, its_verifier = config.build(allow_lossy, self._measured)
            fresh = its_policy if config.policy != "cost_model" else fresh
            verifier = verifier or (None if config.rejection_sample_method == "exact" else its_verifier)
            drafter = None if isinstance(drafter, Plain) else drafter
        elif drafter is ... and self._config and verifier and verifier.exact != self.verifier.exact:
            drafter = self._config.build(allow_lossy, self._measured)[0]
        elif drafter is not ...:
            other._config = None
        chosen = kept if drafter is ... else drafter
        if chosen is None:
            fresh, verifier = None, verifier or (self.verifier if self.verifier.exact else Coupled())
        other._speculate(chosen, policy or fresh, verifier or self.verifier)
        return other

    def plain(self) -> "LLM":
        """`using(drafter=None)`: the baseline for comparisons."""
        return self.using(drafter=None)

    @property
    def numerics(self) -> str:
        """The numerics in use: "invariant" or "fast"."""
        return self.runner.numerics

    @property
    def drafters(self) -> tuple[str, ...]:
        """The names of its drafters, as in results and in `SamplingParams.extra_args["method"]`."""
        return self.decoder.drafters

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer. Raises `ConfigError` where it has none."""
        return tokenizer_of(self.loaded)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The same as `tokenizer`."""
        return self.tokenizer

    def get_metrics(self) -> list[Counter | Vector]:
        """Counts of the work of this LLM, by vLLM's names. An `AsyncLLM` has `stats()`."""
        return self._stats.metrics()

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache."""
        with self.runner.fair_lock():
            self.runner.prefixes.shrink(self.runner.prefixes.num_bytes)
        return True

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            instead = INSTEAD["an attribute of LLM"].get(name)
            fix = f" Fix: {instead}." if instead else ""
            raise AttributeError(f"LLM has no {name!r}.{fix}", name=name, obj=self)

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of calls without any, see `generation_config`."""
        return self._default

    @checked_names
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: Sequence[int] | None = None,
        return_exceptions: bool = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one prompt or many; results are in the order of the prompts.

        prompts: each a string to continue, a chat, or token ids: a list or array, {"prompt": ...},
            {"prompt_token_ids": ...}, or what a tokenizer returns. A chat is a list of messages whose content is text,
            or a list of {"type": "text", "text": ...} and {"type": "image", "image": ...}. {"prompt": ...,
            "multi_modal_data": {"image": one or a list}}: text with the processor's placeholder for each image.
        sampling_params: one for all, or one for each prompt. Default: `get_default_sampling_params()`.
        use_tqdm: show a progress bar.
        params: the same as sampling_params.
        priority: of each prompt; lower ones are answered first.
        return_exceptions: as in `asyncio.gather`: an error that concerns one prompt is returned in the place of its
            result, and the others are answered. Else the first one is raised.
        lora_request: the adapter of all prompts, or of each; the same as "adapter" in `SamplingParams.extra_args`.

        All prompts are read before the first is answered. Where images take more than 1 GiB, those of later prompts are
        read again when they are needed, and must not have changed. Calls from several threads run one after the other.
        Raises `ConfigError` for prompts or parameters that cannot be used, `CacheFull` where a prompt does not fit.
        """
        many = as_list(prompts)
        each = self._options(len(many), sampling_params, params, lora_request, priority)
        openings = [partial(self.open_request, prompt, options) for prompt, options in zip(many, each, strict=True)]
        num_answers = sum(options.n for options in each)
        return answer_all(self.decoder, openings, self._stats, num_answers, use_tqdm, return_exceptions)

    @checked_names
    def chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        return_exceptions: bool = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one chat or many, with options of the chat template; without options it is `generate`.

        chat_template: instead of the model's. continue_final_message: the answer continues the last message; needs
            add_generation_prompt=False. tools: functions in JSON Schema. chat_template_kwargs: further variables of the
            template, for example {"enable_thinking": False}. return_exceptions, lora_request: see `generate`.

        Raises what `generate` raises, and `ConfigError` for options that the template does not use.
        """
        given = {"chat_template": chat_template, "continue_final_message": continue_final_message, "tools": tools}
        options = {"add_generation_prompt": add_generation_prompt} | {name: one for name, one in given.items() if one}
        chats = [TemplatedChat(chat, {**(chat_template_kwargs or {}), **options}) for chat in as_chats(messages)]
        how: dict[str, Any] = {"use_tqdm": use_tqdm, "return_exceptions": return_exceptions}
        return self.generate(chats, sampling_params, lora_request=lora_request, **how)

    @checked_names
    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[StreamChunk]:  # fmt: skip
        """Answer one prompt and yield a chunk after every round; the last one has the `Completion`.

        It holds one of the `max_num_seqs` slots until it ends or is closed. Other calls, from any thread, may run
        between its rounds. Raises what `generate` raises, and `ConfigError` for `n` > 1.
        """
        (params,) = self._options(1, sampling_params, params, lora_request)
        if params.n != 1:
            raise ConfigError("a stream has one answer", got=f"n={params.n}", fix="use generate for n > 1")
        if params.prompt_logprobs is not None:
            raise ConfigError("a stream has no prompt_logprobs", fix="use generate")
        return stream(self.decoder, self.open_request(prompt, params), self._stats)

    def encode(self, prompt: Prompt, *, check: Callable[[], None] = lambda: None) -> list[int]:
        """Token ids of a prompt; a chat goes through the model's template. Raises `ConfigError` for an empty one.

        check: called again and again while images are read; an error that it raises ends that.
        """
        return self._read(prompt, check)[0]

    def draw_seed(self, params: SamplingParams) -> int:
        """The seed of a request, or the next one for those that have none."""
        return params.seed if params.seed is not None else self._draw(SEED_BITS)

    def open_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        *,
        seed: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Request:
        """Tokenize a prompt and make the sequences of its answers; the model may run at the same time.

        seed: of `draw_seed`. check: see `encode`. Raises what `generate` raises.
        """
        check_drafting(self.decoder, params)
        seed = self.draw_seed(params) if seed is None else seed
        request_id, read = request_id or str(next(self._count)), self._read(prompt, check)
        with self.tokenizing:
            return open_request(self.decoder, prompt, read, params, seed, request_id)

    def _read(self, prompt: Prompt, check: Callable[[], None]) -> ReadPrompt:
        """The tokens of a prompt. Others need not wait for images: only their tokenizer is locked."""
        with nullcontext() if holds_images(prompt) else self.tokenizing:
            return encode(self.runner, prompt, check)
