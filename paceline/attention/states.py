"""Cached hidden states of the target, for drafters that read them: one row for each cached token.

States are numbered as in transformers: state i is the input of layer i (0: the embeddings), and the last one is taken
after the final norm. A column of the store belongs to the same token as that column of the `SlotCache`.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor


class StateStore:
    """The states of the watched layers for each token; nothing is stored where no layer is watched.

    is_shared: all slots have the same columns, for states that are read before the next pass.
    """

    def __init__(self, num_slots: int, layers: tuple[int, ...] = (), is_shared: bool = False):
        self.num_slots, self.layers, self.is_shared = num_slots, layers, is_shared
        self._rows: Tensor | None = None  # [slots, capacity, len(layers), E]

    def watch(self, layers: Iterable[int]) -> None:
        """Also store these states, from the next pass on."""
        before, self.layers = self.layers, tuple(sorted({*self.layers, *layers}))
        if self._rows is not None and self.layers != before:
            held = self._rows
            self._rows = held.new_zeros(*held.shape[:2], len(self.layers), held.shape[3])
            self._rows[:, :, self._places(before)] = held

    @torch.inference_mode()
    def write(
        self, slots: Sequence[int], starts: Sequence[int], states: Mapping[int, Tensor], num_nodes: int, capacity: int
    ) -> None:
        """Write the states [B, N, E] of the first `num_nodes` nodes after the committed columns of each slot."""
        new = torch.stack([states[layer] for layer in self.layers], 2)
        held = self.rows(capacity, new.shape[3], new)
        for row, (slot, start) in enumerate(zip(slots, starts, strict=True)):
            held[slot, start : start + num_nodes] = new[row, :num_nodes]

    def rows(self, capacity: int, width: int, like: Tensor) -> Tensor:
        """The store itself, [slots, columns, watched layers, E], with at least `capacity` columns. width: E."""
        held = self._rows
        if held is None or held.shape[1] < capacity:
            larger = like.new_zeros(1 if self.is_shared else self.num_slots, capacity, len(self.layers), width)
            if held is not None:
                larger[:, : held.shape[1]] = held[: len(larger)]
            held = self._rows = larger.expand(self.num_slots, -1, -1, -1)
        return held

    @torch.inference_mode()
    def commit(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        """Move the accepted rows of a pass that began at `start` next to its root, as `SlotCache.commit` does."""
        if self._rows is not None and list(nodes) != list(range(1, len(nodes) + 1)):
            held = self._rows[slot]
            held[start + 1 : start + 1 + len(nodes)] = held[[start + node for node in nodes]]

    def read(self, slot: int, begin: int, end: int, layers: Sequence[int]) -> Tensor:
        """The states of columns `begin` to `end`, those of several layers concatenated. [M, len(layers) E]."""
        assert self._rows is not None
        held = self._rows[slot, begin:end]
        return (held.clone() if tuple(layers) == self.layers else held[:, self._places(layers)]).flatten(1)

    def all(self, columns: int) -> dict[int, Tensor]:
        """For each watched layer, the states of the first columns of every slot. [slots, columns, E]."""
        assert self._rows is not None
        return dict(zip(self.layers, self._rows[:, :columns].unbind(2), strict=True))

    def _places(self, layers: Iterable[int]) -> list[int]:
        return [self.layers.index(layer) for layer in layers]
