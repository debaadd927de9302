"""Low-rank terms in native passes: each row's own, with bits that depend on the row alone."""

import copy
import random

import pytest
import torch
from transformers import PreTrainedModel

from paceline.core.tree import TokenTree
from paceline.hf.corrections import Factors
from paceline.kernels import load
from paceline.target import ModelRunner, wrap_model
from paceline.target.corrections import LowRank
from tests.kernels.test_passes import has_bits_of_rows, random_tree
from tests.lora import linears
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")


class Owner:
    """What a slot of the cache holds for `low_rank`."""

    fingerprint = ""

    def __init__(self, low_rank: LowRank):
        self.low_rank = low_rank


def factors(model: PreTrainedModel, rank: int, seed: int, names: str) -> Factors:
    """Random ones for linear layers whose names begin with one of these letters."""
    made, pairs = torch.Generator().manual_seed(seed), dict[str, tuple[torch.Tensor, torch.Tensor]]()
    for path, one in linears(model).items():
        if path.rsplit(".")[-1][0] in names:
            a, b = (torch.randn(shape, generator=made) for shape in ((rank, one.in_features), (one.out_features, rank)))
            pairs[path] = (a / one.in_features**0.5).to(model.dtype), (b / rank**0.5).to(model.dtype)
    return pairs


def corrects_rows(dtype: torch.dtype = torch.float32, trials: int = 3) -> bool:
    """Whether rows of trees in a batch of mixed adapters, on two threads, have the bits of one row after another.

    And whether logits are those of merged weights.
    """
    rng, threads, model = random.Random(2), torch.get_num_threads(), tiny_model("llama", dtype)
    torch.set_num_threads(2)
    try:
        given = [{}, factors(model, 5, 0, "qkvogud"), factors(model, 40, 1, "kud"), {}]
        owners = [Owner(LowRank(one)) if one else None for one in given]
        runner = ModelRunner(wrap_model(tiny_model("llama", dtype)), 4, 200)
        slots = [runner.cache.allocate() for _ in owners]
        for _ in range(trials):
            order = rng.sample(range(4), 4)
            for slot, which in zip(slots, order, strict=True):
                runner.cache.truncate(slot, 0)
                runner.cache.adapters[slot] = owners[which]
                runner.extend_cache(slot, [rng.randrange(3, 97) for _ in range(rng.choice((1, 17, 60)))])
            trees = [random_tree(size, rng) for size in (7, 1, 12, 9)]
            together = runner.forward(slots, TokenTree.of(tree.rows[0] for tree in trees)).clone()
            for slot, tree, got in zip(slots, trees, together, strict=True):
                if not has_bits_of_rows(got, runner, slot, tree):
                    return False
        text = [rng.randrange(3, 97) for _ in range(20)]
        return all(near_merged(runner, slots[0], model, *one, text) for one in zip(given, owners, strict=True))
    finally:
        torch.set_num_threads(threads)


def near_merged(
    runner: ModelRunner, slot: int, model: PreTrainedModel, given: Factors, owner: Owner | None, text: list[int]
) -> bool:
    merged = copy.deepcopy(model).float()
    with torch.no_grad():
        for path, (a, b) in given.items():
            merged.get_submodule(path).weight += b.float() @ a.float()
        want = merged(torch.tensor([text])).logits[0, -1]
    runner.cache.truncate(slot, 0)
    runner.cache.adapters[slot] = owner
    runner.extend_cache(slot, text[:-1])
    got = runner.forward([slot], TokenTree.chain([text[-1:]]))[0, 0]
    return bool((got - want).abs().max() < {torch.float32: 1e-4}.get(model.dtype, 0.15) * want.std())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_have_their_own_corrections(dtype, isa):
    assert corrects_rows(dtype)
