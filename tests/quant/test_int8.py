"""INT8 layers against the float weights they stand for."""

import copy

import pytest
import torch

from paceline.quant.int8 import dequantize_int8, fits_int8, quantize_int8, to_int8
from paceline.quant.packed import PackedLinear
from tests.quant.test_int4 import linear


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
    x = torch.randn(*shape, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    made = to_int8(layer)
    expected = x.double() @ made.weight.double().T + (layer.bias.double() if bias else 0)
    got = made(x)
    assert got.dtype == x.dtype
    assert got.shape == (*shape, outputs)
    torch.testing.assert_close(got.double(), expected, atol=0.05, rtol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_answers_in_the_dtype_of_its_input(kernel, dtype):
    layer = to_int8(linear(64, 16, bias=True, dtype=dtype))
    assert layer.weight.dtype == dtype
    assert layer(torch.randn(2, 64, dtype=dtype)).dtype == dtype


def test_zeros_and_constants(kernel):
    layer = linear(64, 16)
    layer.weight.zero_()
    layer.weight[1] = -0.5
    got = to_int8(layer)(torch.ones(2, 64, dtype=torch.bfloat16))
    assert got[0].tolist() == [0.0, -32.0] + [0.0] * 14
    assert not to_int8(linear(64, 16))(torch.zeros(1, 64, dtype=torch.bfloat16)).any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_row_breaks_no_other_and_does_not_heal(kernel, value):
    layer = to_int8(linear(64, 16))
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
    layer = to_int8(plain)
    if kernel == "torch":
        assert torch.equal(layer.weight, dequantize_int8(codes, scales).bfloat16())
    assert bool(((layer.weight - plain.weight).float().abs() <= 0.51 * scales[:, None] + 2**-8).all())
    assert layer.num_bytes == (64 * 64 // 32 * 34 if kernel == "native" else 64 * 48 + 4 * 48)


def test_a_copy_shares_the_weights(kernel):
    layer = to_int8(linear(64, 16))
    shared = {id(tensor): tensor for tensor in layer.buffers()}
    twin = copy.deepcopy(layer, shared)
    assert all(one is other for one, other in zip(twin.buffers(), layer.buffers(), strict=True))
    x = rows(2, 64)
    assert torch.equal(twin(x), layer(x))


def test_shapes_that_fit(kernel):
    assert fits_int8(linear(64, 1))
    assert not fits_int8(linear(40, 16))
    plain = linear(64, 16)
    if PackedLinear.fits(plain):
        assert torch.equal(to_int8(PackedLinear(plain)).weight, to_int8(plain).weight)
