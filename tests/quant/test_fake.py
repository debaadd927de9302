"""Fake quantisation against the packed layer whose weights it trains."""

import pytest
import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.methods.self_int4.head import from_planes, to_planes
from paceline.quant.fake import FakeInt4Linear
from paceline.quant.int4 import fitted_grid, int4_linear
from tests.quant.helpers import dequantize_int4, round_to_bits


def linear(inputs: int = 128, outputs: int = 48, bias: bool = False) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=bias)
    generator = torch.Generator().manual_seed(inputs + outputs)
    with torch.no_grad():
        made.weight.copy_(torch.randn(outputs, inputs, generator=generator) * 0.1)
    return made.requires_grad_(False)


def stirred(made: FakeInt4Linear, seed: int = 0) -> FakeInt4Linear:
    """As training leaves it."""
    torch.manual_seed(seed)
    with torch.no_grad():
        made.levels.add_(torch.randn_like(made.levels) * 0.1)
        made.log_scale.add_(torch.randn_like(made.log_scale) * 0.05)
        made.shift.add_(torch.randn_like(made.shift) * 0.05)
    return made


@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("mutant", [None, "grid in float32", "one bit less"])
@torch.no_grad()
def test_a_forward_multiplies_with_the_packed_weights_bit_for_bit(group_size, bits, mutant, monkeypatch):
    if mutant == "grid in float32":
        unrounded = property(lambda self: (self.scale0 * self.log_scale.exp(), self.zero0 + self.scale0 * self.shift))
        monkeypatch.setattr(FakeInt4Linear, "grid", unrounded)
    made = stirred(FakeInt4Linear(linear(), group_size, bits))
    packed = dequantize_int4(*made.packable(), group_size)
    if mutant == "one bit less":
        made.bits -= 1
    assert torch.equal(made.rounded(), packed) == (mutant is None)
    codes, _ = made.packable()
    bits = made.bits
    assert 8 - 2 ** (bits - 1) <= int(codes.min()) < int(codes.max()) <= 7 + 2 ** (bits - 1)
    if mutant is None:
        x = torch.randn(5, 128)
        assert torch.equal(made(x), x @ packed.T)
        layer = int4_linear(*made.packable(), bits, linear(bias=True).bias, torch.float32)
        torch.testing.assert_close(layer(x), x @ packed.T + layer.bias, atol=0.05, rtol=0.02)
        assert torch.equal(layer.weight, packed)
        assert (layer.in_features, layer.out_features) == (128, 48)


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_a_fresh_one_started_at_the_nearest_is_round_to_nearest(bits):
    made = FakeInt4Linear(linear(), 32, bits, "nearest")
    torch.testing.assert_close(made.weight, linear().weight, atol=1e-6, rtol=1e-5)
    assert float((made.rounded() == round_to_bits(linear().weight, bits, 32)).float().mean()) > 0.999


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_a_fitted_grid_is_nearer(bits):
    weight = linear(256, 64).weight
    fitted = FakeInt4Linear(linear(256, 64), 32, bits, "fitted").rounded().detach()
    error, before = (fitted - weight).square().sum(), (round_to_bits(weight, bits, 32) - weight).square().sum()
    assert float(error) < {4: 0.95, 3: 0.9, 2: 0.75}[bits] * float(before)
    scale, zero = fitted_grid(weight, 32, bits)
    assert torch.equal(scale, scale.bfloat16().float())
    assert torch.equal(zero, zero.bfloat16().float())


def test_constant_and_zero_groups_have_a_grid():
    for value in (0.0, 0.37):
        layer = linear()
        layer.weight.fill_(value)
        made = FakeInt4Linear(layer, 32, 2)
        assert bool(made.rounded().isfinite().all())
        torch.testing.assert_close(made.rounded(), layer.weight, atol=1e-2, rtol=1e-2)


def test_what_is_learnt_lowers_the_error_of_a_product():
    torch.manual_seed(0)
    layer, x = linear(), torch.randn(64, 128)
    for trains_weight in (True, False):
        made = FakeInt4Linear(layer, 32, 2, "fitted" if trains_weight else "nearest", trains_weight)
        optimizer = torch.optim.Adam([p for p in made.parameters() if p.requires_grad], lr=2e-2)
        errors = []
        for _ in range(30):
            error = (made(x) - layer(x)).square().mean()
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
            errors.append(float(error.detach()))
        assert errors[-1] < (0.75 if trains_weight else 0.9) * errors[0]
        assert (made.levels.grad is not None) == trains_weight
        assert torch.equal(made.rounded(), dequantize_int4(*made.packable(), 32))


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_planes_hold_every_code(bits):
    codes = torch.randint(2**bits, (16, 64), generator=torch.Generator().manual_seed(bits), dtype=torch.int32)
    planes = to_planes(codes, bits)
    assert planes.nbytes == 16 * 64 * bits // 8
    assert torch.equal(from_planes(planes), codes)


def test_bits_that_are_none():
    with pytest.raises(ConfigError, match="bits"):
        FakeInt4Linear(linear(), 32, 5)
