"""Speculative decoding in transformers' `generate`, for a loaded model.

hf_model(model).generate(**inputs, streamer=streamer)                every call, with all arguments
model.generate(**inputs, custom_generate=generate, drafter="lookup") one call, with those that transformers passes on
"""

import copy
import functools
import inspect
import logging
import types
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar, cast, final

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation.stopping_criteria import MaxLengthCriteria, StopStringCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..core.interfaces import Drafter
from ..core.request import SamplingParams
from ..engine.request import Request
from ..engine.scheduler import run
from ..errors import ConfigError
from ..hf.load import KV_CACHE
from ..hf.vision import is_vlm
from ..llm import LLM
from ..methods.draft_model.drafter import DraftModel
from ..methods.lookup import PromptLookup
from ..policy import Fixed
from ..schema import brief, checked_call
from ..target import wrap_model

_Model = TypeVar("_Model", bound=PreTrainedModel)
_LOG = logging.getLogger("paceline")
_OF_ASSISTANTS = "assistant_confidence_threshold assistant_lookbehind target_lookbehind num_assistant_tokens_schedule"
"""transformers reads these from the config of the assistant."""
_REFUSED = {
    "num_beams num_beam_groups diversity_penalty constraints force_words_ids": (
        "beam search keeps several answers, and drafts are of one: num_beams=1"
    ),
    "output_scores output_logits": "LLM.generate with SamplingParams(logprobs=...) gives log-probabilities",
    "output_attentions output_hidden_states guidance_scale negative_prompt_ids negative_prompt_attention_mask "
    "dola_layers penalty_alpha low_memory token_healing remove_invalid_values position_ids synced_gpus": (
        "transformers' own generate does that"
    ),
    "cache past_key_values cache_params cache_implementation cache_config": "leave it out: the engine has a cache",
    f"use_mtp speculation_type is_assistant assistant_early_exit assistant_ensemble_weight {_OF_ASSISTANTS}": (
        "drafter=... says how to draft, num_assistant_tokens=... how much"
    ),
    "pixel_values pixel_values_videos image_patches mm_encoder_outputs": "LLM(...).chat reads images",
    "inputs_embeds": "give token ids",
    "custom_generate": "leave it out: this generate is one",
}
"""What to do instead of each."""
_DEFAULTS = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "guidance_scale"), 1),
    **dict.fromkeys(("assistant_lookbehind", "target_lookbehind"), 10),
    "assistant_confidence_threshold": 0.4,
    "num_assistant_tokens_schedule": "constant",
    "cache_implementation": "dynamic",
}
"""Values of these that are not refused, besides 0 and False: transformers fills them in."""
_DEFAULT_DEPTH = 20
"""transformers' num_assistant_tokens: with it the policy decides."""
_PREPARED = ("position_ids", "logits_to_keep", "use_cache", KV_CACHE)
"""What transformers prepares for its own passes; the cache is the engine's."""
_engines: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[object, LLM]]" = weakref.WeakKeyDictionary()


class _Kept(NamedTuple):
    """Arguments that transformers keeps from a custom_generate, and the drafter."""

    drafter: Drafter | str | None
    tokenizer: PreTrainedTokenizerBase | None
    assistant_model: PreTrainedModel | None
    assistant_tokenizer: PreTrainedTokenizerBase | None
    streamer: BaseStreamer | None


