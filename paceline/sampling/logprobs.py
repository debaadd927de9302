"""The log-probabilities shown to the user: of the target itself, before any processor."""

import torch
from torch import Tensor

from ..core.request import TokenLogprob


def token_logprob(
    logits_row: Tensor,  # [V]
    token: int,
    k: int,
) -> TokenLogprob:
    """Natural-log probability of `token` and of the `k` likeliest tokens, likeliest first.

    logits_row: the target's raw logits, any floating dtype; the softmax is taken in float32.
    """
    logprobs = torch.log_softmax(logits_row.float(), dim=-1)
    best = torch.topk(logprobs, min(k, logprobs.shape[-1]))
    top = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)
