"""A smaller model drafts a chain.

Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318).
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, final

import torch
from pydantic import Field
from torch import Tensor

from ...core.draft import Draft
from ...core.interfaces import DraftBudget, Drafter, DrafterInfo, DraftOptions, MakeDecoder, Target, Verifier
from ...core.request import TokenSequence
from ...core.walk import Walk
from ...errors import ConfigError, IncompatibleModels
from ...quant.linears import Weights
from ...sampling.draft_sampler import DraftSampler
from ...schema import checked, checked_call
from ...target.loaded import LoadedModel
from ...zoo import resolve
from ..spec import DrafterSpec, from_short_name, spec_class, vllm_flag
from ..suffix.drafter import Suffix
from .chain import Chains, Runner
from .vision import DraftPrompt, VisionMode, vision_of_draft
from .vocabularies import Translation, VocabularyMode, translation

_FEW = 8
"""Up to this many uncached tokens are part of the first drafting pass; more are prefilled before."""


@final
class DraftModel(Drafter):
    """Draft with another model: a folder, a hub id, a name that `paceline models` lists, or one already loaded.

    dtype, device: the draft's dtype and device; None takes the target's, and leaves the blocks of a GGUF file packed.
    weights: "int8" or "int4" quantises the draft when it is loaded. It is then faster, with a little less acceptance.
    vision: how it handles images: "own" (its own processor and tower), "shared" (the target's features, or the target's
        tower with its own projector), "pooled" (one embedding an image, the mean of the target's features) or "none"
        (it gets the text only). None is "own" if both models have vision, else "none".
    vocabulary: how a draft with another tokenizer is used (see `vocabularies`): "intersection" (it drafts the
        tokens that both have), "strings" (the text it drafts is encoded again with the target's tokenizer), or "auto",
        which decides in each round by how much of the text is in the intersection.
    inner_drafter: drafts for the draft model, which then needs fewer passes for the same draft. It must follow a text
        quickly: lookup, suffix decoding, or a head of the draft model that reads a window. A draft model with another
        tokenizer then drafts by strings.
    """

    name: ClassVar[str] = "draft_model"
    info = DrafterInfo(drafts_during_prefill=True)  # it has a cache of its own

    @checked_call
    def __init__(
        self,
        model: str | Path | LoadedModel,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        weights: Weights | None = None,
        vision: VisionMode | None = None,
        vocabulary: VocabularyMode = "auto",
        inner_drafter: Drafter | None = None,
    ):
        if inner_drafter is not None and vocabulary == "intersection":
            fix = 'vocabulary="strings"'
            raise ConfigError("a draft model with a drafter of its own cannot draft by intersection", fix=fix)
        if isinstance(inner_drafter, Suffix) and inner_drafter.answers is not None:
            fix = "leave answers out"
            raise ConfigError("the drafter of a draft model sees drafts, no answers that it could keep", fix=fix)
        self.inner_drafter = inner_drafter
        self._model, self._dtype, self._device = model, dtype, device
        self._vision: VisionMode | None = vision
        self._vocabulary: VocabularyMode = vocabulary
        self._prompts: dict[int, DraftPrompt] = {}  # by slot
        self._weights: Weights | None = weights
        self.translation: Translation | None = None

    def bind(self, target: Target, verifier: Verifier) -> None:
        """Load the draft model. Raises `IncompatibleModels` if it cannot draft for the target."""
        model = self._model if isinstance(self._model, LoadedModel) else resolve(self._model)
        dtype = self._dtype or (target.loaded.dtype if self._weights else None)  # blocks are not quantised again
        loaded: LoadedModel = target.open_model(model, dtype, self._device)
        mode: VocabularyMode = self._vocabulary if self.inner_drafter is None else "strings"
        self.translation = translation_of(target.loaded, loaded, mode)
        if self.inner_drafter is not None and target.loaded.vision is not None:
            message = "a draft model with a drafter of its own cannot draft for a vision-language model"
            raise IncompatibleModels(message, fix="leave inner_drafter out")
        if self.translation is not None and self._vision in ("shared", "pooled"):
            raise IncompatibleModels("a draft with another tokenizer cannot use images", fix='vision="none"')
        if loaded.model is target.loaded.model:
            raise IncompatibleModels("the draft is the target itself", fix="draft with a smaller model, or none")
        if self._weights is not None:
            loaded = target.open_model(loaded, weights=self._weights)
        self._draft_vision = vision_of_draft(self._vision, target, loaded)
        loaded = self._draft_vision.loaded
        self.runner: Runner = target.run_model(loaded)
        sampler = DraftSampler(verifier.exact, target.banned_token_ids | self.runner.banned_token_ids)
        self.chains = Chains(self.runner, sampler, target.vocab_size, self.name)
        self._prompts.clear()

    def bind_inner(self, decoder: MakeDecoder) -> None:
        if self.inner_drafter is not None and self.chains.decoder is None:
            self.chains = replace(self.chains, decoder=decoder(self.runner, self.inner_drafter))

    def seconds(self) -> Mapping[str, tuple[float, float]]:
        """A pass of the draft over one token, and its prefill per token."""
        return {self.name: (self.runner.pass_seconds(1), self.runner.prefill_seconds())}

    def draft_options(self, seq: TokenSequence) -> Sequence[DraftOptions]:
        """`uncached_tokens` are at most a chunk; the hint is -1 once the draft's context is full."""
        length = len(seq.token_ids)
        if seq.slot in self._prompts or length >= self.runner.max_length:  # else no need to process images for it
            length = len(self._text(seq))
        if self.runner.max_length <= length:
            return (DraftOptions(self.name, hint=-1),)
        uncached_tokens = min(length - 1 - self.runner.cache.lengths[seq.slot], self.runner.chunk)
        return (DraftOptions(self.name, uncached_tokens=uncached_tokens),)

    def propose(self, seqs: Sequence[TokenSequence], budgets: Sequence[DraftBudget]) -> Draft:
        """Cache what was emitted since the last round, then draft. Rows beyond the draft's context get no draft."""
        limits, uncached_tokens = self._catch_up(seqs, budgets)
        if self.translation is None:
            return self.chains.draft(seqs, limits, uncached_tokens)
        return self.translation.draft(self.chains, seqs, limits, uncached_tokens)

    def _catch_up(
        self, seqs: Sequence[TokenSequence], budgets: Sequence[DraftBudget]
    ) -> tuple[list[DraftBudget], list[list[int]]]:
        """Cache new text; returns budgets limited to the draft's context, and the few tokens left for the first pass.

        Rows of depth 0 are skipped. A round prefills one chunk in all, so that a long prompt delays others no more than
        the target's prefill does; until its prompt is cached, a row drafts nothing.
        """
        runner, uncached_tokens, limits = self.runner, list[list[int]](), list[DraftBudget]()
        most = runner.chunk
        for seq, budget in zip(seqs, budgets, strict=True):
            text = self._text(seq)
            room = runner.max_length - len(text)
            depth = max(0, min(budget.depth, room))
            depth *= runner.cache.can_hold(len(text) + depth)
            if depth:
                most -= self._prefill(seq, text, most)
                depth = depth if len(text) - runner.cache.lengths[seq.slot] <= _FEW else 0
            limits.append(replace(budget, depth=depth))
            uncached_tokens.append(text[runner.cache.lengths[seq.slot] :] if depth else [])
        return limits, uncached_tokens

    def observe(self, seqs: Sequence[TokenSequence], draft: Draft, logits: Tensor, walks: Sequence[Walk]) -> None:
        """Drop rejected tokens: what stays cached is a prefix of the text without its last token."""
        for seq in seqs:
            if cached := self.runner.cache.lengths[seq.slot]:
                text = self._text(seq)
                same = len(text) if self.translation is None else self.translation.num_unchanged(seq.slot)
                self.runner.cache.truncate(seq.slot, min(cached, same, len(text) - 1))

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.runner.cache.truncate(slot, 0)
            self._prompts.pop(slot, None)
            if self.translation is not None:
                self.translation.release(slot)
            if self.chains.decoder is not None:
                self.chains.decoder.reset_slot(slot)

    def _text(self, seq: TokenSequence) -> list[int]:
        """The text in the draft's tokens."""
        if seq.slot not in self._prompts:
            self._prompts[seq.slot] = self._draft_vision.read(seq, self.runner)
        text, most = self._prompts[seq.slot].text(seq.token_ids), self.runner.vocab_size
        if self.translation is not None:
            return self.translation.read(seq.slot, text)
        return text if most >= self.chains.vocab_size else [token if token < most else 0 for token in text]

    def _prefill(self, seq: TokenSequence, text: list[int], most: int) -> int:
        """Cache up to `most` tokens if many are missing, or a whole prompt with images; returns how many."""
        runner, slot, vision = self.runner, seq.slot, self._prompts[seq.slot].vision
        cached = runner.cache.lengths[slot]
        if cached == 0 or (vision is not None and cached < min(vision.edge, len(text) - 1)):
            cached = 0
            runner.cache.truncate(slot, 0)
            runner.set_offset(slot, vision)
        if cached == 0 and vision is not None:
            runner.prefill(slot, text, vision, seq.params.tenant)
        elif len(text) - cached > _FEW:
            runner.extend_cache(slot, text[cached : min(cached + max(most, 0), len(text) - 1)])
        return runner.cache.lengths[slot] - cached


@checked
class DraftModelSpec(DrafterSpec):
    """Options of `DraftModel`."""

    model: Annotated[str, Field(min_length=1)]
    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] | None = None
    weights: Literal["int8", "int4"] | None = None
    vision: VisionMode | None = None
    vocabulary: VocabularyMode | None = None
    inner_drafter: str | None = None
    method = "draft_model"
    drafter = DraftModel
    needs: ClassVar[Mapping[str, str]] = {"model": "a folder, a hub id or a name of the zoo"}

    @property
    def name(self) -> str:
        weights = f"@{self.weights}" if self.weights else ""
        rest = {"vision": self.vision, "vocabulary": self.vocabulary, "inner_drafter": self.inner_drafter}
        return f"model:{self.model}{weights}" + "".join(f",{key}={value}" for key, value in rest.items() if value)

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model,)

    def build(self) -> Drafter:
        options = {key: value for key, value in self.as_dict().items() if value is not None}
        if self.inner_drafter is not None:
            keys = from_short_name(self.inner_drafter)
            options["inner_drafter"] = spec_class(str(keys.pop("method"))).read(keys).build()
        return self.drafter(**options)

    def elsewhere(self, tokens: int) -> dict[str, tuple[str, str]]:
        """In vLLM "draft_model", in SGLang STANDALONE, which counts the root, in llama.cpp "draft-simple"."""
        rounded = f"that is {self.weights.upper()} already" if self.weights else ""
        sglang = (
            f"--speculative-algorithm STANDALONE --speculative-draft-model-path {shlex.quote(self.model)} "
            f"--speculative-num-steps {tokens} --speculative-eagle-topk 1 --speculative-num-draft-tokens {tokens + 1}"
        )
        file = f"draft.gguf: {self.model} converted" + {"int8": ", Q8_0", "int4": ", Q4_0", None: ""}[self.weights]
        vllm = vllm_flag(method=self.method, num_speculative_tokens=tokens, model=self.model)
        return {
            "vLLM": (vllm, rounded and f"name a checkpoint of the draft {rounded}"),
            "SGLang": (sglang, rounded and f"name a draft {rounded}"),
            "llama.cpp": llama_cpp_draft("draft.gguf", tokens, file),
        }