@checked_call
def hf_model(
    model: _Model, *, drafter: Drafter | str | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> _Model:
    """The model with a `generate` that decodes speculatively, see `paceline.integrations.custom_generate.generate`.

    It shares everything else with `model`, which does not change. drafter, tokenizer: for calls that give none.
    """
    wrapped: Any = copy.copy(model)
    wrapped.generate = types.MethodType(functools.partial(generate, drafter=drafter, tokenizer=tokenizer), wrapped)
    return wrapped


def generate(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    *,
    drafter: Drafter | str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_model: PreTrainedModel | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
    streamer: BaseStreamer | None = None,
    stop_strings: str | list[str] | None = None,
    **kwargs: Any,
) -> Any:
    """Token ids [B, L] of prompts and answers, as `model.generate` returns them, which prepares the arguments.

    drafter: as in `LLM`; None: assistant_model or prompt_lookup_num_tokens, else "lookup".
    tokenizer: for stop_strings, for an assistant_tokenizer, and for drafters that need text.
    streamer: gets each token, for one row only. It is ended also by an error.

    As a custom_generate it does not get tokenizer, assistant_model, assistant_tokenizer, streamer and stop_strings,
    which are then refused: call it directly or by `hf_model`.

    Greedy answers are those of transformers up to near-ties, which are rare in float32; sampled ones follow the same
    distribution, with other random numbers.

    Up to eight rows are decoded at the same time. An engine is kept for each model, and replaced when its weights or
    the drafter change. Raises `ConfigError` for options that are not supported, and what `LLM` raises.
    """
    kept = _Kept(drafter, tokenizer, assistant_model, assistant_tokenizer, streamer)
    try:
        if hasattr(generation_config, "_eos_token_tensor"):  # called by transformers, which has prepared it
            _check_kept(stop_strings)
            return _decode(model, inputs, generation_config, logits_processor, stopping_criteria, kept, **kwargs)
        _check(kwargs)
        _check({} if generation_config is None else vars(generation_config))
        bare: Any = copy.copy(model)
        bare._is_stateful = False  # for drafts named as in transformers, which it refuses for recurrent layers
        configs = [config for config in (generation_config, model.generation_config) if config is not None]
        texts = [text for text in (stop_strings, *(config.stop_strings for config in configs)) if text is not None]
        if texts:
            if tokenizer is None:
                raise ConfigError("stop_strings need a tokenizer", fix="pass tokenizer=...")
            by_text = StopStringCriteria(tokenizer, texts[0])
            stopping_criteria = StoppingCriteriaList([*(stopping_criteria or ()), by_text])
            # without the texts, for which transformers would ask for the tokenizer
            bare.generation_config = _without_texts(model.generation_config)
            generation_config = generation_config and _without_texts(generation_config)

        def drafts(_: object, input_ids: Tensor, **prepared: Any) -> Any:
            return _decode(model, input_ids, **prepared, kept=kept)

        options = {"generation_config": generation_config, "logits_processor": logits_processor}
        options |= {"stopping_criteria": stopping_criteria, **kwargs}
        options = {name: value for name, value in options.items() if value is not None}
        return cast("Any", type(model)).generate(bare, inputs, custom_generate=drafts, **options)
    finally:
        if streamer is not None:
            streamer.end()


def _decode(
    model: PreTrainedModel,
    input_ids: Tensor | None,
    generation_config: GenerationConfig | None,
    logits_processor: LogitsProcessorList | None,
    stopping_criteria: StoppingCriteriaList | None,
    kept: _Kept,
    attention_mask: Tensor | None = None,
    **prepared: Any,
) -> Any:
    """What `generate` returns, for arguments that transformers has prepared."""
    assert input_ids is not None
    assert generation_config is not None
    _check(vars(generation_config))
    _check_inputs(model, input_ids, attention_mask, prepared)
    streamer, count = kept.streamer, len(input_ids)
    if streamer is not None and count > 1:
        raise ConfigError("a streamer takes one answer", got=f"{count} rows", fix="give one row")
    pad = cast("Tensor | None", generation_config._pad_token_tensor)
    if count > 1 and pad is None and any(not isinstance(ends, MaxLengthCriteria) for ends in stopping_criteria or ()):
        raise ConfigError("rows that end alone are padded, and there is no padding token", fix="pass pad_token_id=...")
    llm, depth = _engine(model, kept, generation_config), _num_assistant_tokens(kept, generation_config)
    requests = list[Request]()
    for row, ids in enumerate(input_ids):
        num_pads = 0 if attention_mask is None else int((attention_mask[row] == 0).sum())
        params = _params(input_ids, row, num_pads, logits_processor, generation_config, depth)
        request = llm.open_request(ids[num_pads:].tolist(), params)
        request.seqs[0].stops = _Criteria(input_ids, row, stopping_criteria) if stopping_criteria else None
        requests.append(request)
    seqs = [request.seqs[0] for request in requests]
    if streamer is not None:
        streamer.put(input_ids.cpu())
    with llm.runner.fair_lock():
        for _ in run(llm.decoder, requests):
            if streamer is not None:
                for token in seqs[0].output_ids[-seqs[0].rounds[-1].num_emitted :]:
                    streamer.put(torch.tensor([token]))
    if any(seq.finish_reason == "length" and seq.num_output < seq.params.most_tokens for seq in seqs):
        _LOG.warning("An answer ends at the model's context of %d tokens, before max_length.", llm.runner.max_length)
    rows = [torch.cat([ids, ids.new_tensor(seq.output_ids)]) for ids, seq in zip(input_ids, seqs, strict=True)]
    padding = 0.0 if pad is None else float(pad.flatten()[0])
    sequences = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=cast("Any", sequences))
    return sequences


