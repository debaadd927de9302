"""Products with weights of 8 and 4 bits against the weights they stand for; passes with them, bit for bit."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.core.tree import TokenTree
from paceline.drafters import SelfQuantized
from paceline.kernels import load
from paceline.kernels.packing import pack, pack_codes, pack_params, unpack, unpack_codes, unpack_params
from paceline.quant.int4 import Int4Linear, quantize_int4
from paceline.quant.int8 import Int8Linear, dequantize_int8
from paceline.quant.packed import PackedLinear, PackedMatrix
from paceline.runner import ModelRunner, with_weights, wrap_model
from paceline.verify import Coupled
from tests.kernels.test_passes import assert_same_cache, random_tree, rows
from tests.quant.helpers import dequantize_int4
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")

GROUPS = (32, 64, 128, 256)


def linear(outs: int, ins: int, seed: int) -> nn.Linear:
    """With a bias, and with outputs whose weights differ in size by a factor of hundreds."""
    generator = torch.Generator().manual_seed(seed)
    made = nn.Linear(ins, outs).requires_grad_(False)
    made.weight.copy_(torch.randn(outs, ins, generator=generator) * torch.logspace(-2, 0.5, outs)[:, None])
    made.bias.copy_(torch.randn(outs, generator=generator))
    return made


def inputs(count: int, ins: int, seed: int) -> Tensor:
    """Rows of very different sizes, each with an outlier."""
    x = torch.randn(count, ins, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-2, 2, count)[:, None]
    x[:, ins // 2] *= 20
    return x


def random_shapes(of: str, count: int, groups: tuple[int, ...] = (1,)) -> list[tuple[int, int, int, int]]:
    """(rows, outs, ins, group); an edge of the tiles now and then."""
    rng, made = random.Random(of), []
    for index in range(count):
        group = groups[index % len(groups)]
        ins = rng.choice((1, 2, 3, 31, 33, 64, 100, 577)) if group == 1 else group * rng.randrange(1, 1 + 768 // group)
        made.append(
            (rng.choice((1, 2, 3, 4, 5, 6, 7, 12, 13, 40)), rng.choice((1, 16, 31, 32, 33, 97, 160)), ins, group)
        )
    return made


@pytest.mark.parametrize(("count", "outs", "ins", "group"), random_shapes("int8", 16))
def test_int8_products(isa, count, outs, ins, group):
    """Activations have 127 * 254 steps to the largest, or a few more; nothing else is rounded."""
    layer, x = Int8Linear(linear(outs, ins, 1)), inputs(count, ins, 2)
    weight = dequantize_int8(layer.codes, layer.scales).double()
    error = (layer(x).double() - x.double() @ weight.T - layer.bias.double()).abs()
    bound = 2.0**-20 * (x.abs().double() @ weight.abs().T + layer.bias.abs())
    bound += x.abs().amax(1, keepdim=True) / (2 * 127 * 254) * weight.abs().sum(1)
    assert bool((error <= bound).all())


@pytest.mark.parametrize(("count", "outs", "ins", "group"), random_shapes("int4", 16, GROUPS))
def test_int4_products(isa, count, outs, ins, group):
    """Activations have 127 * 254 steps to the largest, or a few more; nothing else is rounded."""
    plain, x = linear(outs, ins, 3), inputs(count, ins, 4)
    layer = Int4Linear(plain, group)
    weight = dequantize_int4(*quantize_int4(plain.weight, group), group).double()
    error = (layer(x).double() - x.double() @ weight.T - plain.bias.double()).abs()
    scale, zero = layer.params.double().abs().unbind(-1)
    largest = (23 * scale + zero).T.repeat_interleave(group, 1)  # codes are 15 at most, and 8 are taken off
    bound = 2.0**-20 * (x.abs().double() @ largest.T + plain.bias.abs())
    bound += x.abs().amax(1, keepdim=True) / (2 * 127 * 254) * weight.abs().sum(1)
    assert bool((error <= bound).all())


@pytest.mark.parametrize("group", [0, *GROUPS])
def test_a_row_has_the_same_bits_beside_any_others_and_on_any_threads(isa, group):
    rng, threads = random.Random(group), torch.get_num_threads()
    for outs, ins in ((97, 512), (33, 1024), (300, 256)):
        plain = linear(outs, ins, 5)
        layer = Int4Linear(plain, group) if group else Int8Linear(plain)
        x = inputs(40, ins, 6)
        alone = torch.cat([layer(x[i : i + 1]) for i in range(len(x))])
        try:
            for count in (*range(1, 15), 23, 24, 25, 40):
                torch.set_num_threads(rng.choice((1, 2, 5)))
                picked = rng.sample(range(40), count)
                assert torch.equal(layer(x[picked]), alone[picked])
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("ins", [4096, 16384])
def test_the_largest_sums(isa, ins):
    """All codes and all inputs at their ends, of one sign: what int32 must hold."""
    plain = nn.Linear(ins, 3, bias=False).requires_grad_(False)
    plain.weight.copy_(torch.tensor([1.0, -1.0, 1.0])[:, None].expand(3, ins))
    x = torch.ones(2, ins)
    x[1] = -1
    got = Int8Linear(plain)(x)
    want = torch.tensor([[1.0, -1.0, 1.0], [-1.0, 1.0, -1.0]]) * ins
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", [Int8Linear, lambda plain: Int4Linear(plain, 32)], ids=["int8", "int4"])
def test_a_broken_row_breaks_no_other_and_does_not_heal(isa, kind, value):
    layer = kind(linear(40, 64, 7))
    x = inputs(5, 64, 8)
    good = layer(x)
    x[2, 63] = value
    got = layer(x)
    assert not got[2].isfinite().any()
    assert torch.equal(got[[0, 1, 3, 4]], good[[0, 1, 3, 4]])


def test_what_is_packed_comes_out_again():
    generator = torch.Generator().manual_seed(9)
    for outs, ins in ((1, 8), (31, 40), (32, 64), (97, 256)):
        codes = torch.randint(-127, 128, (outs, ins - 3), generator=generator, dtype=torch.int8)
        assert torch.equal(unpack(pack(codes), *codes.shape), codes)
        fours = torch.randint(0, 16, (outs, ins), generator=generator, dtype=torch.int32)
        assert torch.equal(unpack_codes(pack_codes(fours), outs, ins), fours)
        params = torch.randn(ins // 8, outs, 2, generator=generator).bfloat16()
        assert torch.equal(unpack_params(pack_params(params), outs), params)


@pytest.mark.parametrize("outs", [64, 80])
@pytest.mark.parametrize(
    "kind", [PackedLinear, Int8Linear, lambda plain: Int4Linear(plain, 32)], ids=["dense", "int8", "int4"]
)
def test_parts_of_a_matrix(kind, outs):
    """Within a block and between two, as gate and up lie in one matrix."""
    layer, x = kind(linear(outs, 96, 10)), inputs(3, 96, 11)
    whole: PackedMatrix = layer.matrix
    parts = [whole.part(0, outs // 2), whole.part(outs // 2, outs)]
    assert torch.equal(torch.cat([part(x) for part in parts], 1), layer(x))


def quantised(name: str, weights: str, dtype: torch.dtype) -> ModelRunner:
    target = wrap_model(tiny_model(name, dtype, intermediate_size=64))
    loaded = with_weights(target, weights)[0] if weights != "draft" else target  # type: ignore[arg-type]
    runner = ModelRunner(loaded, 3, 200)
    if weights == "draft":
        drafter = SelfQuantized(lm_head="int4")
        drafter.bind(runner, Coupled())
        assert drafter._runner is not None
        runner = drafter._runner
    assert runner.loaded.is_native
    kinds = {type(module) for module in runner.loaded.model.modules() if hasattr(module, "matrix")}
    assert kinds == {"int8": {Int8Linear}, "int4": {Int8Linear, Int4Linear}, "draft": {Int4Linear}}[weights]
    return runner


@pytest.mark.diagonal
@pytest.mark.parametrize("weights", ["int8", "int4", "draft"])
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
            for leaf in set(range(tree.num_nodes)) - set(tree.parents[0].tolist()):
                path = [0, *tree.path_to(0, leaf)]
                assert torch.equal(got[path], rows(runner, other, tree.token_ids[0, path].tolist()))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.diagonal
@pytest.mark.parametrize("weights", ["int8", "int4", "draft"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "starcoder2"])
def test_a_pass_says_what_transformers_says_with_these_layers(isa, name, weights):
    """Both multiply by the same kernels; between them lie roundings of float32, and what these make of bfloat16."""
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
    assert float((got - want).abs().max() / want.std()) < 0.02
