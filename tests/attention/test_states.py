"""The states kept for drafters are those of plain transformers on the committed text, whatever was drafted."""

import random

import pytest
import torch

from paceline.attention.states import StateStore
from paceline.core.tree import TokenTree
from paceline.target import ModelRunner
from paceline.target import runner as model_runner
from tests.helpers import loaded, prompt
from tests.tiny import tiny_model

NAMES = ["llama", "qwen3", "gpt2", "gemma3", "phi"]  # with native passes and without
LAYERS = (0, 1, 2)


def expected(model, text: list[int]) -> torch.Tensor:
    """Untouched transformers on the whole text. [T, len(LAYERS) E]."""
    with torch.inference_mode():
        found = model(torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([found[layer][0] for layer in LAYERS], -1)


class Walk:
    """Sequences in slots of one runner, moved on by made-up trees along made-up paths."""

    def __init__(self, name: str, seed: int = 0):
        self.on, self.model = ModelRunner(loaded(name), 3), tiny_model(name)
        self.on.states.watch(LAYERS[:1])
        self.on.states.watch(LAYERS[1:])
        self.rng, self.texts = random.Random(seed), dict[int, list[int]]()

    def begin(self, length: int, keep_states: bool = True) -> int:
        text = prompt(length, self.rng.randrange(99))
        slot = self.on.admit(text)
        self.on.extend_cache(slot, text, keep_states)
        self.texts[slot] = text
        return slot

    def end(self, slot: int) -> None:
        self.on.cache.release(slot)
        del self.texts[slot]

    def round(self, slots: list[int], keep_states: bool = True) -> None:
        sizes = [self.rng.randint(1, 9) for _ in slots]
        parents = [[-1, *(self.rng.randrange(i) for i in range(1, n))] for n in sizes]
        tokens = [prompt(n, self.rng.randrange(99)) for n in sizes]
        tree = TokenTree.from_lists(tokens, parents)
        self.on.forward(slots, tree, keep_states=keep_states)
        paths = [tree.rows[row].path_to(self.rng.randrange(n)) for row, n in enumerate(sizes)]
        self.on.commit(slots, paths, keep_states)
        for slot, row, path in zip(slots, tokens, paths, strict=True):
            self.texts[slot] += [row[node] for node in (0, *path)]

    def sound(self) -> bool:
        for slot, text in self.texts.items():
            assert self.on.cache.lengths[slot] == len(text)
            ours = self.on.states.read(slot, 0, len(text), LAYERS)
            if not torch.allclose(ours, expected(self.model, text), atol=1e-3, rtol=1e-3):
                return False
        return True


def walked(name: str) -> bool:
    """Batches of one to three rows, slots given back and taken again; True iff the states were right after each."""
    walk = Walk(name)
    a, b = walk.begin(21), walk.begin(6)
    right = walk.sound()
    for slots in ([a], [b, a], [a, b]):
        walk.round(slots)
        right = right and walk.sound()
    walk.end(a)
    c, d = walk.begin(3), walk.begin(11)
    walk.round([d, c])
    walk.round([b, c, d])
    return right and walk.sound()


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(model_runner, "PREFILL_CHUNK", 8)


@pytest.mark.parametrize("name", NAMES)
def test_states_are_those_of_plain_transformers(name):
    assert walked(name)


def grown() -> Walk:
    """With a cache that can grow."""
    walk = Walk("llama")
    walk.on = ModelRunner(loaded("llama", max_position_embeddings=1024), 2)
    walk.model = tiny_model("llama", max_position_embeddings=1024)
    walk.on.states.watch(LAYERS)
    return walk


def test_states_survive_the_growth_of_the_cache():
    walk = grown()
    a = walk.begin(250)
    for _ in range(8):
        walk.round([a])
    assert walk.on.cache.capacity == 512
    assert walk.sound()


def test_trees_of_drafters_that_read_no_states_may_outgrow_them():
    walk = grown()
    a = walk.begin(30)
    b = walk.begin(250, keep_states=False)
    for _ in range(8):
        walk.round([b], keep_states=False)
    del walk.texts[b]
    walk.round([a])
    assert walk.sound()


def test_what_is_measured_between_rounds_leaves_no_trace():
    walk = Walk("llama")
    slot = walk.begin(12)
    walk.on.pass_seconds(4)
    walk.on.prefill_seconds(8)
    walk.round([slot])
    assert walk.sound()


class DoesNotGather(StateStore):
    def commit(self, slot, start, nodes):
        pass


class WritesOneTooFar(StateStore):
    def write(self, slots, starts, states, num_nodes, capacity):
        super().write(slots, [start + 1 for start in starts], states, num_nodes, capacity + 1)


class MixesRows(StateStore):
    def write(self, slots, starts, states, num_nodes, capacity):
        super().write(sorted(slots), starts, states, num_nodes, capacity)


class SkipsTheNorm(StateStore):
    def write(self, slots, starts, states, num_nodes, capacity):
        super().write(slots, starts, {**states, LAYERS[-1]: states[LAYERS[-2]]}, num_nodes, capacity)


@pytest.mark.parametrize("mutant", [DoesNotGather, WritesOneTooFar, MixesRows, SkipsTheNorm])
def test_mutants_are_caught(monkeypatch, mutant):
    """In passes of torch; those of native passes are among `tests/kernels/test_mutants.py`."""
    monkeypatch.setattr(model_runner, "StateStore", mutant)
    assert not walked("gpt2")
