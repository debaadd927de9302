"""FP8 layers: the arithmetic in torch, and the refusals where there are no kernels."""

import pytest
import torch

from paceline.errors import ConfigError, IncompatibleModels
from paceline.quant import linears as linears_module
from paceline.quant.fp8 import Fp8Linear, dequantize_fp8, quantize_fp8
from paceline.quant.linears import quantize_target
from tests.quant.test_int4 import linear
from tests.tiny import tiny_model


def test_codes_are_near_and_finite():
    values = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 64)[:, None]
    codes, scales = quantize_fp8(values)
    assert codes.dtype is torch.float8_e4m3fn
    assert scales.shape == (64, 1)
    again = dequantize_fp8(codes, scales)
    assert again.isfinite().all()
    step = values.abs() / 16 + scales * 2**-9  # half a unit in the fourth significant bit, or of the smallest number
    assert bool(((again - values).abs() <= step).all())
    assert torch.equal(codes.float().abs().amax(1), torch.full((64,), 448.0))
    assert torch.equal(dequantize_fp8(*quantize_fp8(torch.zeros(2, 16))), torch.zeros(2, 16))


@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_those_of_the_codes(rows, dtype):
    layer = linear(128, 48).to(dtype)
    made = Fp8Linear(layer)
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = x.float() @ made.weight.float().T + (0 if layer.bias is None else layer.bias.float())
    got = made(x[None])
    assert got.dtype is dtype
    assert got.shape == (1, rows, 48)
    torch.testing.assert_close(got[0].float(), expected, atol=0.02, rtol=0.02)
    assert made.num_bytes == 128 * 48 + 4 * 48


def test_a_model_says_nearly_the_same(monkeypatch):
    monkeypatch.setattr(linears_module, "require_fp8", lambda device: None)
    model = tiny_model("llama", torch.bfloat16)
    ids = torch.arange(3, 30)[None]
    with torch.inference_mode():
        before = model(ids).logits.float().log_softmax(-1)
        report = quantize_target(model, "fp8")
        after = model(ids).logits.float().log_softmax(-1)
    assert (report.num_quantized, report.num_kept, report.lm_head) == (14, 0, "shared")
    assert not torch.equal(before, after)
    assert float((before.exp() * (before - after)).sum(-1).mean()) < 0.1


def test_refusals(monkeypatch):
    with pytest.raises(ConfigError, match=r"weights='fp8'.*cpu.*CUDA.*int8"):
        quantize_target(tiny_model("llama"), "fp8")
    monkeypatch.setattr(linears_module, "require_fp8", lambda device: None)
    with pytest.raises(IncompatibleModels, match=r"FP8.*divisible by 16"):
        quantize_target(tiny_model("gpt2"), "fp8")
