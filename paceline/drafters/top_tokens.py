"""The tokens a head's logits make likeliest, for heads that draft over a part of the vocabulary.

The target emits argmax(log p + T g), with T its temperature and g the noise of the position (rule R7), which an exact
verifier shares with its drafters. So a sampled row ranks its tokens by logits + T g, less what its truncation forbids:
q close to p then drafts the target's very choice, as at T = 0. The tokens remain a function of text and seed, the
draft's law is a point mass. The confidence in a token is softmax(logits + T g), as in `drafters.eagle`. If noise is not
shared, it is softmax(logits / max(T, 1)).
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.interfaces import DraftBudget
from ..core.request import Sequence
from ..core.rng import Purpose, gumbel_of
from ..kernels.library import largest, library
from ..sampling.scores import bar
from ..sampling.warpers import warp
from .trees import DraftTree, best_of_marginals


class Best(NamedTuple):
    """The largest of some logits, largest first, whose softmax is over all of them.

    columns: int32 [..., k]. logps: float32 [..., k].
    """

    columns: Tensor
    logps: Tensor


def top_tokens(
    logits: Tensor,  # [R, Vd]
    draft_ids: Tensor,  # [Vd]
    seqs: Seq[Sequence],  # R
    offset: int,
    count: int,
    coupled: bool,
    banned: Tensor | None = None,
    found: Best | None = None,
) -> tuple[list[list[int]], list[list[float]]]:  # R lists of `count`, likeliest first
    """Target ids of the `count` best tokens of each row, and log-probabilities of the draft's belief in them.

    found: the `count` largest logits, if they are known [R, count]: rows that rank by these alone need no more.
    Other arguments: see `scored`.
    """
    as_they_are = banned is None and all(ranks_by_logits(seq, coupled) for seq in seqs)
    if not as_they_are or found is None:
        native = logits.device.type == "cpu" and logits.dtype is not torch.float64 and library() is not None
        scores = logits.float() if as_they_are and native else scored(logits, draft_ids, seqs, offset, coupled, banned)
        found = (best_native if native else best_torch)(scores, min(count, scores.shape[1]))
    return draft_ids[found.columns[:, :count]].tolist(), found.logps[:, :count].tolist()


def marginal_trees(
    logits: Seq[Tensor] | Tensor,  # R of [>= depth, Vd]
    wishes: Seq[tuple[Sequence, DraftBudget, int]],  # R: whose tree, its budget and its depth
    draft_ids: Tensor,  # [Vd]
    top_k: int,
    coupled: bool,
    banned: Tensor | None = None,
) -> list[DraftTree]:
    """The best tree of each row where the distribution of a depth does not depend on the path."""
    tokens, logps = [list[list[int]]() for _ in wishes], [list[list[float]]() for _ in wishes]
    for level in range(max(depth for _, _, depth in wishes)):
        rows = [row for row, (_, _, depth) in enumerate(wishes) if level < depth]
        each, seqs = torch.stack([logits[row][level] for row in rows]), [wishes[row][0] for row in rows]
        best = top_tokens(each, draft_ids, seqs, level, top_k, coupled, banned)
        for row, own_tokens, own_logps in zip(rows, *best, strict=True):
            tokens[row].append(own_tokens)
            logps[row].append(own_logps)
    return [best_of_marginals(tokens[row], logps[row], depth, budget) for row, (_, budget, depth) in enumerate(wishes)]


def best_native(scores: Tensor, count: int) -> Best:
    """`Best` of float32 scores [R, V] on CPU, in the native library."""
    return Best(*largest(scores, count))


def best_torch(scores: Tensor, count: int) -> Best:
    """The same in torch, for scores without NaN."""
    best = scores.topk(count, dim=-1)
    return Best(best.indices, best.values - scores.logsumexp(-1, keepdim=True))


def ranks_by_logits(seq: Sequence, coupled: bool) -> bool:
    """Whether `scored` leaves the logits of this row as they are, but for those that are not finite."""
    return seq.params.temperature == 0 or (not coupled and seq.params.temperature <= 1)


def scored(
    logits: Tensor,  # [R, Vd]
    draft_ids: Tensor,  # [Vd]
    seqs: Seq[Sequence],  # R
    offset: int,
    coupled: bool,
    banned: Tensor | None = None,
) -> Tensor:  # [R, Vd]
    """The scores that rank the tokens of each row, and whose softmax is the confidence in them; float32.

    seqs: the sequence of each row; one may have several rows. offset: the tokens are at position
    `len(seq.token_ids) + offset`. coupled: rank sampled rows with the target's noise. banned: columns of tokens that
    must not be drafted, see `sampling.scores`. Nor are those drafted whose logit is not finite.
    """
    lowest = torch.finfo(torch.float32).min / 4  # finite: a row of nothing else is a bad draft, but a draft
    scores = bar(logits.float().nan_to_num(lowest, lowest, lowest), banned)
    sampled = [row for row, seq in enumerate(seqs) if seq.params.temperature != 0]
    if sampled:
        rows, warm = torch.tensor(sampled, device=logits.device), [seqs[row] for row in sampled]
        old = scores if len(warm) == len(scores) else scores.index_select(0, rows)
        temperatures = torch.tensor([seq.params.temperature for seq in warm], device=scores.device).unsqueeze(1)
        if coupled:
            cut = warp(old, [seq.params for seq in warm])  # scores over temperature, truncated
            new = temperatures * (cut + _noise(draft_ids, warm, offset))
        else:
            new = old / temperatures.clamp(min=1)
        scores = new if old is scores else scores.index_copy(0, rows, new)
    return scores


def _noise(draft_ids: Tensor, seqs: Seq[Sequence], offset: int) -> Tensor:
    """The noise of the target's choice at this position, made once for each sequence. [R, Vd]."""
    distinct = list({id(seq): seq for seq in seqs}.values())
    seeds = torch.tensor([seq.seed for seq in distinct], device=draft_ids.device)
    positions = torch.tensor([[len(seq.token_ids) + offset] for seq in distinct], device=draft_ids.device)
    noise = gumbel_of(seeds, positions, Purpose.TARGET, draft_ids).squeeze(1)
    if len(distinct) == len(seqs):
        return noise
    place = {id(seq): row for row, seq in enumerate(distinct)}
    return noise.index_select(0, torch.tensor([place[id(seq)] for seq in seqs], device=noise.device))
