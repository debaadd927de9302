"""Draws drafted tokens from a draft model's logits, and returns their distribution q.

For `Coupled` (rule R7) the draft uses the noise of the target at the same position: equal distributions give equal
tokens, and no q is needed. For `Ratio` tokens are drawn from q, independently of the target.
"""

from collections.abc import Collection, Sequence
from typing import final

import torch
from torch import Tensor

from ..core.request import TokenSequence
from ..core.rng import Purpose, inverse_cdf, uniforms
from ..system.hardware import one_thread
from .processors import edit_named, mask_endings, names_tokens
from .scores import argmax, gumbel_argmax, mask_banned
from .warpers import is_warped, on_rows, warp

_ROUND = 0x2545F4914F6CDD1D  # odd, so that rounds never share a key


@final
class DraftSampler:
    """Draws the next drafted token of each sequence, but none of `banned_token_ids`.

    The draft's distribution has the warpers, `allowed_token_ids`, `logit_bias` and the mask of `min_tokens`. The
    processors that depend on the past are left to the target, which costs acceptance and never correctness.
    """

    def __init__(self, coupled: bool, banned_token_ids: Collection[int] = ()):
        self.coupled, self.banned_token_ids = coupled, banned_token_ids
        self._banned = torch.tensor(sorted(banned_token_ids)) if banned_token_ids else None

    def sample(
        self,
        logits: Tensor,  # [B, V]
        seqs: Sequence[TokenSequence],  # B
        offsets: Sequence[int],  # B
    ) -> tuple[Tensor, Tensor | None]:  # [B], [B, V]
        """Tokens [B] (int64) and q [B, V] (float32, rows sum to 1; None when coupled). -1: there is no distribution.

        Rows at temperature 0 take the argmax, and their q is one-hot.
        offsets: how many tokens this round has drafted already in each row; the new one is at
            `len(seq.token_ids) + offset`.
        """
        with one_thread(logits):
            scores = self._scores(logits, seqs, offsets)
            tokens, q = self._sample(scores, seqs, offsets)
            best = scores.gather(1, tokens.unsqueeze(1)).squeeze(1) if q is None else scores.amax(1)
            return tokens.where(best.isfinite(), -1), q  # NaN passes through argmax and amax

    def _sample(
        self, scores: Tensor, seqs: Sequence[TokenSequence], offsets: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        sampled = [row for row, seq in enumerate(seqs) if seq.params.temperature != 0]
        seeds, lengths = [seqs[row].seed for row in sampled], [len(seqs[row].token_ids) for row in sampled]
        positions = [length + offsets[row] for length, row in zip(lengths, sampled, strict=True)]
        if self.coupled and len(sampled) == len(seqs):
            return gumbel_argmax(scores, seeds, positions), None
        tokens = argmax(scores)
        q = None if self.coupled else torch.zeros_like(scores).scatter_(1, tokens.unsqueeze(1), 1.0)
        if q is None:
            tokens[sampled] = gumbel_argmax(scores[sampled], seeds, positions)
        elif sampled:
            q[sampled] = torch.softmax(scores[sampled], dim=-1)
            # The round is part of the key: a position drafted again after a rejection gets fresh numbers, so nothing
            # that was learnt from the discarded token can bias the new one.
            keys = torch.tensor(seeds, device=scores.device) + torch.tensor(lengths, device=scores.device) * _ROUND
            places = torch.tensor(positions, device=scores.device).unsqueeze(1)
            # One number a row, where Gumbel noise would take V.
            tokens[sampled] = inverse_cdf(q[sampled], uniforms(keys, places, Purpose.DRAFT, 1).squeeze(1))
        return tokens, q

    def _scores(self, logits: Tensor, seqs: Sequence[TokenSequence], offsets: Sequence[int]) -> Tensor:
        """Float32 scores of the draft's distribution, up to a constant per row."""
        ahead = [seq.num_output + offset for seq, offset in zip(seqs, offsets, strict=True)]
        biased = [names_tokens(s.params) or n < s.params.min_tokens for s, n in zip(seqs, ahead, strict=True)]
        scores = logits.to(torch.float32, copy=any(biased))
        for row, seq in enumerate(seqs):
            if biased[row]:
                edit_named(scores[row : row + 1], seq.params)
                mask_endings(scores[row : row + 1], seq, ahead[row])
        if self._banned is not None:
            scores = mask_banned(scores, self._banned[self._banned < scores.shape[1]])
        params = [seq.params for seq in seqs]
        return on_rows(warp, scores, params, [row for row, row_params in enumerate(params) if is_warped(row_params)])


def confidence(
    logits: Tensor,  # [B, V]
    tokens: Tensor,  # [B]
) -> Tensor:  # [B]
    """The probability of each token by the draft's plain softmax, float32. Policies stop drafting on it."""
    logits = logits.float()
    return (logits.gather(1, tokens.unsqueeze(1)).squeeze(1) - logits.logsumexp(-1)).exp()
