"""How sure the small model was of a whole answer: one number from 0 to 1, of three kinds.

All of them are taken from its own probabilities, before temperature and processors, of the tokens it gave. The end of
the text is one of these tokens: whether to stop is a part of the answer.
"""

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from enum import StrEnum

from ..core.request import TokenLogprob

THRESHOLDS: tuple[float, ...] = tuple(
    [1 - 10 ** (-power / 4) for power in range(20, 4, -1)]  # 0.99999 down to 0.944
    + [(94 - 2 * step) / 100 for step in range(48)]  # 0.94 down to 0
)
"""Declared before any data: the choice among them is then valid on the very prompts it was made with."""


class Signal(StrEnum):
    """The kinds of confidence."""

    MIN_PROB = "min_prob"  # of the least likely token
    MEAN_PROB = "mean_prob"  # geometric mean: exp of the mean log-probability
    MARGIN = "margin"  # the smallest lead of a token over its best rival, in probability


def confidences(logprobs: Seq[TokenLogprob]) -> Mapping[Signal, float]:
    """All kinds for one answer, of tokens with their two likeliest. Raises ValueError for an answer without tokens."""
    if not logprobs:
        raise ValueError("an answer has at least one token")
    own = [one.logprob for one in logprobs]
    return {
        Signal.MIN_PROB: math.exp(min(own)),
        Signal.MEAN_PROB: math.exp(math.fsum(own) / len(own)),
        Signal.MARGIN: max(0.0, min(map(_lead, logprobs))),
    }


def _lead(one: TokenLogprob) -> float:
    """Negative where a sampled token is not the likeliest."""
    rivals = [logprob for token, logprob in one.top.items() if token != one.token_id]
    return math.exp(one.logprob) - (math.exp(max(rivals)) if rivals else 0.0)
