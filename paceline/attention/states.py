"""Hidden states of the target for drafters that read them: one row a cached token, kept and dropped with its keys.

States are counted as transformers does: state i enters layer i (0: the embeddings), the last one has been through the
final norm. A column of the store belongs to the same token as that column of the cache:

    columns       0 ......... L-1   | L     L+1 .. L+N-1
    holds         committed tokens  | root  other nodes of the pass in progress
    after commit  0 ......... L + a              accepted rows moved to the front, as in `SlotCache`
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

States: TypeAlias = dict[int, Tensor]
"""States of one pass by layer: requested as empty tensors, filled in as [B, N, E]."""


class StateStore:
    """States of the watched layers, `[slots, capacity, E]` each; nothing is kept until `watch` is called.

    kept: False while sequences are decoded whose drafter reads none; the others' rows stay as they are.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.layers: tuple[int, ...] = ()
        self.kept = True  # whether passes in progress keep them
        self._rows: dict[int, Tensor] = {}

    def watch(self, layers: Iterable[int]) -> None:
        """Also keep these states, from the next pass on."""
        self.layers = tuple(sorted({*self.layers, *layers}))

    @torch.inference_mode()
    def write(self, slots: Sequence[int], starts: Sequence[int], states: Mapping[int, Tensor], capacity: int) -> None:
        """Put the states [B, N, E] of a pass behind the committed columns of each slot."""
        for layer in self.layers:
            new = states[layer]
            held = self._ensured(layer, new, capacity)
            for row, (slot, start) in enumerate(zip(slots, starts, strict=True)):
                held[slot, start : start + new.shape[1]] = new[row]

    @torch.inference_mode()
    def commit(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        """Move the accepted rows of a pass that began at `start` behind its root, as `SlotCache.commit` does."""
        if list(nodes) != list(range(1, len(nodes) + 1)):
            for held in self._rows.values():
                held[slot, start + 1 : start + 1 + len(nodes)] = held[slot, [start + node for node in nodes]]

    def read(self, slot: int, begin: int, end: int, layers: Sequence[int]) -> Tensor:
        """The states of columns `begin` to `end`, side by side where they are of several layers. [M, len(layers) E]."""
        return torch.cat([self._rows[layer][slot, begin:end] for layer in layers], -1)

    def _ensured(self, layer: int, like: Tensor, capacity: int) -> Tensor:
        held = self._rows.get(layer)
        if held is None or held.shape[1] < capacity:
            grown = like.new_zeros(self.num_slots, capacity, like.shape[2])
            if held is not None:
                grown[:, : held.shape[1]] = held
            held = self._rows[layer] = grown
        return held
