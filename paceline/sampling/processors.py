"""The processors that depend on earlier tokens: applied to one node, on the path of that node.

Repetition, n-gram and bad-word rules are those of transformers; presence and frequency penalties those of the OpenAI
API.
"""

from functools import lru_cache

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from ..core.request import LogitsProcessor, SamplingParams, TokenSequence
from ..errors import ConfigError


def is_edited(seq: TokenSequence) -> bool:
    """True iff some processor may change the scores of the next token or of a later one."""
    params, is_short = seq.params, seq.num_output < seq.params.min_tokens
    return seq.grammar is not None or names_tokens(params) or params.needs_history or is_short


def names_tokens(params: SamplingParams) -> bool:
    """Whether some processor changes scores by token id alone."""
    return bool(params.logit_bias) or params.allowed_token_ids is not None


def edit_named(scores: Tensor, params: SamplingParams) -> None:  # [1, V]
    """Apply `allowed_token_ids` and `logit_bias` in place; `open_request` has checked their token ids."""
    if params.allowed_token_ids is not None:
        kept = torch.tensor(params.allowed_token_ids, device=scores.device)
        scores.copy_(torch.full_like(scores, -torch.inf).index_copy_(1, kept, scores[:, kept]))
    if bias := params.logit_bias:
        index = torch.tensor(list(bias), device=scores.device)
        scores[0, index] += torch.tensor(list(bias.values()), dtype=scores.dtype, device=scores.device)


def mask_endings(scores: Tensor, seq: TokenSequence, num_output: int) -> None:  # [1, V]
    """Forbid in place the tokens that would end the answer before `min_tokens`.

    num_output: how many tokens of the answer precede the one to be chosen.
    """
    if num_output >= seq.params.min_tokens:
        return
    vocab = scores.shape[1]
    endings = [token for token in {*seq.eos_ids, *(seq.params.stop_token_ids or ())} if 0 <= token < vocab]
    if endings:
        scores[0, torch.tensor(endings, device=scores.device)] = -torch.inf


def process(scores: Tensor, ids: Tensor, seq: TokenSequence) -> Tensor:  # [1, V], [1, L] -> [1, V]
    """Scores of the token after `ids`, with every processor of the sequence applied in the documented order.

    scores: a private float32 copy, which may be written to.
    ids: the prompt, the answer and the drafted tokens of the path.

    Raises `ConfigError` for a user's processor that does not return scores.
    """
    params = seq.params
    if seq.grammar is not None:
        mask = seq.grammar.mask(ids[0, len(seq.prompt_ids) :].tolist())[: scores.shape[1]]
        scores.masked_fill_(~mask.to(scores.device), -torch.inf)
    edit_named(scores, params)
    if seq.bad_word_ids:
        scores = _bad_words(scores, ids, seq.bad_word_ids)
    mask_endings(scores, seq, ids.shape[1] - len(seq.prompt_ids))
    if params.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))(ids, scores)  # type: ignore[arg-type]
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        answer, counts = ids[0, len(seq.prompt_ids) :].unique(return_counts=True)
        scores[0, answer] -= params.presence_penalty + params.frequency_penalty * counts.to(scores.dtype)
    if params.no_repeat_ngram_size > 0:
        scores = NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size)(ids, scores)  # type: ignore[arg-type]
    for processor in params.logits_processors:
        scores = _call(processor, ids, scores)
    return scores


def _bad_words(scores: Tensor, ids: Tensor, words: tuple[tuple[int, ...], ...]) -> Tensor:
    vocab = scores.shape[1]
    try:
        return _bad_words_processor(words, vocab, str(scores.device))(ids, scores)  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigError("SamplingParams.bad_words holds a token the model cannot emit", got=str(error)) from error


@lru_cache(maxsize=64)
def _bad_words_processor(words: tuple[tuple[int, ...], ...], vocab: int, device: str) -> NoBadWordsLogitsProcessor:
    """One processor per vocabulary and device, because on its first call it builds tables for them."""
    return NoBadWordsLogitsProcessor([list(word) for word in words])


def _call(processor: LogitsProcessor, ids: Tensor, scores: Tensor) -> Tensor:
    """What the user's processor returns, checked."""
    shape = tuple(scores.shape)
    out = processor(ids, scores)
    if isinstance(out, Tensor) and tuple(out.shape) == shape:
        return out.to(scores.device, torch.float32)
    name = getattr(processor, "__name__", type(processor).__name__)
    got = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
    message, fix = f"logits processor {name!r} did not return scores", "return them, also where they are unchanged"
    raise ConfigError(message, got=got, expected=f"a tensor of shape {shape}", fix=fix)