def _params(
    batch: Tensor,
    row: int,
    num_pads: int,
    processors: LogitsProcessorList | None,
    config: GenerationConfig,
    depth: int | None,
) -> SamplingParams:
    """The options of one row. Processors see the padding too, as in transformers.

    Processors may know each row of the batch by its place: they are given the row in every place.
    """
    ids, count = batch[row], len(batch)
    if isinstance(config.watermarking_config, SynthIDTextWatermarkingConfig):  # which remembers the text
        processors = copy.deepcopy(processors)

    def process(text: Tensor, scores: Tensor) -> Tensor:
        padded = torch.cat([ids[None, :num_pads].to(text.device), text], 1)
        return cast("Any", processors)(padded.repeat(count, 1), scores.repeat(count, 1))[row : row + 1]

    eos = config.eos_token_id
    return SamplingParams(
        temperature=1.0 if config.do_sample else 0.0,  # transformers' warpers are among the processors
        max_tokens=max(1, int(config.max_length or 0) - len(ids)),
        stop_token_ids=[eos] if isinstance(eos, int) else eos,
        ignore_eos=True,
        seed=int(torch.randint(2**62, ())),  # torch.manual_seed and set_seed decide
        logits_processors=(process,) if processors else (),
        detokenize=False,
        extra_args=None if depth is None else {"num_speculative_tokens": depth},
    )


@final
class _Criteria:
    """The stopping criteria as `Sequence.stops`; as processors, they see the whole row in every place."""

    stop_hit = None

    def __init__(self, batch: Tensor, row: int, criteria: StoppingCriteriaList):
        self._ids, self._row, self._count, self._criteria = batch[row], row, len(batch), criteria

    def feed(self, token: int) -> bool:
        self._ids = torch.cat([self._ids, self._ids.new_tensor([token])])
        return bool(cast("Any", self._criteria)(self._ids.repeat(self._count, 1), None)[self._row])

    def would_stop(self, token_ids: list[int]) -> bool:
        """Criteria may keep a state: they are asked only for tokens that are certain."""
        return False


