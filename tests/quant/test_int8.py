"""INT8 layers against the float weights they stand for; a row's bits are its own."""

import copy

import pytest
import torch
from torch import nn

from paceline.kernels.library import library
from paceline.quant.int8 import Int8Linear, dequantize_int8, quantize_int8
from paceline.quant.packed import PackedLinear
from tests.quant.test_int4 import linear

needs_native = pytest.mark.skipif(library() is None, reason="no native kernels here")


def rows(count: int, inputs: int, seed: int = 1) -> torch.Tensor:
    """Rows whose sizes differ by a factor of hundreds, with an outlier in each."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, inputs, generator=generator) * torch.logspace(-1, 1.5, count)[:, None]
    x[:, 3] *= 30
    return x.bfloat16()


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 5), (130,), (0,)])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 16), (512, 47), (96, 5000)])
@pytest.mark.parametrize("bias", [False, True])
def test_product_equals_that_of_the_dequantised_weights(kernel, shape, inputs, outputs, bias):
    layer = linear(inputs, outputs, bias)
    oracle = dequantize_int8(*quantize_int8(layer.weight)).double()
    x = torch.randn(*shape, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = x.double() @ oracle.T + (layer.bias.double() if bias else 0)
    got = Int8Linear(layer)(x)
    assert got.dtype == x.dtype
    assert got.shape == (*shape, outputs)
    torch.testing.assert_close(got.double(), expected, atol=0.02, rtol=0.01)


def error_beside_an_outlier(layer: Int8Linear) -> float:
    """Largest error relative to the row's largest output, where one input is 30 times the others."""
    x = rows(8, layer.in_features).float()
    expected = x.double() @ dequantize_int8(layer.codes, layer.scales).double().T
    return float(((layer(x).double() - expected).abs() / expected.abs().amax(1, keepdim=True)).max())


def test_activations_keep_sixteen_bits(kernel):
    error = error_beside_an_outlier(Int8Linear(linear(256, 64)))
    assert error < 2e-4 if kernel == "native" else error > 1e-3  # ATen takes them in bfloat16


@needs_native
def test_the_bits_of_a_row_are_its_own():
    layer = Int8Linear(linear(512, 80, bias=True))
    x = rows(200, 512)
    full = layer(x)
    assert all(torch.equal(layer(x[:n]), full[:n]) for n in (1, 2, 3, 4, 7, 8, 16, 17, 32, 127, 128, 129, 199))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_answers_in_the_dtype_of_its_input(kernel, dtype):
    layer = Int8Linear(linear(64, 16, bias=True, dtype=dtype))
    assert layer.weight.dtype == dtype
    assert layer(torch.randn(2, 64, dtype=dtype)).dtype == dtype


def test_zeros_and_constants(kernel):
    layer = linear(64, 16)
    layer.weight.zero_()
    layer.weight[1] = -0.5
    got = Int8Linear(layer)(torch.ones(2, 64, dtype=torch.bfloat16))
    assert got[0].tolist() == [0.0, -32.0] + [0.0] * 14
    assert not Int8Linear(linear(64, 16))(torch.zeros(1, 64, dtype=torch.bfloat16)).any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_row_breaks_no_other_and_does_not_heal(kernel, value):
    layer = Int8Linear(linear(64, 16))
    x = rows(3, 64)
    good = layer(x)
    x[1, 5] = value
    got = layer(x)
    assert not got[1].isfinite().any()
    assert torch.equal(got[[0, 2]], good[[0, 2]])


def test_weight_is_what_the_codes_stand_for(kernel):
    plain = linear(64, 48)
    codes, scales = quantize_int8(plain.weight)
    assert codes.dtype is torch.int8
    assert torch.equal(codes.abs().amax(1), torch.full((48,), 127, dtype=torch.int8))
    assert bool(((dequantize_int8(codes, scales) - plain.weight).abs() <= 0.51 * scales[:, None]).all())
    layer = Int8Linear(plain)
    assert torch.equal(layer.weight, dequantize_int8(codes, scales).bfloat16())
    assert layer.num_bytes == (64 * 64 + 2 * 4 * 48 if kernel == "native" else 64 * 48 + 4 * 48)


def test_a_copy_shares_the_weights(kernel):
    layer = Int8Linear(linear(64, 16))
    shared = {id(tensor): tensor for tensor in layer.buffers()}
    twin = copy.deepcopy(layer, shared)
    assert twin.packed is layer.packed
    x = rows(2, 64)
    assert torch.equal(twin(x), layer(x))


def test_shapes_that_fit(kernel):
    assert Int8Linear.fits(linear(64, 1))
    assert Int8Linear.fits(linear(40, 16)) == (kernel == "native")
    assert not Int8Linear.fits(nn.Linear(64, 1, device="meta"))
    assert Int8Linear.fits(nn.Linear(1 << 18, 1, bias=False)) == (kernel != "native")  # int32 could overflow
    plain = linear(64, 16)
    if PackedLinear.fits(plain):
        assert torch.equal(Int8Linear(PackedLinear(plain)).weight, Int8Linear(plain).weight)
