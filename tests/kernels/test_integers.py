"""Passes with weights of 8, 4 and fewer bits, bit for bit."""

import random
from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.tree import TokenTree
from paceline.kernels import load
from paceline.kernels.packing import pack, unpack
from paceline.methods import SelfQuantized
from paceline.quant.blocks import BlockLinear
from paceline.quant.int4 import to_int4
from paceline.quant.int8 import to_int8
from paceline.quant.linears import quantize_target
from paceline.quant.packed import PackedLinear, PackedMatrix
from paceline.target import ModelRunner, wrap_model
from paceline.verify import Coupled
from tests.kernels.test_passes import assert_same_cache, has_bits_of_rows, random_tree
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")


def test_what_is_packed_comes_out_again():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for outs, ins in ((1, 8), (31, 41), (32, 64), (97, 255)):
            weight = torch.randn(outs, ins).to(dtype)
            assert torch.equal(unpack(pack(weight), outs, ins), weight)


@pytest.mark.parametrize("outs", [64, 96])
@pytest.mark.parametrize(
    "kind", [PackedLinear, to_int8, lambda plain: to_int4(plain, 32)], ids=["dense", "int8", "int4"]
)
def test_parts_of_a_matrix(kind, outs):
    """Within a block and between two, as gate and up lie in one matrix."""
    layer, x = kind(nn.Linear(96, outs).requires_grad_(False)), torch.randn(3, 96)
    whole: PackedMatrix = layer.matrix
    parts = [whole.part(0, outs // 2), whole.part(outs // 2, outs)]
    assert torch.equal(torch.cat([part(x) for part in parts], 1), layer(x))


def quantised(name: str, weights: str, dtype: torch.dtype) -> ModelRunner:
    """weights: int8 or int4, with inputs of 8 or 16 bits, or both by turns; or a self-draft in INT4."""
    model, (kind, _, width) = tiny_model(name, dtype, intermediate_size=64), weights.partition(" ")
    if kind != "draft":
        quantize_target(model, kind, 32)  # type: ignore[arg-type]
    for index, layer in enumerate(one for one in model.modules() if isinstance(one, BlockLinear)):
        layer.input_bits = 16 if width == "16" or (width == "mixed" and index % 2) else 8
    runner = ModelRunner(wrap_model(model), 3, 200)
    if kind == "draft":
        drafter = SelfQuantized(lm_head="int4")
        drafter.bind(runner, Coupled())
        assert drafter._runner is not None
        runner = drafter._runner
    assert runner.loaded.is_native
    forms = {one.form.name for one in runner.loaded.model.modules() if isinstance(one, BlockLinear)}
    assert forms == {"int8": {"Q8_0"}, "draft": {"INT4"}}.get(kind, {"Q8_0", "INT4"})
    return runner


@pytest.mark.diagonal
@pytest.mark.parametrize("weights", ["int8 8", "int4 16", "int4 mixed", "draft"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "phi3", "starcoder2"])
def test_a_row_of_a_pass_has_the_same_bits_in_every_pass(isa, name, weights):
    """Trees and prompts read in pieces, on any number of threads, against one row at a time."""
    rng, threads = random.Random(f"{name} {weights}"), torch.get_num_threads()
    runner = quantised(name, weights, torch.bfloat16)
    one, other = runner.cache.allocate(), runner.cache.allocate()
    try:
        for _ in range(3):
            torch.set_num_threads(rng.choice((1, 2, 5)))
            text = [rng.randrange(3, 97) for _ in range(rng.choice((1, 15, 47)))]
            cut = rng.randrange(len(text))
            runner.cache.truncate(one, 0)
            runner.cache.truncate(other, 0)
            runner.extend_cache(one, text)
            runner.extend_cache(other, text[:cut])
            runner.extend_cache(other, text[cut:])
            assert_same_cache(runner, one, other, len(text))
            tree = random_tree(rng.choice((1, 2, 7, 13, 30)), rng)
            got = runner.forward([one], tree)[0]
            assert has_bits_of_rows(got, runner, other, tree)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.diagonal
@pytest.mark.parametrize("weights", ["int8 8", "int4 16", "int4 mixed", "draft"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "starcoder2"])
def test_a_pass_says_what_transformers_says_with_these_layers(isa, name, weights):
    """Both multiply by the same kernels; between them lie roundings of float32, of which 8 bits of inputs make more."""
    runner = quantised(name, weights, torch.float32)
    ids = torch.randint(3, 97, (1, 30), generator=torch.Generator().manual_seed(12))
    model: Any = runner.loaded.model
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("eager")
        with torch.inference_mode():
            want = model(ids, use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(before)
    slot = runner.cache.allocate()
    got = runner.forward([slot], TokenTree.chain(ids.tolist()))[0]
    error = (got - want).abs() / want.std()
    assert float(error.max()) < 1e-3 if weights.endswith("16") else float(error.mean()) < 1e-3
