"""Keys and values in INT8 and FP8: how they are rounded, what is read of them, and the bits of rows."""

import random
from typing import Literal

import pytest
import torch

from paceline.kernels import library as kernels
from paceline.kernels import load
from paceline.kernels.library import NumberFormat, Pointers, address
from paceline.target import ModelRunner, wrap_model
from paceline.target.load import with_kv_cache
from tests.kernels.expert_layers import Linear
from tests.kernels.kv_formats import ROUNDED, row_width, written
from tests.kernels.test_attention import attends
from tests.kernels.test_passes import assert_same_bits, random_tree, rows
from tests.tiny import NATIVE, tiny_model

pytestmark = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")

USUAL = ["llama", "gemma3", "qwen3_5", "deepseek_v2"]  # windows, recurrent layers beside attention, one latent for all
OTHERS = [name for name in NATIVE if name not in (*USUAL, "mamba2")]  # which has no attention


def cached(keys: torch.Tensor, values: torch.Tensor, form: NumberFormat) -> list[torch.Tensor]:
    """The bytes that a pass of one row stores for a key and a value, of one head."""
    held, width = Pointers(), len(keys)
    q, k, v = (Linear(width, 8) for _ in "qkv")
    for one, bias in ((k, keys), (v, values)):
        one.matrix.struct.bias = address(bias)
    layer = kernels.Layer(
        heads=1, kv_heads=1, head_dim=width, scale=1.0,
        **{name: one.matrix.struct for name, one in zip("qkv", (q, k, v), strict=True)},
    )  # fmt: skip
    model = kernels.Model(layers=held.structures(kernels.Layer, [layer]), num_layers=1, hidden=8, cache_format=2)
    model.kv_format, row = form, torch.zeros(1, 8)
    cache = [torch.full((1, 1, 1, row_width(form, width)), 99, dtype=torch.uint8) for _ in "kv"]
    step = kernels.Pass(
        batch=1, nodes=1, capacity=1, rows=address(row), max_position=0, starts=held.integers([0]),
        slots=held.integers([0]), keys=held.tensors(cache[:1]), values=held.tensors(cache[1:]), kv_only=1,
    )  # fmt: skip
    kernels.run(model, step)
    return [one.flatten() for one in cache]


def rounds_as_torch(form: NumberFormat) -> bool:
    """All numbers of e4m3, what lies between them, random rows, and what is not finite."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    some = torch.cat([codes, middles, middles * (1 + 2e-7), middles * (1 - 2e-7), torch.tensor([470.0, 1e30, 1e-30])])
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0, -1e-42, 0.0, -0.0])
    scaled = torch.randn(300) * 10 ** torch.linspace(-40, 38, 300)
    spread = torch.cat([torch.randn(64), torch.zeros(32), torch.randn(31) * 1e-44, special, torch.randn(40)])
    tests = [(some, -some), (scaled, -scaled), (spread, -spread), (torch.randn(16), torch.randn(16))]
    return all(
        torch.equal(got, written(want + 0.0, form))
        for pair in tests
        for got, want in zip(cached(*pair, form), pair, strict=True)
    )


@pytest.mark.parametrize("form", ROUNDED)
def test_rows_are_rounded_as_torch_rounds_them(form, isa):
    assert rounds_as_torch(form)


@pytest.mark.parametrize("width", [16, 36, 80])
@pytest.mark.parametrize("nodes", [1, 23, 150])
@pytest.mark.parametrize("form", ROUNDED)
def test_attention_reads_what_is_stored(form, nodes, width, isa):
    assert attends(nodes=nodes, width=width, form=form)
    assert attends(True, window=3, nodes=nodes, width=width, form=form)


@pytest.mark.parametrize("name", [*USUAL, *(pytest.param(n, marks=pytest.mark.more) for n in OTHERS)])
@pytest.mark.parametrize("form", ["int8", pytest.param("fp8", marks=pytest.mark.more)])
def test_a_row_has_the_same_bits_in_every_pass(name, form, isa):
    """Random trees, neighbours, chunks and thread counts against one row at a time."""
    model = wrap_model(tiny_model(name, torch.bfloat16))
    assert_same_bits(with_kv_cache(model, form), random.Random(f"{name} {form}"))


def keeps_columns(form: Literal["int8", "fp8"]) -> bool:
    """Whether accepted columns, a larger cache, and pages of another text give the bits of plain decoding."""
    model = wrap_model(tiny_model("llama", head_dim=48, max_position_embeddings=1024))
    runner = ModelRunner(with_kv_cache(model, form), 2, 600)
    rng, (slot, other) = random.Random(3), [runner.cache.allocate() for _ in range(2)]
    text = [rng.randrange(3, 97) for _ in range(20)]
    runner.extend_cache(slot, text)
    while len(text) < 300:  # beyond the first size of the cache
        tree = random_tree(12, rng)
        path = tree.rows[0].path_to(rng.randrange(1, 12))
        runner.forward([slot], tree)
        runner.commit([slot], [path])
        text += tree.token_ids[0, [0, *path]].tolist()
    runner.extend_cache(other, text)
    chain = [5, 6, 7]
    want = rows(runner, other, chain)
    right = torch.equal(rows(runner, slot, chain), want)
    pages = [runner.cache.copy_of(slot, 0, 32), runner.cache.copy_of(slot, 32, len(text))]
    runner.cache.truncate(other, 0)
    runner.cache.restore(other, pages, len(text))
    return right and torch.equal(rows(runner, other, chain), want)


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_columns_that_are_moved_and_copied(form):
    assert keeps_columns(form)


def test_a_scale_that_stays_behind_is_seen(monkeypatch):
    """When columns are moved without it."""
    move = ModelRunner.commit

    def commit(self, slots, paths, keep_states=True):
        tensors = (*self.cache.keys, *self.cache.values)
        before = [tensor[..., :2].clone() for tensor in tensors]
        move(self, slots, paths, keep_states)
        with torch.inference_mode():
            for tensor, scales in zip(tensors, before, strict=True):
                tensor[..., :2] = scales

    monkeypatch.setattr(ModelRunner, "commit", commit)
    assert not keeps_columns("int8")


@pytest.mark.parametrize("name", ["llama", "deepseek_v2"])
def test_a_column_takes_half_the_bytes(name):
    plain = wrap_model(tiny_model(name, torch.bfloat16))
    sizes = {}
    for form in (None, "int8", "fp8"):
        runner = ModelRunner(plain if form is None else with_kv_cache(plain, form), 1, 64)
        runner.extend_cache(runner.cache.allocate(), [5, 6])
        sizes[form] = runner.cache.num_bytes
    assert 2 * sizes["fp8"] == sizes[None]
    assert sizes["fp8"] < sizes["int8"] < 0.7 * sizes[None]
