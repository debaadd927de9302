"""With invariant numerics, candidates before mask tokens have the bits of plain decoding; so the answers do too."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from paceline.core.tree import TokenTree
from paceline.target import LoadedModel, ModelRunner, make_runner, wrap_model
from tests.attention.common import held
from tests.helpers import on_torch, prompt
from tests.kernels.test_passes import rows
from tests.methods.space.common import adapter, hung, hung_chain
from tests.tiny import tiny_model

K = 5
WIDE = {"hidden_size": 256, "intermediate_size": 688, "head_dim": 64, "max_position_embeddings": 512}
"""Large enough that a matrix product has several kernels to choose from."""
KINDS = [
    ("llama", torch.float32),
    ("torch llama", torch.float32),
    ("llama", torch.bfloat16),
    ("qwen2-sliding", torch.float32),
    ("gemma3", torch.float32),
]
"""The last has a window too, and layers as transformers has them: masks reach it through `inputs_embeds`."""
BRANCHING = [5, 9, 31, 7, 9, 40], [-1, 0, 1, 0, 3, 3]


@cache
def target(name: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    model = tiny_model(name.split()[-1], dtype, **WIDE)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.mul_(0.3)  # or attention picks one column, and no order of sums shows
    return on_torch(model) if name.startswith("torch ") else wrap_model(model)


@cache
def attached(name: str, dtype: torch.dtype = torch.float32) -> ModelRunner:
    runner = make_runner(target(name, dtype), 3, invariant=True)
    runner.attach_adapter(adapter(name.split()[-1], K, strength=0.1, **WIDE))
    return runner


def same_bits(runner: ModelRunner, lengths: list[int], tree: TokenTree) -> bool:
    """Whether every candidate of a tree has the bits of plain decoding, behind texts of these lengths."""
    texts = [prompt(length, seed=length) for length in lengths]
    slots = [runner.admit(text) for text in texts]
    try:
        for slot, text in zip(slots, texts, strict=True):
            runner.extend_cache(slot, text)
        expected = []
        for row, slot in enumerate(slots):
            for node in range(tree.num_nodes):
                if not tree.is_probe[row, node]:
                    path = [0, *tree.rows[row].path_to(node)]
                    expected.append(rows(runner, slot, [int(tree.token_ids[row, i]) for i in path])[-1])
        logits = runner.forward(slots, tree)
        return torch.equal(logits[~tree.is_probe], torch.stack(expected))
    finally:
        for slot in slots:
            runner.cache.release(slot)


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("length", [3, 40, 59, 61, 63, 64, 127])
def test_chains_before_masks(kind, length):
    assert same_bits(attached(*kind), [length], hung_chain([[5, 9, 31, 7, 9, 40]], [K]))
    assert same_bits(attached(*kind), [length], hung_chain([[5]], [K]))


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("length", [3, 60, 62, 127])
def test_branching_trees_before_masks(kind, length):
    assert same_bits(attached(*kind), [length], hung([BRANCHING[0]], [BRANCHING[1]], [K]))


@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_rows_of_a_batch(kind):
    assert same_bits(attached(*kind), [60, 5, 130], hung_chain([[5, 9, 31, 7], [8], [7, 4, 50]], [4, 5, 0]))
    tokens, parents = [BRANCHING[0], [8, 3, 3], [6]], [BRANCHING[1], [-1, 0, 0], [-1]]
    assert same_bits(attached(*kind), [62, 5, 130], hung(tokens, parents, [2, 0, 5]))


def test_what_the_bits_rest_on():
    runner, tree = attached("torch llama"), hung([BRANCHING[0]], [BRANCHING[1]], [K])
    runner.use(replace(runner.settings, invariant=False))  # one call for all nodes, as with fast numerics
    assert not all(same_bits(runner, [length], tree) for length in (60, 62, 127))


def test_the_context_ends_and_the_cache_grows():
    """(k + 1)^2 rows reach past the context and past the columns there are; what is committed keeps its bits."""
    for limit, length in ((64, 58), (512, 250), (512, 505)):
        runner = make_runner(target("llama", torch.float32), 2, limit, invariant=True)
        runner.attach_adapter(adapter("llama", K, strength=0.1, **WIDE))
        slot = runner.admit(prompt(length))
        runner.extend_cache(slot, prompt(length))
        before = held(runner, slot)
        tree = hung_chain([[5, 9, 31, 7, 9, 40]], [K])
        expected = rows(runner, slot, [5, 9, 31, 7, 9, 40])
        logits = runner.forward([slot], tree)[0]
        assert torch.isfinite(logits).all()
        assert torch.equal(logits[:6], expected)
        assert all(torch.equal(a, b) for a, b in zip(held(runner, slot), before, strict=True))
        runner.commit([slot], [[1, 2, 3]])
        assert runner.cache.lengths[slot] == length + 4
        again = rows(runner, slot, [9, 40])
        assert torch.equal(again, expected[4:])


def test_masks_left_in_the_cache_would_show(monkeypatch):
    """The check above can fail: one column too many is kept."""
    runner = attached("llama", torch.float32)
    slot = runner.admit(prompt(20))
    runner.extend_cache(slot, prompt(20))
    expected = rows(runner, slot, [5, 9])
    runner.forward([slot], hung_chain([[5]], [K]))
    runner.commit([slot], [[1]])
    assert not torch.equal(rows(runner, slot, [9])[0], expected[1])
    runner.cache.release(slot)
