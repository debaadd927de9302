"""bfloat16 in twelve bits: nothing is lost, and products have the bits of those with the plain weights."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from paceline.kernels import load
from paceline.kernels.packing import Bf12, pack, unpack
from paceline.quant import packed as packed_module
from paceline.quant.packed import PackedLinear, PackedMatrix

pytestmark = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")

SHAPES = [(1, 1), (32, 4), (33, 30), (40, 577), (64, 2), (97, 1030), (160, 300)]  # the larger ones have several panels


def weights(outs: int, ins: int, seed: int = 0) -> Tensor:
    """bfloat16 with zeros of both signs, and with numbers so small and so large that the table lacks them."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(outs, ins, generator=generator).bfloat16() * 0.02
    flat, draw = made.view(-1), random.Random(seed)
    odd = (0.0, -0.0, 1e-40, -3e-20, 5e-9, 7.0, 300.0, -1e30)
    for place in draw.sample(range(len(flat)), len(flat) // 300 if len(flat) > 9000 else 0):
        flat[place] = draw.choice(odd)
    return made


def short(weight: Tensor) -> Bf12:
    made = Bf12.of(weight)
    assert made is not None
    return made


def products_are_those_of_bfloat16(outs: int, ins: int) -> bool:
    """For each number of rows of a tile, for several tiles and groups, and for parts of the matrix."""
    weight, x = weights(outs, ins), torch.randn(101, ins, generator=torch.Generator().manual_seed(1))
    plain, matrix = PackedMatrix(outs, ins, pack(weight), None), PackedMatrix(outs, ins, short(weight), None)
    want = plain(x)
    same = all(torch.equal(matrix(x[:rows]), want[:rows]) for rows in (*range(1, 14), 24, 25, 101))
    first, last = min(32, outs - 1), outs
    return same and torch.equal(matrix.part(first, last)(x), want[:, first:last])


@pytest.mark.parametrize(("outs", "ins"), SHAPES)
def test_every_bit_comes_back(outs, ins):
    weight = weights(outs, ins)
    made = short(weight)
    assert torch.equal(unpack(made, outs, ins).view(torch.int16), weight.view(torch.int16))
    if outs >= 96:
        assert torch.equal(unpack(made[1:3], 64, ins).view(torch.int16), weight[32:96].view(torch.int16))


def test_patches_are_few_and_in_order():
    weight = weights(160, 1030)
    made = short(weight)
    blocks = len(made.units)
    begins, patches = made.patches[: blocks + 1], made.patches[blocks + 1 :]
    assert 0 < len(patches) == begins[-1] < weight.numel() / 256
    for first, last in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
        units = patches[first:last] >> 15
        assert bool((units.diff() >= 0).all())
    assert made.units.nbytes < 0.77 * pack(weight).nbytes


def test_every_pattern_of_bits_is_too_many():
    bits = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).view(256, 256)
    assert Bf12.of(bits) is None
    layer = nn.Linear(256, 256, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    layer.weight.copy_(bits)
    packed = PackedLinear(layer)
    assert packed.packed.dtype is torch.bfloat16
    assert torch.equal(packed.weight.view(torch.int16), bits.view(torch.int16))


@pytest.mark.parametrize(("outs", "ins"), SHAPES)
def test_products_are_those_of_bfloat16(outs, ins, isa):
    assert products_are_those_of_bfloat16(outs, ins)


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_kernels_with_few_registers_get_bfloat16_as_it_is(isa, monkeypatch):
    layer = nn.Linear(64, 64, dtype=torch.bfloat16).requires_grad_(False)
    monkeypatch.setattr(packed_module, "load", lambda: replace(load(), isa="avx512_vnni"))
    short_one = PackedLinear(layer)
    monkeypatch.setattr(packed_module, "load", lambda: replace(load(), isa=isa))
    plain_one = PackedLinear(layer)
    assert (short_one.packed.dtype, plain_one.packed.dtype) == (torch.uint8, torch.bfloat16)
    assert torch.equal(short_one.weight, layer.weight)
    assert torch.equal(plain_one.weight, layer.weight)
    assert 4 * short_one.packed.nbytes == 3 * plain_one.packed.nbytes
