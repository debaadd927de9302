"""Temperature, top_k, top_p and min_p, which do not depend on earlier tokens.

All three truncations keep the most probable tokens, so they are decided on a short sorted *window* of the largest
scores. The whole vocabulary is sorted only for rows whose kept set does not fit:

    scores   [V]   -2  3  1  3 -9  0 ...          unsorted, V = 50 000 to 150 000
    window   [K]    3  3  1  0 ...                largest first; of equal scores the lower token id first, as argmax
    kept           |------|                       a prefix of `count` tokens: the least of what the three allow

A row is decided once its last kept score is above the window's last. No bit of a row depends on other rows: every
reduction runs within a row, and cumulative mass is summed in integers, so that its order does not matter.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from ..core.request import SamplingParams
from ..kernels.library import largest, reads

_FIRST = 128
_WINDOWS = (_FIRST, 1024, 8192)  # most nuclei fit the first; a full sort costs 50 times as much
_MASS_BITS = 56  # fixed point: a row's mass, at most 1, summed exactly in int64
_MIN_TEMPERATURE = 1e-20  # keeps scores / temperature finite in float32; such a distribution is an argmax anyway
_Change: TypeAlias = Callable[[Tensor, Sequence[SamplingParams]], Tensor]
_ALIGN = 32  # a row's softmax may be summed in another order when rows start at odd addresses


def is_warped(params: SamplingParams) -> bool:
    """True iff the warpers change these scores."""
    return params.temperature != 0 and (params.temperature != 1 or is_truncated(params))


def is_truncated(params: SamplingParams) -> bool:
    """True iff top_k, top_p or min_p is on."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def warp(
    scores: Tensor,  # [R, V]
    params: Sequence[SamplingParams],  # R
) -> Tensor:  # [R, V]
    """Scores over temperature, then truncated to -inf outside top_k, top_p and min_p, in this order.

    scores: float32, one row for each entry of `params`, none of temperature 0; left as they are. Every row has a
    finite maximum. The kept sets are those of transformers' warpers with one token kept at least: top_k and min_p keep
    all ties, top_p cuts between them (transformers cuts in no order; here the lower token ids are kept).
    """
    if any(p.temperature != 1 for p in params):
        temperature = [max(p.temperature, _MIN_TEMPERATURE) for p in params]
        scores = scores / torch.tensor(temperature, dtype=torch.float32, device=scores.device).unsqueeze(1)
    return on_rows(_truncate, scores, params, [row for row, p in enumerate(params) if is_truncated(p)])


def on_rows(change: _Change, scores: Tensor, params: Sequence[SamplingParams], rows: list[int]) -> Tensor:
    """Apply `change`, such as `warp`, to these rows of the scores [R, V]."""
    if len(rows) in (0, len(scores)):
        return change(scores, params) if rows else scores
    index = torch.tensor(rows, device=scores.device)
    return scores.index_copy(0, index, change(scores[index], [params[row] for row in rows]))


def _truncate(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Scores with -inf outside each row's kept set; every row is truncated somehow."""
    vocab = scores.shape[1]
    rows_of_limits = [[min(p.top_k or vocab, vocab), p.top_p, p.min_p] for p in params]
    limits = torch.tensor(rows_of_limits, dtype=torch.float64).to(scores.device)
    result = torch.full_like(scores, -torch.inf)
    rows: Tensor | None = None  # None: all of them
    for width in (*_WINDOWS, vocab):
        if width > vocab:
            continue
        part = scores if rows is None else scores[rows]
        limit = limits if rows is None else limits[rows]
        values, tokens, mass = _window(part, width)
        count, decided = _count_kept(values, mass, limit, vocab)
        kept = values.masked_fill(torch.arange(width, device=values.device) >= count, -torch.inf)
        if width == vocab or bool(decided.all()):
            if rows is None:
                return result.scatter_(1, tokens, kept)
            return result.index_copy_(0, rows, torch.full_like(part, -torch.inf).scatter_(1, tokens, kept))
        rows_here = torch.arange(len(params), device=scores.device) if rows is None else rows
        done, rows = rows_here[decided], rows_here[~decided]
        result[done] = result[done].scatter_(1, tokens[decided], kept[decided])
    return result


def _softmax(scores: Tensor) -> Tensor:
    """Softmax of each row, with every row at an aligned address."""
    vocab = scores.shape[1]
    return torch.softmax(functional.pad(scores, (0, -vocab % _ALIGN), value=-torch.inf), dim=-1)[:, :vocab]


def _window(scores: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `width` largest scores of each row, their tokens and probabilities; of equal scores the lower id is first."""
    if width == _FIRST and reads(scores):
        places, logps = largest(scores, width)
        return scores.gather(1, tokens := places.long()), tokens, logps.exp()
    if width == scores.shape[1]:
        values, tokens = torch.sort(scores, dim=-1, descending=True, stable=True)
    else:
        tokens = torch.topk(scores, width, dim=-1, sorted=False).indices
        tokens = torch.sort(tokens, dim=-1).values  # a stable sort of values then leaves equal ones in this order
        values, order = torch.sort(scores.gather(1, tokens), dim=-1, descending=True, stable=True)
        tokens = tokens.gather(1, order)
    return values, tokens, _softmax(scores).gather(1, tokens)


def _count_kept(
    values: Tensor,  # [R, K]
    mass: Tensor,  # [R, K]
    limits: Tensor,  # [R, 3]
    vocab: int,
) -> tuple[Tensor, Tensor]:  # [R, 1], [R]
    """How many tokens of a sorted window are kept, at least 1, and whether the window was wide enough to tell.

    mass:   probabilities before truncation.
    limits: top_k, top_p, min_p of each row.
    """
    top_k, top_p, min_p = limits[:, :1], limits[:, 1:2], limits[:, 2:]
    last = values[:, -1:]
    kth = values.gather(1, top_k.long().clamp(max=values.shape[1]) - 1)
    count = (values >= kth).sum(1, keepdim=True)  # all ties of the k-th
    # nothing outside the window belongs to the top k, nor then to the distribution that top_p is measured on
    closed = (top_k >= vocab) | (kth > last) | (last == -torch.inf)
    fixed = (mass.double() * 2.0**_MASS_BITS).long()
    before = fixed.cumsum(1) - fixed
    inside = before + fixed
    total = torch.where(top_k < vocab, inside.gather(1, count - 1).double(), 2.0**_MASS_BITS)
    nucleus = ((before.double() < top_p * total) | (top_p >= 1)).sum(1, keepdim=True)
    count = torch.minimum(count, nucleus)
    floor = values[:, :1].double() + min_p.log()
    count = torch.minimum(count, (values.double() >= floor).sum(1, keepdim=True)).clamp(min=1)
    decided = closed & ((values.gather(1, count - 1) > last) | (last == -torch.inf))
    return count, decided.squeeze(1)
