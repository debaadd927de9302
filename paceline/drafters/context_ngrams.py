"""What followed the same tokens earlier in the text, as counts to which a head's distribution is the prior.

    p(v) = (p_head(v) + w c(v)) / (1 + w n)        w = WEIGHT (1 - T)

c(v): how often v followed the last two tokens, n in all; T: the temperature, since sampled text repeats itself less.
This is the posterior mean under a Dirichlet prior (MacKay and Peto 1995). Heads do not copy well, since they read the
text only through the target's states, and names are often not in their vocabulary. Prompt lookup copies long passages;
this decides token by token, within a tree.
"""

import math
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from torch import Tensor

from ..core.request import Sequence

LENGTH = 2
"""Of the tokens that must match. One says little; three are rarer, and no surer than two with a head."""
WEIGHT = 1.0
"""The prior counts for 1 / WEIGHT occurrences."""


class Counts(NamedTuple):
    """w c by column of the draft vocabulary, and by token for those that the head cannot draft."""

    columns: dict[int, float]
    others: dict[int, float]

    def complete(self, tokens: list[int], logps: list[float]) -> tuple[list[int], list[float]]:
        """The best tokens and their log-probabilities, of those that the head can draft, with the others among them."""
        if not self.others:
            return tokens, logps
        total = 1 + sum(self.columns.values()) + sum(self.others.values())
        less = math.log1p(-sum(self.others.values()) / total)
        found = [(token, logp + less) for token, logp in zip(tokens, logps, strict=True)]
        found += [(token, math.log(count / total)) for token, count in self.others.items()]
        found.sort(key=lambda one: -one[1])
        return [token for token, _ in found[: len(tokens)]], [logp for _, logp in found[: len(tokens)]]


@dataclass
class _Index:
    """followers: for the n-grams of one sequence, how often each token came next. num_indexed: tokens read so far."""

    followers: dict[tuple[int, ...], dict[int, int]] = field(default_factory=dict[tuple[int, ...], dict[int, int]])
    num_indexed: int = LENGTH


@final
class ContextNgrams:
    """The n-grams of each sequence, by slot: about 0.3 KB and a microsecond for each token of a text.

    draft_ids: the target's token id of each column [Vd].
    banned_token_ids: tokens that must not be drafted.
    """

    def __init__(self, draft_ids: Tensor, banned_token_ids: Collection[int] = ()):
        self._banned = frozenset(banned_token_ids)
        self._columns: dict[int, int] = {token: column for column, token in enumerate(draft_ids.tolist())}
        self._indexes = dict[int, _Index]()

    def counts(self, seq: Sequence, path: Seq[int] = ()) -> Counts:
        """Of what followed the last two tokens of a text and a path of drafted tokens; none from temperature 1 on."""
        weight, found = WEIGHT * (1 - seq.params.temperature), Counts({}, {})
        if weight > 0:
            context = (*seq.token_ids[-LENGTH:], *path)[-LENGTH:]
            for token, count in self._updated(seq).followers.get(context, {}).items():
                column = self._columns.get(token)
                if column is not None:
                    found.columns[column] = weight * count
                elif token not in self._banned:
                    found.others[token] = weight * count
        return found

    def release(self, slots: Seq[int]) -> None:
        """Drop the texts of these slots."""
        for slot in slots:
            self._indexes.pop(slot, None)

    def _updated(self, seq: Sequence) -> _Index:
        index, tokens = self._indexes.setdefault(seq.slot, _Index()), seq.token_ids
        for end in range(index.num_indexed, len(tokens)):
            counts = index.followers.setdefault(tuple(tokens[end - LENGTH : end]), {})
            counts[tokens[end]] = counts.get(tokens[end], 0) + 1
        index.num_indexed = max(index.num_indexed, len(tokens))
        return index


def placed(rows: Iterable[tuple[int, Counts]], size: int) -> tuple[Tensor, Tensor] | None:
    """The counts of some rows of logits [R, size], float32 [K], and their places, int64 [K]; None if there are none."""
    values, places = list[float](), list[int]()
    for row, counts in rows:
        values += counts.columns.values()
        places += [row * size + column for column in counts.columns]
    return (torch.tensor(values), torch.tensor(places)) if values else None


def with_counts(logits: Tensor, counts: tuple[Tensor, Tensor] | None) -> Tensor:
    """Logits of the posterior mean, up to a constant, from those of the prior, [..., V]. counts: see `placed`."""
    if counts is None:
        return logits
    flat, (values, places) = logits.flatten(), (part.to(logits.device) for part in counts)
    totals = logits.logsumexp(-1).flatten()[places // logits.shape[-1]]
    added = flat[places].logaddexp(totals + values.log()).to(flat.dtype)
    return flat.index_put((places,), added).view_as(logits)
