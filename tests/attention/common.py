"""What the cache must hold, and the faults a cache could have."""

import torch

from paceline.attention.masks import Chunk, PassLayout
from paceline.core.interfaces import Drafter
from paceline.core.request import SamplingParams, TokenSequence
from paceline.engine.loop import SpeculativeDecoder
from paceline.policy import Fixed
from paceline.target import LoadedModel, ModelRunner, SlotCache
from paceline.target import loaded as loaded_model
from paceline.verify import Coupled
from tests.helpers import admit, sequence
from tests.helpers import runner as shared_runner

Rows = list[torch.Tensor]
"""Keys, then values, of every layer: [H, length, dim]."""


def held(runner: ModelRunner, slot: int) -> Rows:
    """The committed rows of a slot."""
    length = runner.cache.lengths[slot]
    return [layer[slot, :, :length].clone() for layer in (*runner.cache.keys, *runner.cache.values)]


def prefilled(loaded: LoadedModel, ids: list[int]) -> Rows:
    """The rows of another cache that read the same tokens at once."""
    fresh = shared_runner(loaded, 1)
    slot = fresh.admit(ids)
    fresh.extend_cache(slot, ids)
    rows = held(fresh, slot)
    fresh.cache.release(slot)
    return rows


def agree(ours: Rows, theirs: Rows, tolerance: float = 1e-4) -> bool:
    return all(
        a.shape == b.shape and torch.allclose(a, b, atol=tolerance, rtol=tolerance)
        for a, b in zip(ours, theirs, strict=True)
    )


def sound_after_every_round(
    runner: ModelRunner, drafter: Drafter, ids: list[int], rounds: int, params: SamplingParams, depth: int = 4
) -> bool:
    """True iff after every round the cache holds what a fresh prefill of the same text holds."""
    decoder = SpeculativeDecoder(runner, drafter, Coupled(), Fixed(depth, 64))
    seq: TokenSequence = sequence(runner.loaded, ids, params)
    admit(decoder, seq)
    try:
        for _ in range(rounds):
            decoder.step([seq])
            if runner.cache.lengths[seq.slot] != seq.num_cached:
                return False
            if not agree(held(runner, seq.slot), prefilled(runner.loaded, seq.token_ids[:-1])):
                return False
        return True
    finally:
        decoder.release(seq)


class KeepsOneTooMany(SlotCache):
    def commit(self, slot, nodes):
        super().commit(slot, nodes)
        self.lengths[slot] += 1


class KeepsOneTooFew(SlotCache):
    def commit(self, slot, nodes):
        super().commit(slot, nodes)
        self.lengths[slot] -= 1


class GathersTheFirstRows(SlotCache):
    """The accepted rows stay where they were: right for chains only."""

    def commit(self, slot, nodes):
        super().commit(slot, list(range(1, len(nodes) + 1)))


class GathersWithoutACopy(SlotCache):
    """Moves row by row from the back, so a source may be overwritten before it is read."""

    def commit(self, slot, nodes):
        start, kept = self.lengths[slot], len(nodes)
        for layer in (*self.keys, *self.values):
            for place in range(kept, 0, -1):
                layer[slot, :, start + place] = layer[slot, :, start + nodes[place - 1]]
                if nodes[place - 1] != place:
                    layer[slot, :, start + nodes[place - 1]] = 0
        self.lengths[slot] = start + 1 + kept


class ForgetsToGrow(SlotCache):
    """Loses what was cached when the capacity doubles."""

    def ensure(self, length):
        before = self.capacity
        super().ensure(length)
        if self.capacity != before:
            for layer in (*self.keys, *self.values):
                layer.zero_()


class TreePlusOne(PassLayout):
    """Every node of a tree one position too far on."""

    @property
    def position_ids(self):
        return self.columns + (self.tree is not None)


class RowNumbers(PassLayout):
    """Position = row index, not depth."""

    @property
    def position_ids(self):
        return torch.tensor(self.starts)[:, None] + torch.arange(self.num_nodes)


class SiblingsSeen(PassLayout):
    """A node sees everything before it in the tree."""

    def _visible(self, row, window):
        mask = super()._visible(row, window)
        start, n = self.starts[row], self.num_nodes
        mask[:, start : start + n] = torch.ones(n, n, dtype=torch.bool).tril()
        return mask


class NoWindow(PassLayout):
    """Sliding layers see the whole past in trees."""

    def _visible(self, row, window):
        return super()._visible(row, window if self.tree is None else None)


class LateChunks(PassLayout):
    """Chunks of attention end one column too late in trees."""

    def _visible(self, row, window):
        late = isinstance(window, Chunk) and self.tree is not None
        return super()._visible(row, Chunk(window.size + 1) if late else window)


CACHE_MUTANTS = [KeepsOneTooMany, KeepsOneTooFew, GathersTheFirstRows, GathersWithoutACopy]
LAYOUT_MUTANTS = [TreePlusOne, RowNumbers, SiblingsSeen]


def with_cache(runner: ModelRunner, mutant: type[SlotCache]) -> ModelRunner:
    runner.cache = mutant(runner.cache.num_slots, runner.max_length)
    return runner


def with_layout(monkeypatch, loaded: LoadedModel, mutant: type[PassLayout]) -> None:
    """Passes from now on are laid out by the mutant; runners made before have passed their self-test already."""
    shared_runner(loaded, 1)
    monkeypatch.setattr(loaded_model, "PassLayout", mutant)
