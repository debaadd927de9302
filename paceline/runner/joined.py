"""The layout of a pass that is several passes side by side: products take all rows, attention part by part."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import torch
from torch import Tensor, nn

from .kv_cache import round_up
from .layout import PassLayout


@final
@dataclass
class JoinedLayout(PassLayout):
    """A pass whose rows are those of several passes of one slot, one behind another; further rows pad it.

    parts: how each is attended to: as the pass that it would be alone.
    """

    parts: tuple[PassLayout, ...] = field(default_factory=tuple[PassLayout, ...])

    @cached_property
    def position_ids(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Those of the parts; rows that pad are at 0. [B, N], or [axes, B, N] where the parts have axes."""
        places = torch.cat([part.position_ids for part in self.parts], -1)
        return nn.functional.pad(places, (0, self.num_nodes - places.shape[-1]))

    def mask_4d(self, dtype: torch.dtype) -> Tensor:
        """Those of the parts below one another. [B, 1, N, S]; rows that pad see the first column."""
        masks = [part.mask_4d(dtype) for part in self.parts]
        width, lowest = round_up(self.starts[0] + self.num_nodes), torch.finfo(dtype).min
        mask = torch.cat([nn.functional.pad(m, (0, width - m.shape[-1]), value=lowest) for m in masks], 2)
        mask = nn.functional.pad(mask, (0, 0, 0, self.num_nodes - mask.shape[2]), value=lowest)
        mask[:, :, sum(part.num_nodes for part in self.parts) :, 0] = 0
        return mask
