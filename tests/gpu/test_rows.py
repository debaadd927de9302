"""Passes on a GPU: a row has the same bits in every pass, in every format, and they are near those of float64."""

import copy
import random

import pytest
import torch

from paceline.core.tree import TokenTree
from paceline.target import LoadedModel, ModelRunner, with_weights, wrap_model
from tests.gpu.conftest import HAS_CUDA
from tests.kernels.test_passes import assert_same_cache, has_bits_of_rows, random_tree, rows

FORMATS = [None, "int8", "int4", "fp8"]


def in_format(model, weights) -> LoadedModel:
    """Rounded weights, by kernels of a GPU."""
    loaded = wrap_model(model)
    loaded = loaded if weights is None else with_weights(loaded, weights)[0]
    assert loaded.is_native
    return loaded


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("weights", FORMATS)
def test_a_row_has_the_same_bits_in_every_pass(device, sized, model, weights):
    """Chains of all lengths, a tree beside another one, and texts read in other chunks, against one row at a time."""
    runner = ModelRunner(in_format(model(), weights), 3, sized(1024, 64))
    text, after, rng = tokens(sized(700, 5)), tokens(sized(64, 3), 1), random.Random(3)
    one, other, third = (runner.cache.allocate() for _ in range(3))
    runner.extend_cache(one, text)
    rest = list(text)
    for size in sized((1, 2, 15, 16, 17, 64, 65, 300), (2,)):
        runner.extend_cache(other, rest[:size])
        del rest[:size]
    runner.extend_cache(other, rest)
    assert_same_cache(runner, one, other, len(text))
    runner.extend_cache(third, text[: len(text) // 2])
    alone = rows(runner, one, after)
    for count in sized(range(1, 65), (3,)):
        assert torch.equal(runner.forward([other], TokenTree.chain([after[:count]], device))[0], alone[:count]), count
    for count in sized((2, 9, 30, 64), (3,)):
        tree, beside = random_tree(count, rng), random_tree(count // 2 + 1, rng)
        together = runner.forward([third, other], TokenTree.of((beside.rows[0], tree.rows[0])).to(device))
        assert has_bits_of_rows(together[1], runner, one, tree)


@pytest.mark.parametrize("weights", FORMATS)
def test_logits_are_near_those_of_float64(device, sized, model, weights):
    """By transformers, with the weights that the rounded layers say they have."""
    given = model()
    want, loaded = copy.deepcopy(given).double(), in_format(given, weights)
    for path, layer in loaded.model.named_modules():
        if hasattr(layer, "in_features"):
            want.get_submodule(path).weight.data = layer.weight.double()
    runner, ids = ModelRunner(loaded, 1, sized(1024, 64)), tokens(sized(200, 5))
    slot, cut = runner.cache.allocate(), len(ids) // 2
    runner.extend_cache(slot, ids[:cut])
    got = runner.forward([slot], TokenTree.chain([ids[cut : cut + 64]], device))[0].double()
    with torch.inference_mode():
        logits = want(torch.tensor([ids], device=device)).logits[0, cut : cut + 64]
    assert (got - logits).abs().max() / logits.std() < (0.6 if weights == "fp8" else 0.3)


def test_a_replayed_pass_has_the_bits_of_a_first_one(device, sized, model):
    from paceline.kernels.gpu import graphs

    runner = ModelRunner(in_format(model(), None), 2, sized(1024, 64))
    slots = [runner.cache.allocate() for _ in range(2)]
    for slot in slots:
        runner.extend_cache(slot, tokens(sized(250, 3), slot))
    rng = random.Random(1)
    for turn in range(sized(12, 2)):  # captured in the second turn; on a device the cache grows past a chunk
        count = sized((1, 4, 9, 33), (2,))[turn % sized(4, 1)]
        trees = TokenTree.of(random_tree(count, rng).rows[0] for _ in slots).to(device)
        found = runner.forward(slots, trees).clone()
        with graphs.off():
            assert torch.equal(runner.forward(slots, trees), found)
        runner.commit(slots, [[], []])


@pytest.mark.parametrize("cuda", [pytest.param("cuda", marks=HAS_CUDA)])
def test_passes_do_not_wait_for_the_device_nor_keep_memory(cuda):
    from tests.gpu.conftest import WIDE, tiny_model

    runner = ModelRunner(in_format(tiny_model("llama", torch.bfloat16, **WIDE).to(cuda), None), 4)
    slots = [runner.cache.allocate() for _ in range(2)]
    for slot in slots:
        runner.extend_cache(slot, tokens(40))
    trees = [TokenTree.chain([tokens(count)], cuda) for count in range(1, 65)]
    both = TokenTree.chain([[5, 6], [7, 8]], cuda)
    held = list[int]()
    try:
        for mode in ("default", "default", "error"):  # the first turn compiles, the second one captures
            torch.cuda.set_sync_debug_mode(mode)
            for tree in trees:
                runner.forward(slots[:1], tree)
            runner.forward(slots, both)
            torch.cuda.set_sync_debug_mode("default")
            held.append(torch.cuda.memory_allocated())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert held[2] <= held[1]
