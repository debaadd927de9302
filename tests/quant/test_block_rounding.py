"""Rounding to llama.cpp's block formats: the bytes against `gguf`, errors against plain rounding, mixes, models."""

import itertools

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quantize
from gguf.quants import dequantize
from torch import Tensor, nn

from paceline.errors import ConfigError, IncompatibleModels
from paceline.kernels.library import BlockFormat, library
from paceline.quant.block_rounding import round_matrix, round_rows
from paceline.quant.blocks import BlockEmbedding, BlockLinear
from paceline.quant.linears import quantize_target
from paceline.quant.mixes import head_format, layer_format
from tests.helpers import REPEATING
from tests.tiny import tiny_model

needs_native = pytest.mark.skipif(library() is None, reason="no native kernels here")
FORMATS = [form for form in BlockFormat if form.is_in_files]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4, "vocab_size": 300}


def weights(outs: int = 24, ins: int = 512) -> Tensor:
    """Mostly small numbers, a few large ones, rows of very different sizes, and one of zeros."""
    w = torch.distributions.StudentT(5.0).sample((outs, ins)) * torch.logspace(-4, 1, outs)[:, None]
    w[3] = 0
    w[5] = w[5].abs()
    w[6] = -w[6].abs()
    return w


def read(form: BlockFormat, data: Tensor) -> Tensor:
    return torch.from_numpy(np.array(dequantize(data.numpy(), GGMLQuantizationType[form.name]), np.float32))


def error(form: BlockFormat, w: Tensor, data: Tensor) -> Tensor:
    """Relative to each row's size."""
    return (read(form, data) - w).norm(dim=1) / w.norm(dim=1).clamp_min(1e-9)


MOST = {"Q2_K": 0.4, "Q3_K": 0.22, "Q4_0": 0.12, "Q4_1": 0.11, "Q4_K": 0.1, "MXFP4": 0.15, "IQ4_NL": 0.1, "IQ4_XS": 0.1}
MOST |= {"Q5_0": 0.06, "Q5_1": 0.055, "Q5_K": 0.05, "Q6_K": 0.03, "Q8_0": 0.01}


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_the_bytes_hold_nearly_the_weights(form):
    torch.manual_seed(1)
    w = weights()
    got = error(form, w, round_rows(form, w, "w"))
    assert float(got.max()) < MOST[form.name]
    assert float(got[3]) == 0


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_no_worse_than_rounding_between_the_ends(name):
    torch.manual_seed(2)
    form, w = BlockFormat[name], torch.randn(64, 512)
    plain = torch.from_numpy(quantize(w.numpy(), GGMLQuantizationType[name]))
    ratio = error(form, w, round_rows(form, w, "w")).norm() / error(form, w, plain).norm()
    assert ratio < (1.001 if name == "Q8_0" else 0.96)


def test_more_bits_are_nearer():
    torch.manual_seed(3)
    w, names = torch.randn(32, 512), ["Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K"]
    errors = [float(error(BlockFormat[name], w, round_rows(BlockFormat[name], w, "w")).norm()) for name in names]
    assert all(1.6 * one < other for one, other in itertools.pairwise(errors))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_what_a_format_holds_stays(form):
    """Codes, integer scales and floats find their places: weights that are multiples of a scale come back."""
    torch.manual_seed(4)
    signed = not form.has_mins
    codes = torch.randint(-2, 2, (8, form.inputs)) if signed else torch.randint(0, 4, (8, form.inputs))
    codes[:, ::16] = -2 if signed else 3
    codes[:, 1::16] = 1 if signed else 0
    w = codes.float() / 32
    assert (read(form, round_rows(form, w, "w")) - w).abs().max() < 0.006


@needs_native
def test_kernels_read_the_same():
    torch.manual_seed(5)
    w = weights()
    for form in FORMATS:
        made = round_matrix(form, w, "w")
        assert torch.equal(made.rows(range(len(w))), read(form, round_rows(form, w, "w")))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e9])
def test_numbers_without_a_scale_are_refused(value):
    w = torch.randn(4, 256)
    w[2, 7] = value
    for form in (BlockFormat.Q8_0, BlockFormat.Q4_1, BlockFormat.Q4_K, BlockFormat.Q6_K):
        with pytest.raises(ConfigError, match=rf"'w' cannot be rounded to {form.name}"):
            round_rows(form, w, "w")


def test_mixes_are_those_of_llama_cpp():
    def forms(weights: str, part: str, layers: int = 24, inputs: int = 512) -> str:
        found = [layer_format(weights, f"model.layers.{i}.x.{part}_proj", layers, inputs) for i in range(layers)]
        return "".join(form.name[1] for form in found if form)

    assert forms("q4_k_m", "down") == forms("q4_k_m", "v") == "666446446446446446446666"
    assert forms("q4_k_m", "q") == "4" * 24
    assert forms("q3_k_m", "down") == "5" + "4" * 23
    assert forms("q3_k_m", "v") == "55" + "4" * 22
    assert forms("q5_k_m", "qkv") == "6" * 24
    assert forms("q4_k_m", "down", inputs=320) == "888558558558558558558888"
    assert layer_format("q3_k", "x", 1, 96) is BlockFormat.IQ4_NL
    assert layer_format("q4_0", "x", 1, 48) is None
    assert [head_format("q4_k", n) for n in (256, 96)] == [BlockFormat.Q6_K, BlockFormat.Q8_0]
    assert head_format("q8_0", 256) is BlockFormat.Q8_0


@needs_native
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_in_blocks(tied):
    model, same = (tiny_model("gemma3", **SIZES, tie_word_embeddings=tied) for _ in range(2))
    report = quantize_target(model, "q4_k_m")
    assert (report.num_quantized, report.num_kept, report.lm_head) == (15, 0, "q6_k")
    assert sum(report.formats.values()) == (15 if tied else 16)
    assert set(report.formats) == {"Q4_K", "Q6_K"}
    assert not [one for one in model.modules() if isinstance(one, nn.Linear | nn.Embedding)]
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    assert isinstance(head, BlockLinear)
    assert isinstance(table, BlockEmbedding)
    assert (head.data.data_ptr() == table.data.data_ptr()) == tied
    ids = torch.tensor([REPEATING])
    with torch.inference_mode():
        want, got = (one(ids).logits for one in (same, model))
    assert 0 < float((got - want).norm() / want.norm()) < 0.2


@needs_native
def test_what_does_not_fit_is_told():
    model = tiny_model("llama")  # 32 inputs, and 48
    report = quantize_target(model, "q4_k")
    assert report.formats == {"Q5_0": 13, "Q8_0": 1}
    assert (report.num_quantized, report.num_kept, report.lm_head) == (13, 2, "q8_0")
    with pytest.raises(IncompatibleModels, match="no linear layer"):
        quantize_target(tiny_model("gpt2"), "q8_0")  # Conv1D layers


def test_blocks_need_native_kernels(monkeypatch):
    monkeypatch.setattr("paceline.kernels.kernels_for", lambda device: None)
    with pytest.raises(ConfigError, match=r"q4_k.*kernels that this device does not have"):
        quantize_target(tiny_model("llama"), "q4_k")
