"""The target's own layers quantised; drafts of fewer bits."""

import pytest
import torch
from torch import nn

from paceline import LLM
from paceline.errors import ConfigError, IncompatibleModels
from paceline.kernels.library import BlockFormat, library
from paceline.quant import linears as linears_file
from paceline.quant.blocks import BlockLinear
from paceline.quant.int4 import quantize_int4, to_int4
from paceline.quant.linears import quantize_linears, quantize_target
from paceline.target.adapters import share_copy
from tests.helpers import REPEATING
from tests.quant.helpers import round_to_bits
from tests.quant.test_int4 import linear
from tests.tiny import tiny_model

needs_native = pytest.mark.skipif(library() is None, reason="no native kernels here")


def layers_of(model: nn.Module, form: str = "") -> list[BlockLinear]:
    """All in blocks, or those of one format."""
    found = [module for module in model.modules() if isinstance(module, BlockLinear)]
    return [one for one in found if not form or one.form is BlockFormat[form]]


def plain_layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


@needs_native
def test_int8_takes_every_layer():
    model = tiny_model("llama", intermediate_size=64)  # a head of 97 rows
    report = quantize_target(model, "int8")
    made = layers_of(model, "Q8_0")
    assert (report.num_quantized, report.num_kept, report.lm_head) == (15, 0, "int8") == (len(made), 0, "int8")
    assert report.num_bytes == sum(layer.num_bytes for layer in made)
    assert not plain_layers(model)


@needs_native
def test_int8_says_nearly_what_the_model_says():
    model = tiny_model("qwen2", torch.bfloat16)
    ids = torch.tensor([REPEATING])
    with torch.inference_mode():
        before = model(ids).logits.float().log_softmax(-1)
        quantize_target(model, "int8")
        after = model(ids).logits.float().log_softmax(-1)
    assert not torch.equal(before, after)
    assert float((before.exp() * (before - after)).sum(-1).mean()) < 0.02


@needs_native
def test_int4_counts_what_it_keeps_and_takes_the_head_in_int8():
    model = tiny_model("llama")
    report = quantize_target(model, "int4", 32)
    assert (report.num_quantized, report.num_kept, report.lm_head) == (13, 2, "int8")
    assert len(layers_of(model, "INT4")) == 12
    assert len(plain_layers(model)) == 2  # of 48 inputs


@needs_native
def test_what_has_no_more_bits_stays():
    """A head of 8 or 6 bits does not become one of 4, nor a layer that has so many already."""
    for form in ("q8_0", "q6_k"):
        sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
        model = tiny_model("llama", **sizes)
        quantize_target(model, form)
        head = model.get_output_embeddings()
        assert quantize_target(model, "int4", 32).num_quantized == len(layers_of(model, "INT4")) == 14
        assert model.get_output_embeddings() is head
    with pytest.raises(IncompatibleModels, match=r"INT4.*more bits than that"):
        quantize_target(model, "int4", 32)


def test_int4_is_rounded_further_to_two_bits(kernel):
    model = tiny_model("llama", intermediate_size=64, vocab_size=96)
    quantize_target(model, "int4", 32)
    copy = share_copy(model)
    assert quantize_linears(copy, 32, "shared", 2).num_quantized == 14
    with pytest.raises(IncompatibleModels, match=r"INT2.*more bits than that"):
        quantize_linears(share_copy(copy), 32, "shared", 2)


def test_int4_takes_the_head_in_int4_where_there_is_no_int8(kernel, monkeypatch):
    monkeypatch.setattr(linears_file, "fits_int8", lambda linear: False)
    for rows in (96, 97):
        assert quantize_target(tiny_model("llama", vocab_size=rows), "int4", 32).lm_head == "int4"


def test_tied_embeddings_stay_as_they_are():
    model = tiny_model("llama", tie_word_embeddings=True)
    table: torch.Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    before = table.clone()
    quantize_target(model, "int8")
    assert model.get_input_embeddings().weight is table
    assert torch.equal(table, before)
    assert model.get_output_embeddings().form is BlockFormat.Q8_0


@needs_native
def test_a_draft_of_a_quantised_target():
    model = tiny_model("llama")
    quantize_target(model, "int8")
    copy = share_copy(model)
    report = quantize_linears(copy, 32, "shared")
    assert (report.num_quantized, report.num_kept) == (12, 2)
    assert not layers_of(model, "INT4")
    four = tiny_model("llama", intermediate_size=64)
    quantize_target(four, "int4", 32)
    with pytest.raises(IncompatibleModels, match=r"INT4.*more bits than that"):
        quantize_linears(share_copy(four), 32, "shared")
    two = share_copy(four)
    assert quantize_linears(two, 32, "shared", 2).num_quantized == len(layers_of(two, "INT2")) == 14
    assert [one.num_bytes for one in layers_of(two, "INT2")] == [  # 2 bits and 32 for every 32, not 4
        one.num_bytes * 12 // 20 for one in layers_of(four, "INT4")
    ]


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("group_size", [32, 64])
def test_weights_of_fewer_bits_have_fewer_levels(bits, group_size):
    layer = linear(128, 32)
    codes, _ = quantize_int4(layer.weight, group_size, bits)
    assert len(codes.unique()) == 1 << bits
    assert int(codes.max()) - int(codes.min()) == (1 << bits) - 1
    rounded = round_to_bits(layer.weight, bits, group_size)
    groups = layer.weight.float().view(32, -1, group_size)
    step = (groups.amax(-1) - groups.amin(-1)).repeat_interleave(group_size, 1) / ((1 << bits) - 1)
    error = (rounded - layer.weight.float()).abs()
    assert bool((error <= 0.6 * step + 0.01 * layer.weight.float().abs().max()).all())
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    got = to_int4(layer, group_size, bits)(x).float()
    torch.testing.assert_close(got, x.float() @ rounded.T, atol=0.05, rtol=0.02)


def test_fewer_bits_are_further_away():
    errors = [
        float((round_to_bits(w, bits, 32) - w).norm()) for w in [linear(128, 64).weight.float()] for bits in (4, 3, 2)
    ]
    assert errors[0] < 0.6 * errors[1] < 0.36 * errors[2]


def test_options_that_cannot_be():
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match=r"weights.*'int3'"):
        LLM(model, weights="int3")
    with pytest.raises(ConfigError, match=r"weights.*fp8"):
        quantize_target(model, "fp8")  # on a CPU
    with pytest.raises(ConfigError, match=r"group size.*33"):
        quantize_target(model, "int4", 33)
    with pytest.raises(ConfigError, match=r"bits.*5.*4, 3, 2"):
        quantize_linears(model, bits=5)
    with pytest.raises(IncompatibleModels, match="no linear layer"):
        quantize_target(tiny_model("gpt2"), "int8")  # Conv1D layers
    assert not layers_of(model)
