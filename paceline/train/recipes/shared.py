"""What several recipes share: columns shifted to their labels, the target's laws, attention of unrolled steps."""

from typing import final

import torch
from torch import Tensor, nn


@final
class Teacher:
    """The target's logits of every column that has a lesson after it, computed once for all steps.

    states: its last ones [B, T, E]. teaches: True where the next token is a lesson [B, T]. rows: output rows [Vd, E].
    """

    def __init__(self, states: Tensor, teaches: Tensor, rows: Tensor):
        self._place = teaches.view(-1).cumsum(0).view(teaches.shape) - 1  # row of `_logits` that a column has
        self._logits = nn.functional.linear(states[teaches], rows)

    def logits(self, counts: Tensor, by: int) -> Tensor:
        """Those of column t + by for every t that counts. [T, Vd]."""
        return self._logits[shifted(self._place, by)[counts]]


@final
class Unrolled:
    """Attention of the training-time test: step 0 is causal, step s adds its own diagonal on top."""

    def __init__(self, length: int, device: torch.device):
        self._causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, Hq, T, d], [B, H, T, d] -> [B, Hq, T, d]. Calls come in the order of the steps."""
        self._keys.append(key)
        self._values.append(value)
        if len(self._keys) == 1:
            return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        groups = query.shape[1] // key.shape[1]
        keys, values = ([x.repeat_interleave(groups, 1) for x in held] for held in (self._keys, self._values))
        scale = query.shape[-1] ** -0.5
        past = (query @ keys[0].transpose(-1, -2) * scale).masked_fill(~self._causal, float("-inf"))
        own = torch.stack([(query * k).sum(-1) * scale for k in keys[1:]], -1)
        weights = torch.cat([past, own], -1).softmax(-1)
        length = past.shape[-1]
        out = weights[..., :length] @ values[0]
        for step, held in enumerate(values[1:]):
            out = out + weights[..., length + step, None] * held
        return out


def shifted(x: Tensor, by: int) -> Tensor:
    """Column t holds what stood in column t + by; zeros (False) come in at the end. [B, T, ...]."""
    out = torch.zeros_like(x)
    if by < x.shape[1]:
        out[:, : x.shape[1] - by] = x[:, by:]
    return out
