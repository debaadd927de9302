"""Passes by the kernels of a GPU against transformers, and bit for bit against one row at a time."""

import copy
import random

import pytest
import torch

from paceline.core.tree import TokenTree
from paceline.errors import ConfigError
from paceline.kernels.gpu import Blocks as gpu_blocks
from paceline.kernels.gpu import attention
from paceline.kernels.gpu.rows import embed
from paceline.kernels.library import BlockFormat
from paceline.target import ModelRunner, wrap_model
from paceline.target.load import with_kv_cache
from tests.kernels.test_passes import DTYPES, has_bits_of_rows, random_tree, rows
from tests.tiny import tiny_model

DENSE = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "granite", "starcoder2"]


@pytest.mark.diagonal("slow")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", DENSE)
def test_logits_are_those_of_transformers(name, dtype):
    """After a prompt and along a chain, within the rounding of the weights' type."""
    model = tiny_model(name, dtype)
    ids = torch.randint(3, 97, (1, 14), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        want = copy.deepcopy(model).float()(ids).logits[0]
    runner = ModelRunner(wrap_model(model), 2, 64)
    assert runner.loaded.is_native
    slot = runner.cache.allocate()
    runner.extend_cache(slot, ids[0, :11].tolist())
    got = runner.forward([slot], TokenTree.chain([ids[0, 11:].tolist()]))[0]
    error = (got - want[11:]).abs().max() / want.std()
    assert error < {torch.float32: 1e-4, torch.float16: 0.04, torch.bfloat16: 0.3}[dtype]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=pytest.mark.slow if i != j else ())
        for i, name in enumerate(("llama", "gemma3", "olmo2"))
        for j, dtype in enumerate(DTYPES)
    ],
    ids=str,
)
def test_a_row_has_the_same_bits_in_every_pass(name, dtype):
    """A tree beside another one, after texts read in different chunks, against one row at a time."""
    rng = random.Random(f"{name} {dtype}")
    runner = ModelRunner(wrap_model(tiny_model(name, dtype)), 3, 100)
    slots = [runner.cache.allocate() for _ in range(3)]
    text = [rng.randrange(3, 97) for _ in range(11)]
    runner.extend_cache(slots[0], text)
    runner.extend_cache(slots[1], text[:4])
    runner.extend_cache(slots[1], text[4:])
    runner.extend_cache(slots[2], text[:5])
    tree, other = random_tree(7, rng), random_tree(4, rng)
    together = runner.forward([slots[2], slots[0]], TokenTree.of((other.rows[0], tree.rows[0])))
    assert not together[0, 4:].any(), "what pads a tree is not computed"
    assert has_bits_of_rows(together[1], runner, slots[1], tree)


def test_a_cache_in_fp8(gpu):
    """Its numbers are rounded ones; bits of rows hold as in other caches; a model takes half the bytes."""
    plain = wrap_model(tiny_model("llama", torch.bfloat16, num_hidden_layers=1))
    runners = [ModelRunner(model, 2, 64) for model in (plain, with_kv_cache(plain, "fp8"))]
    for runner in runners:
        for _ in range(2):
            runner.extend_cache(runner.cache.allocate(), [5, 6, 7, 8, 9])
    wide, narrow = (runner.cache.keys[0][0, :, :5] for runner in runners)
    torch.testing.assert_close(narrow.view(torch.float8_e4m3fn).float(), wide.float(), rtol=0.07, atol=0.002)
    tree = TokenTree.from_lists([[10, 11, 12, 13]], [[-1, 0, 0, 2]])
    got = runners[1].forward([0], tree)[0]
    assert torch.equal(got[[0, 2, 3]], rows(runners[1], 1, [10, 12, 13]))
    assert runners[0].cache.num_bytes == 2 * runners[1].cache.num_bytes


def test_a_cache_in_int8_is_refused():
    with pytest.raises(ConfigError, match="whose kernels read FP8"):
        with_kv_cache(wrap_model(tiny_model("llama")), "int8")


def test_long_texts_are_read_some_rows_at_a_time(monkeypatch):
    """With the same bits, where the chunks of all rows would not fit into memory."""
    model = wrap_model(tiny_model("llama", num_hidden_layers=1))

    def read() -> torch.Tensor:
        runner = ModelRunner(model, 2, 64)
        slots = [runner.cache.allocate() for _ in range(2)]
        return runner.forward(slots, TokenTree.chain([[5 + i for i in range(19)], [40 + i for i in range(19)]]))

    whole = read()
    monkeypatch.setattr(attention, "_BYTES", 0)
    assert torch.equal(read(), whole)


@pytest.mark.parametrize("kind", ["numbers", "blocks"])
def test_a_token_without_a_row_reads_nothing(kind):
    """Ids that come from the device are not checked; what lies behind the table must not be read."""
    table = torch.rand(5, 64)
    if kind == "blocks":
        raw = torch.zeros(5, 2 * 34, dtype=torch.uint8)
        raw[:, 2:], raw[:, 1] = 3, 60
        table = gpu_blocks.of(BlockFormat.Q8_0, (5, 64), lambda some: raw[some], raw.device).matrix
    out = torch.ones(2, 64)
    embed(table, torch.tensor([4, 5], dtype=torch.int32), out, 1.0)
    assert out[0].all()
    assert not out[1].any()
