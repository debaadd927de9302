"""Block formats: weights against `gguf`, products against integers, rows bit for bit."""

import random

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from paceline.errors import IncompatibleModels
from paceline.kernels import load
from paceline.kernels.library import BlockFormat
from paceline.kernels.packing import Blocks, unpack
from paceline.quant.packed import PackedMatrix
from tests import gguf_files
from tests.gguf_files import PLACE_OF_SCALES

pytestmark = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")


def random_blocks(form: BlockFormat, outs: int, ins: int) -> np.ndarray:
    if form.is_in_files:
        return gguf_files.random_blocks(form.name, outs, ins)
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 1 << form.bits, (outs, ins // 32, 32), dtype=np.uint8)
    params = torch.from_numpy(rng.uniform(-0.02, 0.02, (outs, ins // 32, 2))).bfloat16().view(torch.uint8).numpy()
    return np.concatenate([params, codes[..., :16] | codes[..., 16:] << 4], -1).reshape(outs, -1)


def weights_of(form: BlockFormat, blocks: np.ndarray) -> Tensor:
    if not form.is_in_files:
        parts = torch.from_numpy(blocks).unflatten(1, (-1, 20))
        scale, zero = parts[..., :4].contiguous().view(torch.bfloat16).float().split(1, -1)
        codes = torch.cat([parts[..., 4:] & 15, parts[..., 4:] >> 4], -1).float() - 2 ** (form.bits - 1)
        return (codes * scale + zero).flatten(1)
    return torch.from_numpy(np.array(dequantize(blocks, GGMLQuantizationType[form.name]), np.float32))


def packed(form: BlockFormat, blocks: np.ndarray, ins: int) -> Blocks:
    return Blocks.of(form, (len(blocks), ins), lambda some: torch.from_numpy(blocks[some]))


def inputs(count: int, ins: int, seed: int = 1) -> Tensor:
    """Rows of very different sizes, with outliers."""
    x = torch.randn(count, ins, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-2, 2, count)[:, None]
    x[:, ins // 2] *= 20
    return x


def rounded(form: BlockFormat, x: Tensor, bits: int) -> Tensor:
    """The inputs as integers of 8 or 16 bits stand for them, float64."""
    parts = x.unflatten(1, (-1, form.inputs))
    most = parts.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    scaled = parts * (127 / most)
    codes = scaled.round().double()
    if bits == 16:
        codes += ((scaled - scaled.round()) * 254).round().double() / 254
    return (codes * (most / 127).double()).flatten(1)


@pytest.mark.parametrize("form", BlockFormat, ids=lambda form: form.name)
def test_weights_are_those_of_llama_cpp(form):
    for outs, ins in ((97, 2 * form.inputs), (16, form.inputs), (1, 3 * form.inputs)):
        blocks = random_blocks(form, outs, ins)
        made, want = packed(form, blocks, ins), weights_of(form, blocks)
        assert torch.equal(unpack(made, outs, ins), want)
        some = [outs - 1, 0, outs // 2]
        assert torch.equal(made.rows(some), want[some])
        places = range(0, outs * ins, 37)
        assert torch.equal(made.values(places), want.flatten()[places.start : places.stop : places.step])


def test_memory_that_blocks_are_packed_into_need_not_be_zero():
    """Outputs that are missing from the last block become zeros; of many bytes, some outputs are packed at once."""
    for form in BlockFormat:
        for outs, ins in ((33, form.inputs), (97, 256 * form.inputs)):
            blocks = random_blocks(form, outs, ins)
            dirty, clean = (
                Blocks.of(
                    form, (outs, ins), lambda some, blocks=blocks: torch.from_numpy(blocks[some]),
                    lambda size, dtype, fill=fill: torch.full(size, fill, dtype=dtype),
                )
                for fill in (255, 0)
            )  # fmt: skip
            assert torch.equal(dirty.data, clean.data)


def has_products(form: BlockFormat, outs: int, ins: int, count: int, input_bits: int = 8) -> bool:
    """Whether products are those of the rounded inputs."""
    blocks, x = random_blocks(form, outs, ins), inputs(count, ins)
    weight, bias = weights_of(form, blocks).double(), torch.randn(outs)
    matrix = PackedMatrix(outs, ins, packed(form, blocks, ins), bias, input_bits)
    read = rounded(form, x, input_bits)
    error = (matrix(x).double() - read @ weight.T - bias.double()).abs()
    # of minima, products are subtracted that are larger than what is left
    bound = 2.0**-19 * (read.abs() @ weight.abs().amax(0).expand_as(weight).T + bias.abs())
    return bool((error <= bound).all())


@pytest.mark.parametrize("form", BlockFormat, ids=lambda form: form.name)
def test_products(isa, form):
    rng = random.Random(form.name)
    for count in (1, 2, 5, 7, 13):
        assert has_products(form, rng.choice((1, 31, 33, 97)), form.inputs * rng.choice((1, 2, 9)), count)
        assert has_products(form, 33, 3 * form.inputs, count, 16)


@pytest.mark.parametrize("input_bits", [8, 16])
@pytest.mark.parametrize("form", BlockFormat, ids=lambda form: form.name)
def test_a_row_has_the_same_bits_beside_any_others_and_on_any_threads(isa, form, input_bits):
    rng, threads = random.Random(form.name), torch.get_num_threads()
    outs, ins = 300, 3 * form.inputs
    matrix = PackedMatrix(outs, ins, packed(form, random_blocks(form, outs, ins), ins), None, input_bits)
    x = inputs(60, ins)
    alone = torch.cat([matrix(x[i : i + 1]) for i in range(len(x))])
    try:
        for count in (*range(1, 15), 23, 48, 49, 60):
            torch.set_num_threads(rng.choice((1, 2, 5)))
            picked = rng.sample(range(60), count)
            assert torch.equal(matrix(x[picked]), alone[picked])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("form", BlockFormat, ids=lambda form: form.name)
def test_the_instruction_sets_agree(form):
    """Sums of a chunk are integers; the portable kernels add chunks without fused products."""
    from paceline.kernels.library import library

    outs, ins, x = 40, 5 * form.inputs, inputs(9, 5 * form.inputs)
    blocks, made = packed(form, random_blocks(form, outs, ins), ins), []
    matrices = [PackedMatrix(outs, ins, blocks, None, bits) for bits in (8, 16)]
    try:
        for isa in load().isas[1:]:
            library().paceline_select(isa.encode())
            made.append(torch.cat([matrix(x) for matrix in matrices]))
    finally:
        library().paceline_select(load().isa.encode())
    assert all(torch.equal(one, made[0]) for one in made)


@pytest.mark.parametrize("form", BlockFormat, ids=lambda form: form.name)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums(isa, form, sign):
    """Bits of codes and integer scales all set, or none, and inputs at their ends: what 16 and 32 bits must hold."""
    ins = 2 * form.inputs
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        blocks = random_blocks(form, 3, ins).reshape(3 * 2, -1)
        at, count = PLACE_OF_SCALES.get(form.name, (0, 1 if form.is_in_files else 2))
        kept = slice(at, at + (1 if form is BlockFormat.MXFP4 else 2 * count))
        scales = blocks[:, kept].copy()
        blocks[:] = byte if form.is_in_files else byte & 0x11 * ((1 << form.bits) - 1)
        blocks[:, kept] = scales
        blocks = blocks.reshape(3, -1)
        x = torch.full((7, ins), 1.5 * sign)
        matrix = PackedMatrix(3, ins, packed(form, blocks, ins), None)
        want = x.double() @ weights_of(form, blocks).double().T
        torch.testing.assert_close(matrix(x).double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("form", [BlockFormat.Q4_1, BlockFormat.Q8_0, BlockFormat.Q4_K, BlockFormat.Q6_K])
def test_a_broken_row_breaks_no_other_and_does_not_heal(isa, form, value):
    ins = 2 * form.inputs
    matrix, x = PackedMatrix(40, ins, packed(form, random_blocks(form, 40, ins), ins), None), inputs(5, ins)
    good = matrix(x)
    x[2, ins - 1] = value
    got = matrix(x)
    assert not got[2].isfinite().any()
    assert torch.equal(got[[0, 1, 3, 4]], good[[0, 1, 3, 4]])


def test_parts_of_a_matrix_share_its_blocks():
    form, ins = BlockFormat.Q4_K, 256
    whole = PackedMatrix(96, ins, packed(form, random_blocks(form, 96, ins), ins), torch.randn(96))
    x = inputs(3, ins)
    for first, last in ((0, 32), (32, 96)):
        part = whole.part(first, last)
        assert torch.equal(part(x), whole(x)[:, first:last])
        assert part.struct.data == whole.struct.data + first // 32 * whole.packed.data.shape[1]
    assert torch.equal(whole.part(16, 96)(x), whole(x)[:, 16:])  # a copy
    with pytest.raises(IncompatibleModels, match=r"output 8.*multiple of 16"):
        whole.part(8, 96)


@pytest.mark.parametrize("name", ["INT4", "Q4_0", "Q8_0", "Q4_K"])
def test_rows_of_a_matrix_in_another_order(name):
    """Whole records are copied; if some are taken apart, the weights are unpacked."""
    form, ins = BlockFormat[name], 512
    whole = PackedMatrix(96, ins, packed(form, random_blocks(form, 96, ins), ins), torch.randn(96))
    records, x = torch.arange(96).view(6, 16), inputs(3, ins)
    for order in (records[[3, 0, 5]].flatten(), records.flip(0).flatten()):
        moved = whole.rows(order)
        assert isinstance(moved.packed, Blocks)
        assert torch.equal(moved.packed.rows(range(len(order))), whole.packed.rows(order.tolist()))
        assert torch.equal(moved(x), whole(x)[:, order])
    for order in (torch.arange(95, -1, -1), records[1:].flatten() - 8, records[:, :8].flatten()):
        apart = whole.rows(order)
        assert torch.equal(unpack(apart.packed, len(order), ins), whole.packed.rows(order.tolist()))
        assert torch.equal(apart.bias, whole.bias[order])


def test_scales_that_are_not_finite_are_seen():
    for form in BlockFormat:
        blocks = random_blocks(form, 20, form.inputs)
        assert packed(form, blocks, form.inputs).is_finite
        if form is not BlockFormat.MXFP4:  # whose exponents are all finite
            at, count = PLACE_OF_SCALES.get(form.name, (0, 1 if form.is_in_files else 2))
            for place in range(at, at + 2 * count, 2):
                broken = blocks.copy()
                broken[17, place : place + 2] = 0xFF
                assert not packed(form, broken, form.inputs).is_finite
