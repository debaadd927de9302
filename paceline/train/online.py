"""The target's hidden states of a batch, computed again instead of stored: for data whose states would fill a disk."""

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch

from ..attention.kv_cache import SlotCache
from ..attention.masks import PassLayout
from ..runner import LoadedModel
from .recipe import Batch


@final
class OnlineStates:
    """Runs the target over texts of a batch, one after another, as a prefill does."""

    def __init__(self, target: LoadedModel):
        self._target = target

    @torch.no_grad()
    def __call__(self, batch: Batch, layers: Sequence[int]) -> Batch:
        """The batch with these states, zero at and after each answer's last token, as stored ones are."""
        rows, width = batch.token_ids.shape
        shape = rows, width, self._target.hidden_size
        states = {n: torch.zeros(shape, dtype=self._target.dtype, device=self._target.device) for n in layers}
        last = (batch.is_answer * torch.arange(width)).amax(1).tolist()  # column of each answer's last token
        for row, end in enumerate(last):
            for layer, read in self._read(batch.token_ids[row, None, :end], layers).items():
                states[layer][row, :end] = read[0]
        return replace(batch, states=states)

    def _read(self, token_ids: torch.Tensor, layers: Sequence[int]) -> dict[int, torch.Tensor]:
        """States [1, T, E] of one text [1, T]."""
        target, length = self._target, token_ids.shape[1]
        cache = SlotCache(1, length)
        starts = cache.begin([cache.allocate()], length, whole=target.attends_trees)
        layout = PassLayout(starts, length, None, False, 1, length, [0], device=target.device)
        states = {layer: torch.empty(0) for layer in layers}
        target.prefill(token_ids.to(target.device), layout, cache, states)
        return states
