"""INT4 layers against the float weights they stand for, and a module tree that shares everything else."""

import pytest
import torch
from torch import nn

from paceline import LLM, SamplingParams, SelfQuantized
from paceline.errors import ConfigError, IncompatibleModels
from paceline.quant.blocks import BlockLinear
from paceline.quant.int4 import Int4Linear, quantize_int4, to_int4
from paceline.quant.linears import quantize_linears
from paceline.target.adapters import share_copy
from tests.helpers import REPEATING
from tests.quant.helpers import dequantize_int4
from tests.tiny import tiny_model


def linear(inputs: int, outputs: int, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    generator = torch.Generator().manual_seed(inputs * outputs)
    made = nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)
    made.weight.copy_(torch.randn(outputs, inputs, generator=generator) * 0.1)
    return made


@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 16), (512, 48), (256, 272)])
@pytest.mark.parametrize("rows", [(1,), (3,), (17,), (2, 5)])
def test_product_equals_that_of_the_dequantised_weights(kernel, group_size, inputs, outputs, rows):
    layer = linear(inputs, outputs, bias=True)
    oracle = dequantize_int4(*quantize_int4(layer.weight, group_size), group_size)
    x = torch.randn(*rows, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = x.float() @ oracle.T + layer.bias.float()
    got = to_int4(layer, group_size)(x)
    assert got.dtype == x.dtype
    assert got.shape == (*rows, outputs)
    torch.testing.assert_close(got.float(), expected, atol=0.05, rtol=0.02)  # inputs have 8 bits


@pytest.mark.parametrize("group_size", [32, 128])
def test_dequantised_weights_are_near_the_true_ones(group_size):
    """Half a step of the group, and what bfloat16 rounds off scale and zero point."""
    weight = linear(256, 32).weight
    codes, params = quantize_int4(weight, group_size)
    assert int(codes.min()) >= 0
    assert int(codes.max()) <= 15
    groups = weight.float().view(32, -1, group_size)
    step = (groups.amax(-1) - groups.amin(-1)).repeat_interleave(group_size, 1) / 15
    error = (dequantize_int4(codes, params, group_size) - weight.float()).abs()
    assert bool((error <= 0.75 * step + 0.01 * weight.float().abs().max()).all())
    assert float(error.mean()) < 0.3 * float(step.mean())


@pytest.mark.parametrize("value", [0.0, 0.37, -2.0])
def test_constant_weights_survive(value):
    """A group without any spread must not divide by zero."""
    codes, params = quantize_int4(torch.full((16, 32), value), 32)
    torch.testing.assert_close(dequantize_int4(codes, params, 32), torch.full((16, 32), value), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_answers_in_the_dtype_of_its_input(kernel, dtype):
    layer = to_int4(linear(64, 16, bias=True, dtype=dtype), 32)
    assert layer(torch.randn(2, 64, dtype=dtype)).dtype == dtype


def test_odd_shapes_are_kept_and_reported(kernel):
    model = tiny_model("llama", intermediate_size=40)  # of down_proj's inputs
    report = quantize_linears(share_copy(model), 32, "shared")
    assert (report.num_quantized, report.num_kept) == (12, 2)
    assert report.lm_head == "shared"


def test_memory_report(kernel):
    model = tiny_model("llama")
    copy = share_copy(model)
    report = quantize_linears(copy, 32, "shared")
    layers = [m for m in copy.modules() if isinstance(m, Int4Linear | BlockLinear)]
    assert report.num_quantized == len(layers)
    assert report.num_bytes == sum(layer.num_bytes for layer in layers)
    for layer in layers:  # half a byte a weight; a scale and a zero point in two bytes each, for each group
        outputs, inputs = layer.out_features, layer.in_features
        if kernel == "native":
            outputs += -outputs % 32  # in blocks of 32
        codes = outputs * (inputs if kernel == "native" else -(-inputs // 64) * 64)
        assert layer.num_bytes == codes // 2 + 4 * outputs * inputs // 32


def test_head(kernel):
    model = tiny_model("llama", vocab_size=96)
    copy = share_copy(model)
    assert quantize_linears(copy, 32, "int4").lm_head == "int4"
    assert isinstance(copy.get_output_embeddings(), Int4Linear | BlockLinear)
    odd = share_copy(tiny_model("llama"))  # 97 rows
    assert quantize_linears(odd, 32, "int4").lm_head == "int4"


@pytest.mark.parametrize("tied", [False, True])
def test_share_copy_shares_every_tensor_and_leaves_the_target_alone(tied):
    model = tiny_model("llama", tie_word_embeddings=tied)
    ids = torch.tensor([REPEATING])
    with torch.inference_mode():
        before = model(ids).logits
    copy = share_copy(model)
    ours, theirs = dict(model.named_parameters()), dict(copy.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(ours[name] is theirs[name] for name in ours)
    mine, its = dict(model.named_buffers()), dict(copy.named_buffers())
    assert all(mine[name] is its[name] for name in mine)
    assert not {id(m) for m in model.modules()} & {id(m) for m in copy.modules()}
    quantize_linears(copy, 32, "shared")
    assert not any(isinstance(m, Int4Linear | BlockLinear) for m in model.modules())
    assert copy.get_input_embeddings().weight is model.get_input_embeddings().weight
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, before)
        assert not torch.equal(copy(ids).logits, before)


def test_self_draft_reports_and_changes_no_bit_of_the_target():
    params = SamplingParams(max_tokens=8, logprobs=3)
    alone = LLM(tiny_model("llama")).generate(REPEATING, params)[0]
    drafter = SelfQuantized(lm_head="shared")
    assert drafter.report is None
    llm = LLM(tiny_model("llama"), drafter=drafter)
    assert drafter.report is not None
    assert (drafter.report.num_quantized, drafter.report.num_kept) == (
        12,
        2,
    )  # without the down projections, which have 48 inputs
    assert llm.plain().generate(REPEATING, params)[0].logprobs == alone.logprobs


@pytest.mark.parametrize("group_size", [0, 1, 31, 48, 512, -32])
def test_group_sizes_that_are_none(group_size):
    with pytest.raises(ConfigError, match=r"group size.*32, 64, 128, 256"):
        LLM(tiny_model("llama"), drafter=SelfQuantized(group_size))


def test_options_that_cannot_be():
    with pytest.raises(IncompatibleModels, match="no linear layer"):
        LLM(tiny_model("llama"), drafter=SelfQuantized(256))  # 32 inputs hold no group of 256
    with pytest.raises(IncompatibleModels, match="no linear layer"):
        LLM(tiny_model("gpt2"), drafter=SelfQuantized())  # Conv1D layers


def test_a_layer_packed_in_pieces_is_the_layer_packed_whole(kernel):
    linear = nn.Linear(64, 2 * 4096 + 48, bias=False, dtype=torch.bfloat16)
    codes, params = quantize_int4(linear.weight, 32)
    packed = to_int4(linear, 32)
    assert torch.equal(packed.weight, dequantize_int4(codes, params, 32).bfloat16())