def llama_cpp_draft(file: str, tokens: int, remark: str) -> tuple[str, str]:
    """Flags of llama.cpp for a draft model in a file, and the remark with the flags of older builds."""
    flags = f"--spec-type draft-simple -md {file} --spec-draft-n-max {tokens} --spec-draft-n-min 1"
    return flags, f"{remark}; older builds: --draft-max, --draft-min"


def translation_of(target: LoadedModel, draft: LoadedModel, mode: VocabularyMode) -> Translation | None:
    """None if the tokenizers are the same. Raises `IncompatibleModels` if tokens cannot be translated."""
    try:
        return check_same_tokenizer(target, draft)
    except IncompatibleModels:
        if target.tokenizer is None or draft.tokenizer is None:
            raise
        return translation(mode, target, draft)


def check_same_tokenizer(target: LoadedModel, draft: LoadedModel) -> None:
    """Compare the token strings, so that vocabularies padded to different sizes still match."""
    if target.tokenizer is None or draft.tokenizer is None:
        if target.vocab_size != draft.vocab_size:
            raise IncompatibleModels(
                "the vocabularies differ in size and there is no tokenizer to compare",
                got=f"draft {draft.vocab_size}, target {target.vocab_size}",
            )
        return
    target_vocab, draft_vocab = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    differing = [token for token, index in draft_vocab.items() if target_vocab.get(token, index) != index]
    missing = [token for token in draft_vocab if token not in target_vocab]
    if differing or len(missing) > 0.01 * len(draft_vocab):
        example = (differing or missing)[0]
        raise IncompatibleModels(
            f"{draft.name} and {target.name} have different tokenizers",
            got=f"{len(differing)} tokens under other ids, {len(missing)} unknown ones, for example {example!r}",
            expected="the same token strings under the same ids",
            fix="take a draft of the target's own family",
        )
