"""Passes over a text as drafting makes them: each round begins on the target's keys and values and continues by itself.

An answer's columns, cut into rounds of a window of 4; the first token a round feeds is the last committed one:

    column        t     t+1   t+2   t+3 | t+4   t+5   t+6   t+7
    fed           r     x1    x2    x3  | r'    x1'   x2'   x3'
    keys of       target's, columns < t | target's, columns < t+4
                  and r .. itself       | and r' .. itself

Rows of all rounds share a pass over the keys of the text, so that it costs as much as the answers' columns.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ...attention.masks import layer_masks
from .common import shifted
from .images import ImageRows

Windows: TypeAlias = dict[str, int | None]
"""Columns that each kind of layer sees, see `models.windows_of`; None: all."""


@final
@dataclass(frozen=True)
class Rounds:
    """Rows of a pass; R is the same for every text, what is missing is not supervised.

    column: of the fed token, -1 where there is none. start: column of the first token of its round, another one for
    each round of a text.
    """

    column: Tensor  # [B, R]
    start: Tensor  # [B, R]

    @property
    def counts(self) -> Tensor:
        """True for rows that hold a token. [B, R]."""
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

    def masks(self, width: int, windows: Windows, dtype: torch.dtype) -> "Tensor | dict[str, Tensor]":
        """Additive masks over the text's columns and the rows, see `layer_masks`."""
        places = self.column.clamp_min(0)
        text = torch.arange(width, device=places.device).expand(len(places), -1)
        back = places[:, :, None] - torch.cat([text, places], -1)[:, None]  # [B, R, width + R]
        return layer_masks(self.visible(width), back, windows, dtype)

    def moved(self, by: Tensor) -> "Rounds":
        """The same rounds of texts whose columns lie `by` [B] further on."""
        far = by[:, None]
        return Rounds(*(torch.where(self.counts, x + far, x) for x in (self.column, self.start)))

    def take(self, x: Tensor, by: int = 0) -> Tensor:
        """Values [B, T, ...] at the rows' columns + by, for those that count. [M, ...]."""
        texts = torch.arange(len(x), device=x.device)[:, None].expand_as(self.column)
        return x[texts[self.counts], self.column[self.counts] + by]


def rounds_of(is_answer: Tensor, window: int, phases: Tensor) -> Rounds:
    """Every column before an answer's token, cut into rounds of `window`.

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
    """`count` rounds a text at random columns before an answer's token, all as deep as the window."""
    feeds = shifted(is_answer, 1)
    roots = torch.rand(feeds.shape, device=feeds.device).masked_fill(~feeds, -1.0).argsort(1, descending=True)
    roots = roots[:, :count]
    there = feeds.gather(1, roots)
    steps = torch.arange(window, device=feeds.device)
    column = torch.where(there[..., None], roots[..., None] + steps, -1).flatten(1)
    alone = -1 - torch.arange(column.shape[1], device=feeds.device)
    start = torch.where(there, roots, -1)[..., None].expand(-1, -1, window).flatten(1)
    return Rounds(column, torch.where(column >= 0, start, alone))


def read_text(
    model: nn.Module, ids: Tensor, first: int, rows: ImageRows | None, windows: Windows
) -> tuple[Tensor, DynamicCache]:
    """Logits [B, T - first, V] of the columns from `first` on, and the keys and values of all.

    rows: what is read instead of `ids` where prompts may hold images.
    """
    cache = DynamicCache()
    options: dict[str, object] = {"past_key_values": cache, "use_cache": True, "logits_to_keep": ids.shape[1] - first}
    if rows is None:
        return cast("Any", model)(input_ids=ids, **options).logits, cache
    columns = torch.arange(ids.shape[1], device=ids.device)
    back, both = columns[:, None] - columns, rows.both_ways
    seen = (back >= 0).expand(len(ids), -1, -1)
    if not rows.cross_window:
        seen = seen | both
    always = both if rows.cross_window else None
    masks = layer_masks(seen, back.expand_as(seen), windows, cast("Any", model).dtype, always)
    return cast("Any", model)(attention_mask=masks, **rows.inputs(model, ids), **options).logits, cache


def read_rounds(
    model: nn.Module, ids: Tensor, rounds: Rounds, cache: DynamicCache, windows: Windows, offsets: Tensor | None = None
) -> Tensor:
    """Logits [B, R, V] of tokens [B, R] fed in rounds over a text's keys and values, to which theirs are appended.

    offsets: of each text [B], what is added to a column to get a position.
    """
    places = rounds.column.clamp_min(0)
    out = cast("Any", model)(
        input_ids=ids, attention_mask=rounds.masks(int(cache.get_seq_length()), windows, cast("Any", model).dtype),
        position_ids=places if offsets is None else places + offsets[:, None], past_key_values=cache, use_cache=True,
    )  # fmt: skip
    return out.logits
