"""Native passes against transformers, and bit for bit against one row at a time."""

import copy
import random
from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

from paceline.core.tree import TokenTree
from paceline.kernels import load
from paceline.target import LoadedModel, ModelRunner, wrap_model
from tests.helpers import prompt
from tests.tiny import NATIVE, tiny_model

pytestmark = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rows(runner: ModelRunner, slot: int, tokens: list[int]) -> torch.Tensor:
    """Logits [N, V] of a chain read one row at a time; the slot is left as it was."""
    found = []
    with runner.tentative([slot]):
        for token in tokens:
            found.append(runner.forward([slot], TokenTree.chain([[token]]))[0, 0].clone())
            runner.commit([slot], [[]])
    return torch.stack(found)


def has_bits_of_rows(got: torch.Tensor, runner: ModelRunner, slot: int, tree: TokenTree) -> bool:
    """Whether logits [N, V] along a tree are those of one row at a time, on each of its paths."""
    tokens = tree.token_ids[0]
    return all(torch.equal(got[path], rows(runner, slot, tokens[path].tolist())) for path in tree.rows[0].paths)


def random_tree(count: int, rng: random.Random) -> TokenTree:
    """A tree of any shape: chains, bushes, and siblings far apart."""
    bushy = rng.random()
    parents = [-1] + [rng.randrange(n) if rng.random() < bushy else n - 1 for n in range(1, count)]
    return TokenTree.from_lists([[rng.randrange(3, 97) for _ in range(count)]], [parents])


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NATIVE)
def test_logits_are_those_of_transformers(name, dtype):
    """After a prompt and along a tree, within the rounding of the weights' type."""
    model = tiny_model(name, dtype)
    ids = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        want = copy.deepcopy(model).float()(ids).logits[0]  # rounding of its own would depend on the machine
    runner = ModelRunner(wrap_model(model), 2, 128)
    assert runner.loaded.is_native
    slot = runner.cache.allocate()
    runner.extend_cache(slot, ids[0, :23].tolist())
    got = runner.forward([slot], TokenTree.chain([ids[0, 23:].tolist()]))[0]
    error = (got - want[23:]).abs().max() / want.std()
    assert error < {torch.float32: 1e-4, torch.float16: 0.04, torch.bfloat16: 0.15}[dtype]


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NATIVE)
def test_a_row_has_the_same_bits_in_every_pass(name, dtype, isa):
    """Random trees, neighbours, chunks and thread counts against one row at a time."""
    assert_same_bits(wrap_model(tiny_model(name, dtype)), random.Random(f"{name} {dtype}"))


def assert_same_bits(target: LoadedModel, rng: random.Random) -> None:
    """A row of this model has the bits of one row at a time, whatever shares its pass."""
    runner = ModelRunner(target, 3, 200)
    slots, threads = [runner.cache.allocate() for _ in range(3)], torch.get_num_threads()
    try:
        for _ in range(2):
            torch.set_num_threads(rng.choice((1, 2, 5)))
            text = [rng.randrange(3, 97) for _ in range(rng.choice((1, 14, 15, 47, 90)))]
            for slot in slots:
                runner.cache.truncate(slot, 0)
            runner.extend_cache(slots[0], text)
            cut = rng.randrange(len(text))
            runner.extend_cache(slots[1], text[:cut])
            runner.extend_cache(slots[1], text[cut:])
            runner.extend_cache(slots[2], text[: cut + 1])
            assert_same_cache(runner, slots[0], slots[1], len(text))
            tree = random_tree(rng.choice((1, 2, 7, 13, 30)), rng)
            others = [random_tree(rng.randint(1, tree.num_nodes), rng) for _ in range(2)]
            order = rng.sample(range(3), 3)
            shuffled = TokenTree.of(one.rows[0] for one in (tree, *others)).of_rows(order)
            together = runner.forward([slots[i] for i in order], shuffled)
            own = runner.forward(slots[:1], tree)[0]
            for slot, one, got in zip(slots, (tree, *others), together[torch.tensor(order).argsort()], strict=True):
                assert torch.equal(got[: one.num_nodes], runner.forward([slot], one)[0])
                assert not got[one.num_nodes :].any(), "what pads a tree is not computed"
            assert has_bits_of_rows(own, runner, slots[1], tree)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_wide_layers(dtype, isa):
    """Layers of several panels of weights, in passes of one tile and of many: the bits of one row at a time."""
    model = tiny_model("llama", dtype, hidden_size=320, intermediate_size=777)
    assert_same_rows(model, prompt(60, 3), (2, 3, 4, 5, 6, 7, 9, 12, 13, 25, 48, 49, 60), isa)


def assert_same_rows(model: PreTrainedModel, tokens: list[int], counts: Sequence[int], isa: str) -> None:
    """Chains of so many tokens have the bits of one row at a time, which are near the logits of transformers."""
    dtype, runner = model.dtype, ModelRunner(wrap_model(model), 1, 128)
    slot = runner.cache.allocate()
    alone = rows(runner, slot, tokens)
    for count in counts:
        assert torch.equal(runner.forward([slot], TokenTree.chain([tokens[:count]]))[0], alone[:count])
    with torch.inference_mode():
        want = model.float()(torch.tensor([tokens])).logits[0]
    bounds = {torch.float32: 1e-4, torch.float16: 0.04, torch.bfloat16: 0.3 if isa in ("avx512_bf16", "amx") else 0.15}
    assert (alone - want).abs().max() / want.std() < bounds[dtype]


def assert_same_cache(runner: ModelRunner, one: int, other: int, length: int) -> None:
    """Keys, values and states of two slots, bit for bit."""
    for layer in (*runner.cache.keys, *runner.cache.values):
        assert torch.equal(layer[one, :, :length], layer[other, :, :length])
    for state in () if runner.cache.recurrent is None else runner.cache.recurrent.states:
        assert torch.equal(state[one], state[other])


def test_every_family_that_is_described_is_native():
    """A form that the describer does not know would silently be slow."""
    target: LoadedModel
    for name in NATIVE:
        target = wrap_model(tiny_model(name))
        assert target.is_native, name
