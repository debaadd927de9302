"""Simulated draft rounds: each starts from the target's keys and values and continues with the draft's own.

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

from ..attention.masks import layer_masks
from ..hf.load import KV_CACHE
from .head_recipe import shifted
from .images import ModelInput

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

    @classmethod
    def of(cls, column: Tensor, start: Tensor) -> "Rounds":
        """Rows without a token, whose `start` may be any, are put alone, each in a round of its own."""
        alone = -1 - torch.arange(column.shape[1], device=column.device)
        return cls(column, start.where(column >= 0, alone))

    @property
    def counts(self) -> Tensor:
        """True for rows that hold a token. [B, R]."""
        return self.column >= 0

    @property
    def depth(self) -> Tensor:
        """How many tokens of its round come before the fed one. [B, R]."""
        return self.column - self.start

    def visible(self, width: int) -> Tensor:
        """What each row attends to: columns of the text, then rows. [B, R, width + R]."""
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
        return Rounds.of((self.column + by[:, None]).where(self.counts, -1), self.start + by[:, None])

    def take(self, x: Tensor, by: int = 0) -> Tensor:
        """Values [B, T, ...] at the rows' columns + by, for those that count. [M, ...]."""
        texts = torch.arange(len(x), device=x.device)[:, None].expand_as(self.column)
        return x[texts[self.counts], self.column[self.counts] + by]


def rounds_of(is_answer: Tensor, window: int, phases: Tensor | None = None) -> Rounds:
    """Every column before an answer's token, cut into rounds of `window`.

    phases: of each text, how many tokens its first round lacks [B]; None: none.
    """
    feeds = shifted(is_answer, 1)
    column = feeds.int().argsort(stable=True, dim=1, descending=True)[:, : max(1, int(feeds.sum(1).max()))]
    place = torch.arange(column.shape[1], device=column.device)
    phase = 0 if phases is None else phases[:, None].to(column.device)
    start = column[:, :1] + ((place + phase) // window * window - phase).clamp_min(0)
    return Rounds.of(column.where(feeds.gather(1, column), -1), start)


def drawn_rounds(is_answer: Tensor, window: int, count: int) -> Rounds:
    """`count` rounds a text at random columns before an answer's token, all as deep as the window."""
    feeds = shifted(is_answer, 1)
    chance = torch.rand(feeds.shape, device=feeds.device).masked_fill(~feeds, -1.0)
    roots = chance.argsort(1, descending=True)[:, :count]
    start = roots[..., None].expand(-1, -1, window)
    column = (start + torch.arange(window, device=feeds.device)).where(feeds.gather(1, roots)[..., None], -1)
    return Rounds.of(column.flatten(1), start.flatten(1))


def read_text(model: nn.Module, text: ModelInput, windows: Windows) -> tuple[Tensor, DynamicCache]:
    """Logits [B, T - first, V] of the columns from `text.first` on, and the keys and values of all."""
    cache, ids, rows = DynamicCache(), text.ids, text.rows
    kept = ids.shape[1] - text.first
    options: dict[str, object] = {KV_CACHE: cache, "use_cache": True, "logits_to_keep": kept}
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
    model: nn.Module, fed: Tensor, rounds: Rounds, text: ModelInput, cache: DynamicCache, windows: Windows
) -> Tensor:
    """Logits [B, R, V] of tokens [B, R] fed in rounds over a text's keys and values, to which theirs are appended."""
    places = rounds.column.clamp_min(0)
    masks = rounds.masks(int(cache.get_seq_length()), windows, cast("Any", model).dtype)
    return cast("Any", model)(
        input_ids=fed, attention_mask=masks, use_cache=True, **{KV_CACHE: cache},
        position_ids=places if text.rows is None else places + text.rows.offsets[:, None],
    ).logits  # fmt: skip
