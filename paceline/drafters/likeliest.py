"""The tokens a head's logits make likeliest, for heads that draft over a part of the vocabulary.

The target emits argmax(log p + T g), with T its temperature and g the noise of the position (rule R7), which an exact
verifier shares with its drafters. So a sampled row ranks its tokens by logits + T g, less what its truncation forbids:
q close to p then drafts the target's very choice, as at T = 0. The tokens remain a function of text and seed, the
draft's law a point mass. The belief in a token is softmax(logits + T g), as in `drafters.eagle`. Where the noise is not
shared, it is softmax(logits / max(T, 1)).
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from ..core.request import Sequence
from ..core.rng import Purpose, gumbel
from ..sampling.undraftable import bar
from ..sampling.warpers import warp


def likeliest(
    logits: Tensor,  # [R, Vd]
    draft_ids: Tensor,  # [Vd]
    vocab_size: int,
    seqs: Seq[Sequence],  # R
    offset: int,
    count: int,
    coupled: bool,
    barred: Tensor | None = None,
) -> tuple[list[list[int]], list[list[float]]]:  # R lists of `count`, likeliest first
    """Target ids of the `count` best tokens of each row, and log-probabilities of the draft's belief in them.

    Other arguments: see `scored`.
    """
    scores = scored(logits, draft_ids, vocab_size, seqs, offset, coupled, barred)
    best = scores.topk(min(count, scores.shape[1]), dim=-1)
    logps = best.values - scores.logsumexp(-1, keepdim=True)
    return draft_ids[best.indices].tolist(), logps.tolist()


def scored(
    logits: Tensor,  # [R, Vd]
    draft_ids: Tensor,  # [Vd]
    vocab_size: int,
    seqs: Seq[Sequence],  # R
    offset: int,
    coupled: bool,
    barred: Tensor | None = None,
) -> Tensor:  # [R, Vd]
    """What ranks the tokens of each row, and whose softmax is the belief in them; float32.

    seqs: of each row; one may have several. offset: the tokens stand at `len(seq.token_ids) + offset`. coupled: rank
    sampled rows with the target's noise. A logit that is not finite is a token that is not drafted. barred: columns of
    tokens that must not be, see `sampling.undraftable`.
    """
    lowest = torch.finfo(torch.float32).min / 4  # finite: a row of nothing else is a bad draft, but a draft
    scores = bar(logits.float().nan_to_num(lowest, lowest, lowest), barred)
    sampled = [row for row, seq in enumerate(seqs) if seq.params.temperature != 0]
    if sampled:
        rows, warm = torch.tensor(sampled, device=logits.device), [seqs[row] for row in sampled]
        heat = torch.tensor([seq.params.temperature for seq in warm], device=scores.device).unsqueeze(1)
        if coupled:
            cut = warp(scores[rows], [seq.params for seq in warm])  # scores over temperature, truncated
            new = heat * (cut + _noise(draft_ids, vocab_size, warm, offset))
        else:
            new = scores[rows] / heat.clamp(min=1)
        scores = scores.index_copy(0, rows, new)
    return scores


def _noise(draft_ids: Tensor, vocab_size: int, seqs: Seq[Sequence], offset: int) -> Tensor:
    """The noise of the target's choice at this position, made once for each sequence. [R, Vd]."""
    distinct = list({id(seq): seq for seq in seqs}.values())
    seeds = torch.tensor([seq.seed for seq in distinct], device=draft_ids.device)
    positions = torch.tensor([[len(seq.token_ids) + offset] for seq in distinct], device=draft_ids.device)
    noise = gumbel(seeds, positions, Purpose.TARGET, vocab_size).squeeze(1)[:, draft_ids]
    if len(distinct) == len(seqs):
        return noise
    place = {id(seq): row for row, seq in enumerate(distinct)}
    return noise[torch.tensor([place[id(seq)] for seq in seqs], device=noise.device)]
