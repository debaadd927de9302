"""Passes over a text as drafting makes them: each round begins on the target's keys and values and goes on by itself.

An answer's columns, cut into rounds of a window of 4; the first token a round feeds is the last committed one:

    column        t     t+1   t+2   t+3 | t+4   t+5   t+6   t+7
    fed           r     x1    x2    x3  | r'    x1'   x2'   x3'
    keys of       target's, columns < t | target's, columns < t+4
                  and r .. itself       | and r' .. itself

Rows of all rounds share a pass over the keys of the text, so that it costs what the answers' columns cost.
"""

from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from .shared import shifted


@final
@dataclass(frozen=True)
class Rounds:
    """Rows of a pass; R is the same for every text, what is missing is no lesson.

    column: where the fed token stands, -1 where nothing does. start: column of the first token of its round.
    """

    column: Tensor  # [B, R]
    start: Tensor  # [B, R]

    @property
    def counts(self) -> Tensor:
        """Where something stands. [B, R]."""
        return self.column >= 0

    @property
    def depth(self) -> Tensor:
        """How many tokens of its round come before the fed one. [B, R]."""
        return self.column - self.start

    def visible(self, width: int) -> Tensor:
        """What each row sees: columns of the text, then rows. [B, R, width + R]."""
        text = torch.arange(width, device=self.column.device) < self.start[:, :, None]
        same = self.start[:, :, None] == self.start[:, None, :]
        return torch.cat([text, same & (self.column[:, None, :] <= self.column[:, :, None])], -1)

    def take(self, x: Tensor, by: int = 0) -> Tensor:
        """Values [B, T, ...] at the rows' columns + by, for those that count. [M, ...]."""
        texts = torch.arange(len(x), device=x.device)[:, None].expand_as(self.column)
        return x[texts[self.counts], self.column[self.counts] + by]


def rounds_of(is_answer: Tensor, window: int, phases: Tensor) -> Rounds:
    """Every column behind which an answer's token follows, cut into rounds of `window`.

    phases: of each text, how many tokens its first round lacks [B].
    """
    feeds = shifted(is_answer, 1)
    found = [row.nonzero()[:, 0] for row in feeds]
    longest = max(1, *map(len, found))
    column = torch.full((len(found), longest), -1, device=is_answer.device)
    start = -1 - torch.arange(longest, device=is_answer.device).repeat(len(found), 1)  # alone, each in its own round
    for row, columns in enumerate(found):
        if len(columns):
            place = torch.arange(len(columns), device=columns.device)
            phase = int(phases[row])
            column[row, : len(columns)] = columns
            start[row, : len(columns)] = columns[0] + ((place + phase) // window * window - phase).clamp_min(0)
    return Rounds(column, start)


def drawn_rounds(is_answer: Tensor, window: int, count: int) -> Rounds:
    """`count` rounds a text at random columns from which an answer goes on, all as deep as the window."""
    feeds = shifted(is_answer, 1)
    roots = torch.rand(feeds.shape, device=feeds.device).masked_fill(~feeds, -1.0).argsort(1, descending=True)
    roots = roots[:, :count]
    there = feeds.gather(1, roots)
    steps = torch.arange(window, device=feeds.device)
    column = torch.where(there[..., None], roots[..., None] + steps, -1).flatten(1)
    alone = -1 - torch.arange(column.shape[1], device=feeds.device)
    start = torch.where(there, roots, -1)[..., None].expand(-1, -1, window).flatten(1)
    return Rounds(column, torch.where(column >= 0, start, alone))


def read_text(model: nn.Module, ids: Tensor, first: int) -> tuple[Tensor, DynamicCache]:
    """Logits [B, T - first, V] of the columns from `first` on, and the keys and values of all."""
    cache = DynamicCache()
    kept = ids.shape[1] - first
    out = cast("Any", model)(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=kept)
    return out.logits, cache


def read_rounds(
    model: nn.Module, ids: Tensor, rounds: Rounds, cache: DynamicCache, windows: dict[str, int | None]
) -> Tensor:
    """Logits [B, R, V] of tokens [B, R] fed in rounds over a text's keys and values, to which theirs are appended.

    windows: how far each kind of layer sees, see `space_model.windows_of`.
    """
    width, places = int(cache.get_seq_length()), rounds.column.clamp_min(0)
    seen, dtype = rounds.visible(width), cast("Any", model).dtype
    text = torch.arange(width, device=places.device).expand(len(places), -1)
    back = places[:, :, None] - torch.cat([text, places], -1)[:, None]  # [B, R, width + R]
    zero, least = torch.zeros((), dtype=dtype, device=places.device), torch.finfo(dtype).min
    masks = {
        kind: torch.where(seen if window is None else seen & (back < window), zero, least)[:, None]
        for kind, window in windows.items()
    }
    out = cast("Any", model)(
        input_ids=ids, attention_mask=masks.get("", masks), position_ids=places, past_key_values=cache, use_cache=True
    )
    return out.logits
