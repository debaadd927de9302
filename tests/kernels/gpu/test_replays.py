"""Passes recorded and replayed, as CUDA graphs are; and mutants, each of which must be noticed."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from paceline.core.tree import TokenTree
from paceline.kernels.gpu import graphs
from paceline.target import LoadedModel, ModelRunner, wrap_model
from tests.helpers import prompt
from tests.kernels.gpu.tape import Tape, recorded
from tests.tiny import tiny_model


@cache
def target() -> LoadedModel:
    return wrap_model(tiny_model("llama", num_hidden_layers=1, max_position_embeddings=1024))


@torch.inference_mode()
def walk() -> list[torch.Tensor]:
    """Logits and states of passes over other tokens, trees, lengths and slots, before and after the cache has grown."""
    runner, found = ModelRunner(target().with_model(target().model), 2), []
    runner.states.watch([1])
    for length in (5, 3):
        runner.extend_cache(runner.cache.allocate(), prompt(length))
    for turn, slots in enumerate(([0], [1], [0], [1, 0], [0, 1])):
        if turn == 2:
            runner.cache.ensure(400)
        parents = [[-1, 0, turn % 2]] * len(slots)
        found.append(runner.forward(slots, TokenTree.from_lists([prompt(3, turn + slot) for slot in slots], parents)))
        found += [runner.read_states(slot, 0, runner.cache.lengths[slot] + 3, [1]) for slot in slots]
        runner.commit(slots, [[2]] * len(slots))
    return found


@cache
def expected() -> list[torch.Tensor]:
    return walk()


def tapes_of_the_same_bits(monkeypatch) -> list[Tape]:
    """The tapes of a walk. Raises AssertionError if its bits are not those of passes that are not replayed."""
    made: list[Tape] = []
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "Repeated", recorded(made))
        assert all(torch.equal(a, b) for a, b in zip(walk(), expected(), strict=True))
    return made


def test_nothing_of_a_pass_stands_in_python(monkeypatch):
    expected()
    tapes = tapes_of_the_same_bits(monkeypatch)
    assert len(tapes) == 5  # two texts, a tree before and after growth, two trees
    assert all(tape.num_launches > 5 and not tape.waits for tape in tapes)


def test_a_tape_notices_what_waits_for_the_device():
    x = torch.arange(4.0)
    for work in (x.max().item, lambda: x[x > 1], lambda: bool((x > 1).any()), x.nonzero):
        with Tape() as tape:
            work()
        assert tape.waits
    with Tape() as tape:
        _ = x[torch.tensor([1, 2])] * 2
    assert not tape.waits


compute = graphs.compute


def _with_lengths_read_back(model, step, inputs):
    return compute(model, step, replace(inputs, starts=torch.tensor(inputs.starts.tolist(), dtype=torch.int32)))


def _by_shape_alone(step, nodes):
    return step.batch, nodes, step.head_rows, step.parents is None, graphs._columns(step)


MUTANTS = {
    "a value baked into the recording": ("compute", _with_lengths_read_back),
    "a cache that was left": ("_key", _by_shape_alone),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    expected()
    monkeypatch.setattr(graphs, *MUTANTS[mutant])
    with pytest.raises(AssertionError):
        tapes_of_the_same_bits(monkeypatch)


def test_trees_of_several_sizes_share_a_shape():
    """What pads the smaller ones is another number of nodes each time."""
    runner, tokens = ModelRunner(target(), 1), prompt(19)
    slot = runner.cache.allocate()
    whole, *shorter = (runner.forward([slot], TokenTree.chain([tokens[:count]])) for count in (19, 17, 18, 19))
    for logits in shorter:
        assert torch.equal(logits, whole[:, : logits.shape[1]])
