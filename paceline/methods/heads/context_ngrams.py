"""What followed the same tokens earlier in the text, as counts to which a head's distribution is the prior.

    p(v) = (p_head(v) + w c(v)) / (1 + w n)        w = WEIGHT (1 - T)

c(v): how often v followed the last two tokens, n in all; T: the temperature, since sampled text repeats itself less.
p_head(v): the head's confidence in v if v is one of its best tokens, otherwise 0.
Below the last level of a head p_head is 0, so trees go on along copies alone.
This is the posterior mean under a Dirichlet prior (MacKay and Peto 1995). Heads do not copy well, since they read the
text only through the target's states, and names are often not in their vocabulary. Prompt lookup copies long passages;
this decides token by token, within a tree.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import final

from ...core.request import TokenSequence
from .trees import Rerank

LENGTH = 2
"""Of the tokens that must match. One says little; three are rarer, and no surer than two with a head."""
WEIGHT = 1.0
"""The prior counts for 1 / WEIGHT occurrences."""

Followers = dict[tuple[int, ...], dict[int, int]]
"""For each n-gram, how often each token came next."""


@dataclass
class _Index:
    """The n-grams of one text. num_indexed: tokens read so far."""

    followers: Followers = field(default_factory=Followers)
    num_indexed: int = LENGTH


@final
class ContextNgrams:
    """The n-grams of each sequence, by slot: about 0.3 KB and a microsecond for each token of a text.

    banned_token_ids: tokens that must not be drafted.
    enabled: whether anything is counted.
    """

    def __init__(self, banned_token_ids: Collection[int] = (), enabled: bool = True):
        self._banned, self._enabled = frozenset(banned_token_ids), enabled
        self._indexes = dict[int, _Index]()

    def rerank(self, seq: TokenSequence) -> Rerank | None:
        """How to rank tokens after a path of drafted tokens of this sequence; None if that changes nothing."""
        weight = WEIGHT * (1 - seq.params.temperature)
        if weight <= 0 or not self._enabled:
            return None
        return partial(self._posterior, self._updated(seq), tuple(seq.token_ids[-LENGTH:]), weight)

    def release(self, slots: Sequence[int]) -> None:
        """Drop the texts of these slots."""
        for slot in slots:
            self._indexes.pop(slot, None)

    def _updated(self, seq: TokenSequence) -> Followers:
        index, tokens = self._indexes.setdefault(seq.slot, _Index()), seq.token_ids
        for end in range(index.num_indexed, len(tokens)):
            counts = index.followers.setdefault(tuple(tokens[end - LENGTH : end]), {})
            counts[tokens[end]] = counts.get(tokens[end], 0) + 1
        index.num_indexed = max(index.num_indexed, len(tokens))
        return index.followers

    def _posterior(
        self, followers: Followers, end: tuple[int, ...], weight: float,
        path: Sequence[int], tokens: Sequence[int], logps: Sequence[float],
    ) -> tuple[Sequence[int], Sequence[float]]:  # fmt: skip
        counts = followers.get((*end, *path)[-LENGTH:])
        if counts is None:
            return tokens, logps
        probs = {token: math.exp(logp) for token, logp in zip(tokens, logps, strict=True) if logp > -math.inf}
        total = 1.0
        for token, count in counts.items():
            if token not in self._banned:
                probs[token] = probs.get(token, 0.0) + weight * count
                total += weight * count
        law = {token: prob / total for token, prob in probs.items()}
        best = sorted((token for token in law if law[token] > 0), key=law.__getitem__, reverse=True)
        return best, [math.log(law[token]) for token in best]
