"""Speculative decoding in transformers' `generate`, for a loaded model.

model.generate(**inputs, custom_generate=generate, drafter="lookup")
generate(model, **inputs, assistant_model=draft, streamer=streamer)      the same, called directly
"""

import functools
import weakref
from typing import Any, cast, final

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .core.interfaces import Drafter
from .core.request import SamplingParams, Sequence
from .decoding import generate as decode
from .drafters import DraftModel, PromptLookup
from .errors import ConfigError
from .hf.load import KV_CACHE
from .llm import LLM
from .policy import Fixed
from .runner import wrap_model

_REFUSED = {
    "num_beams": "beam search keeps several answers, and drafts are of one: num_beams=1",
    **dict.fromkeys(
        ("output_scores", "output_logits"), "LLM.generate with SamplingParams(logprobs=...) gives log-probabilities"
    ),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states", "guidance_scale", "dola_layers", "penalty_alpha"),
        "model.generate without custom_generate does that",
    ),
}
_OF_NO_MATTER = ("position_ids", "token_type_ids", "logits_to_keep", "use_cache", KV_CACHE, "synced_gpus")
"""What transformers prepares for its own passes; the cache is the engine's."""
_engines: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[object, LLM]]" = weakref.WeakKeyDictionary()


def generate(
    model: PreTrainedModel,
    input_ids: Tensor | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    drafter: Drafter | str | None = None,
    assistant_model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    streamer: BaseStreamer | None = None,
    **kwargs: Any,
) -> Any:
    """Token ids [B, L] of prompts and answers, as `model.generate` returns them.

    drafter: as in `LLM`; None: assistant_model or prompt_lookup_num_tokens, else "lookup".
    tokenizer: for stop_strings, and for drafters that need text.
    streamer: gets the tokens of each round; for one row only.

    transformers does not pass streamer, assistant_model and tokenizer to a custom_generate: for these, and for
    stop_strings, call this function directly. transformers prepares inputs, logits processors and stopping criteria.

    Greedy answers are those of transformers up to near-ties, which are rare in float32; sampled ones follow the same
    distribution, with other random numbers.

    Up to eight rows are decoded at the same time. An engine is kept for each model, and replaced when its weights or
    the drafter change. Raises `ConfigError` for options that are not supported, and what `LLM` raises.
    """
    if not hasattr(generation_config, "_eos_token_tensor"):  # called directly: transformers prepares the rest
        own = {"drafter": drafter, "assistant_model": assistant_model, "tokenizer": tokenizer, "streamer": streamer}
        drafts = functools.partial(generate, **own)
        if texts := kwargs.pop("stop_strings", None):
            if tokenizer is None:
                raise ConfigError("stop_strings need a tokenizer", fix="pass tokenizer=...")
            stopping_criteria = StoppingCriteriaList([*(stopping_criteria or ()), StopStringCriteria(tokenizer, texts)])
        given = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria, **kwargs}
        given |= {"generation_config": generation_config}
        given = {name: value for name, value in given.items() if value is not None}
        if streamer is not None and input_ids is not None:
            streamer.put(input_ids.cpu())
        return cast("Any", model).generate(input_ids, custom_generate=drafts, **given)
    assert input_ids is not None
    assert generation_config is not None
    attention_mask = cast("Tensor | None", kwargs.pop("attention_mask", None))
    _check(generation_config, kwargs)
    if streamer is not None and len(input_ids) > 1:
        raise ConfigError("a streamer takes one answer", got=f"{len(input_ids)} rows", fix="give one row")
    llm = _engine(model, tokenizer, drafter or assistant_model or generation_config)
    seqs = list[Sequence]()
    for row, ids in enumerate(input_ids):
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask[row]
        num_pads = int((mask == 0).sum())
        if bool((mask[:num_pads] != 0).any()):
            raise ConfigError("a row has padding behind or inside", fix='make the tokenizer with padding_side="left"')
        params = _params(input_ids, row, num_pads, logits_processor, generation_config)
        (seq,) = llm.open_request(ids[num_pads:].tolist(), params).seqs
        seq.stops = _Criteria(ids, stopping_criteria) if stopping_criteria else None
        seqs.append(seq)
    with llm.runner.fair_lock():
        for stepped in decode(llm.decoder, seqs):
            if streamer is not None:
                streamer.put(torch.tensor(stepped[0].output_ids[-stepped[0].rounds[-1].num_emitted :]))
    if streamer is not None:
        streamer.end()
    rows = [torch.cat([ids, ids.new_tensor(seq.output_ids)]) for ids, seq in zip(input_ids, seqs, strict=True)]
    pad = generation_config.pad_token_id or 0
    padding = float(pad[0] if isinstance(pad, list) else pad)
    sequences = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=cast("Any", sequences))
    return sequences


def _params(
    batch: Tensor, row: int, num_pads: int, processors: LogitsProcessorList | None, config: GenerationConfig
) -> SamplingParams:
    """The options of one row. Processors see the padding too, as in transformers.

    Processors may know each row of the batch by its place: they are given the row in every place.
    """
    ids, count = batch[row], len(batch)

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
    )


@final
class _Criteria:
    """The stopping criteria as `Sequence.stops`; they see the whole row with its padding, as in transformers."""

    stop_hit = None

    def __init__(self, ids: Tensor, criteria: StoppingCriteriaList):
        self._ids, self._criteria = ids, criteria

    def feed(self, token: int) -> bool:
        self._ids = torch.cat([self._ids, self._ids.new_tensor([token])])
        return bool(cast("Any", self._criteria)(self._ids[None], None).all())

    def would_stop(self, token_ids: list[int]) -> bool:
        """Criteria may keep a state: they are asked only for tokens that are certain."""
        return False


def _check(config: GenerationConfig, kwargs: dict[str, Any]) -> None:
    for name, fix in _REFUSED.items():
        if (value := kwargs.get(name, getattr(config, name, None))) not in (None, False, 0, 1) or value is True:
            raise ConfigError(f"drafts do not go with {name}", got=value, fix=fix)
    for name, value in kwargs.items():
        if value is not None and name not in _OF_NO_MATTER:
            raise ConfigError(f"{name} is not read here", fix="for images use LLM(...).chat; else leave it out")


def _engine(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    how: Drafter | str | PreTrainedModel | GenerationConfig,
) -> LLM:
    """An engine on the model as it is now, kept for the next call."""
    lookup = (how.prompt_lookup_num_tokens, how.max_matching_ngram_size) if isinstance(how, GenerationConfig) else None
    weights = tuple((weight.data_ptr(), weight._version) for weight in model.parameters())
    state = (weights, id(tokenizer), how if isinstance(how, str) else lookup or id(how))
    known = _engines.get(model)
    if known is None or known[0] != state:
        policy = None
        if isinstance(how, GenerationConfig):
            drafter = PromptLookup(how.max_matching_ngram_size or 2) if how.prompt_lookup_num_tokens else "lookup"
            policy = Fixed(how.prompt_lookup_num_tokens) if how.prompt_lookup_num_tokens else None
        else:
            drafter = DraftModel(wrap_model(how, tokenizer)) if isinstance(how, PreTrainedModel) else how
        llm = LLM(model, drafter=drafter, policy=policy, tokenizer=tokenizer)
        known = _engines[model] = (state, llm)
    return known[1]