def _check(asked: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an option that is refused."""
    for name, fix in ((name, fix) for names, fix in _REFUSED.items() for name in names.split()):
        value = asked.get(name)
        is_plain = isinstance(value, bool | int | float | str)
        if value is not None and not (is_plain and value in (0, _DEFAULTS.get(name, 0))):
            raise ConfigError(f"drafts do not go with {name}", got=brief(value), fix=fix)


def _check_kept(stop_strings: object) -> None:
    """Raise `ConfigError` for an argument of the calling `model.generate` that it does not pass on."""
    asked = {**_arguments_of_transformers(), "stop_strings": stop_strings, "custom_generate": None}
    for name in (*_Kept._fields[1:], "stop_strings"):
        if asked.get(name) is not None:
            if (streamer := asked.get("streamer")) is not None:
                streamer.end()  # who reads it from another thread would wait for ever
            fix = "use paceline.hf_model(model).generate(...), without custom_generate"
            raise ConfigError(f"transformers does not pass {name} to a custom_generate", fix=fix)
    _check(asked)


def _arguments_of_transformers() -> dict[str, Any]:
    """The arguments of the `generate` of transformers that is running, by their names."""
    frame, code = inspect.currentframe(), inspect.unwrap(cast("Any", GenerationMixin).generate).__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None or frame.f_back is None:
        return {}
    named = code.co_varnames[: code.co_argcount]
    keywords = frame.f_back.f_locals.get("kwargs", {})  # of its decorator: it has taken some of its own
    return {**keywords, **{name: frame.f_locals[name] for name in named}}


def _check_inputs(model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None, others: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for inputs other than ids with left padding, and for those that would change the answer."""
    if mask is not None:
        if mask.shape != input_ids.shape:
            got, expected = tuple(mask.shape), tuple(input_ids.shape)
            raise ConfigError("attention_mask and input_ids differ in shape", got=got, expected=expected)
        if bool((mask.long().diff(dim=1) < 0).any()):
            raise ConfigError("a row has padding behind or inside", fix='make the tokenizer with padding_side="left"')
    for name, value in others.items():
        is_text = is_vlm(model.config) and (value == {} or (name.endswith("token_type_ids") and not bool(value.any())))
        if value is not None and name not in _PREPARED and not is_text:
            raise ConfigError(f"{name} is not read here", got=brief(value), fix="leave it out")


def _without_texts(config: GenerationConfig) -> GenerationConfig:
    copied = copy.copy(config)
    copied.stop_strings = None
    return copied


def _num_assistant_tokens(kept: _Kept, config: GenerationConfig) -> int | None:
    """How many tokens to draft; None: the policy decides. As in transformers, the assistant's own config goes first."""
    own = None if kept.assistant_model is None else kept.assistant_model.generation_config
    number = (own and own.num_assistant_tokens) or config.num_assistant_tokens
    return None if number == _DEFAULT_DEPTH else number


def _engine(model: PreTrainedModel, kept: _Kept, config: GenerationConfig) -> LLM:
    """An engine on the model as it is now, kept for the next call."""
    drafter, tokenizer, assistant, assistant_tokenizer, _ = kept
    lookup = config.prompt_lookup_num_tokens
    named = {"drafter": drafter, "assistant_model": assistant, "prompt_lookup_num_tokens": lookup}
    if len(names := [name for name, value in named.items() if value is not None]) > 1:
        raise ConfigError(f"{' and '.join(names)} both say how to draft", fix="give one of them")
    if assistant is not None and assistant.generation_config is not None:
        _check({name: getattr(assistant.generation_config, name) for name in _OF_ASSISTANTS.split()})
    if assistant_tokenizer is not None and (assistant is None or tokenizer is None):
        raise ConfigError("an assistant_tokenizer is for an assistant_model, beside tokenizer", fix="pass all three")
    depth = _num_assistant_tokens(kept, config) if lookup is None else lookup
    depth = depth if drafter is None else None  # it drafts at most so many, see `_params`
    weights = tuple((weight.data_ptr(), weight._version) for weight in model.parameters())
    state = (weights, kept[:4], depth, lookup, config.max_matching_ngram_size)
    known = _engines.get(model)
    if known is None or known[0] != state:
        if lookup is not None:
            drafter = PromptLookup(config.max_matching_ngram_size or 2)
        elif assistant is not None:
            drafter = DraftModel(wrap_model(assistant, assistant_tokenizer or tokenizer))
        policy = None if depth is None else Fixed(depth)
        llm = LLM(model, drafter=drafter or "lookup", policy=policy, tokenizer=tokenizer)
        known = _engines[model] = (state, llm)
    return known[1]
