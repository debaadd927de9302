"""Formats of weights in the kernels of a GPU: what weights are, products of them, and bits of rows alone."""

from dataclasses import replace

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor, nn

from paceline.kernels.gpu import blocks, formats, products, rows
from paceline.kernels.gpu.structures import Matrix
from paceline.kernels.library import BlockFormat
from paceline.quant.block_rounding import round_rows
from paceline.quant.fp8 import Fp8Linear, dequantize_fp8, quantize_fp8
from paceline.quant.int4 import quantize_int4, to_int4
from paceline.quant.int8 import Int8Linear
from tests.kernels.gpu.faults import with_fault
from tests.quant.helpers import dequantize_int4

FILES = [form.name for form in BlockFormat if form.is_in_files]
OURS = ["INT8", "FP8", "INT4", "INT4 64", "INT2"]


NEAR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 2e-2}  # the interpreter cuts bfloat16 off


def made(form: str, ins: int = 0) -> tuple[Matrix, Tensor]:
    """A matrix, and its weights by other means, float32 [40, in]."""
    ins = ins or (256 if form in FILES and BlockFormat[form].inputs == 256 else 192 if form == "INT4 64" else 96)
    weight = torch.randn(40, ins, generator=torch.Generator().manual_seed(len(form)))
    linear = nn.Linear(ins, 40, bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if form in FILES:
        raw = round_rows(BlockFormat[form], weight, form)
        held = blocks.Blocks.of(BlockFormat[form], (40, ins), lambda some: raw[some], torch.device("cpu"))
        return held.matrix, torch.from_numpy(dequantize(raw.numpy(), GGMLQuantizationType[form]))
    if form == "INT8":
        int8 = Int8Linear(weight, None)
        return int8.matrix, int8.weight
    if form == "FP8":
        return Fp8Linear(linear).matrix, dequantize_fp8(*quantize_fp8(weight))
    bits, group = int(form[3]), int(form[4:] or 32)
    return to_int4(linear, group, bits).matrix, dequantize_int4(*quantize_int4(weight, group, bits), group)


def multiplies(form: str, dtype: torch.dtype, ins: int = 0) -> bool:
    """Whether products are those in float64, and rows have the same bits alone and among others, in other tiles."""
    matrix, weight = made(form, ins)
    x = torch.randn(40, matrix.ins, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = weight if form in ("INT8", "FP8") else weight.to(dtype)  # scales of these are not in the weights
    scale = x.double().norm(dim=1)[:, None] * exact.double().norm(dim=1) / matrix.ins**0.5
    got = products.multiply(x, [matrix])
    error = ((got.sum(0).double() - x.double() @ exact.double().T) / scale.clamp(min=1e-3)).abs().max()
    few = products.multiply(x[:17], [matrix])
    alone = [torch.equal(products.multiply(x[row : row + 1], [matrix])[:, 0], got[:, row]) for row in (0, 39)]
    whole = torch.allclose(products.finish(x, matrix).float(), got.sum(0), rtol=2**-7, atol=1e-4)
    return bool(error < NEAR[dtype]) and whole and all(alone) and few.equal(got[:, :17])


@pytest.mark.diagonal("slow")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", [*OURS, *FILES])
def test_products_are_those_of_the_weights(form, dtype):
    assert multiplies(form, dtype)


@pytest.mark.parametrize("form", FILES)
def test_rows_are_the_weights(form):
    matrix, weight = made(form)
    got, ids = torch.empty(20, matrix.ins), torch.randperm(40)[:20].int()
    rows.embed(matrix, ids, got, 1.0)
    assert torch.equal(got, weight[ids.long()])
    rows.embed(matrix, ids, got, 0.5)
    assert torch.equal(got, 0.5 * weight[ids.long()])


@pytest.mark.parametrize("form", ["INT8", "INT4", "Q6_K"])
def test_parts_and_neighbours_of_other_formats(form):
    """Outputs of a part are those of the whole; matrices side by side add as many parts as their shapes say."""
    matrix, weight = made(form, 256)
    table = torch.randn(8, 256)
    dense = Matrix(table, outs=8, ins=256)
    x = torch.randn(3, 256)
    whole, part = products.finish(x, matrix), products.finish(x, matrix.part(8, 24))
    assert torch.equal(part, whole[:, 8:24])
    together = products.multiply(x, [matrix.part(0, 24), dense, matrix.part(24, 40)]).sum(0)
    expected = x @ torch.cat([weight[:24], table, weight[24:]]).T
    torch.testing.assert_close(together, expected, atol=1e-3, rtol=1e-4)
    gated = products.finish(x, matrix, replace(dense, data=torch.ones(40, 256), outs=40), activation=0)
    sums = x.sum(1, keepdim=True)
    torch.testing.assert_close(gated, torch.nn.functional.silu(sums) * (x @ weight.T), atol=1e-3, rtol=1e-3)


def test_long_sums_are_cut_into_parts_that_rows_do_not_change():
    """Inputs that are no multiple of a step, too."""
    matrix, weight = made("INT4", 1056)
    x = torch.randn(40, 1056).bfloat16()
    got = products.multiply(x, [matrix])
    assert len(got) > 1
    assert torch.equal(products.multiply(x[7:8], [matrix])[:, 0], got[:, 7])
    torch.testing.assert_close(got.sum(0).double(), x.double() @ weight.double().T, atol=0.5, rtol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_inputs_of_8_bits_are_rounded_to_e4m3(dtype):
    linear = nn.Linear(64, 16, bias=False)
    x = torch.randn(3, 64).to(dtype)
    got = Fp8Linear(linear, input_bits=8)(x)
    most = x.float().abs().amax(1, keepdim=True)
    scale = torch.exp2((most / 448).log2().ceil())
    near = (x.float() / scale).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(near.to(dtype).float(), near)
    assert torch.equal(got, Fp8Linear(linear)(near.to(dtype)))
    assert not torch.equal(got, Fp8Linear(linear)(x))


FAULTS = {
    "the upper nibbles first": (
        "INT4",
        ">> J % 2 * 4 & 15\n        if FORMAT == _Q4_K",
        ">> 4 - J % 2 * 4 & 15\n        if FORMAT == _Q4_K",
    ),
    "the scale of the neighbouring group": ("INT4", "(first + 32 * J) // GROUP", "((first + 32 * J) // GROUP ^ 1)"),
    "zero points forgotten": ("INT4", "least = _half(words, 1, FORMAT != _Q4_1) -", "least = 0.0 -"),
    "the scale of the other half": ("Q8_0", "_half(words, J % 2, False)", "_half(words, 1 - J % 2, False)"),
    "minimums that are scales": ("Q4_K", "low & 63, middle & 63", "low & 63, low & 63"),
    "upper bits of the other half": ("Q6_K", "at + 128 - J // 4 * 32", "at + 160 - J // 4 * 96"),
    "codes without their sign": (
        "INT8",
        "weights = weights.to(tl.float32)",
        "weights = (weights.to(tl.int32) & 255).to(tl.float32)",
    ),
    "the scale of the next output": ("FP8", "tl.load(scales + column, mask", "tl.load(scales + (column ^ 1), mask"),
    "sums that depend on the rows": (
        "INT4",
        "sums = dot(left, tl.trans(weights.to(left.dtype)), sums)",
        "sums = dot(left, tl.trans(weights.to(left.dtype)), sums) + 1e-6 * (rows > 17)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault, tmp_path, monkeypatch):
    form, old, new = FAULTS[fault]
    for name in ("accumulate", "scaled"):
        monkeypatch.setattr(products, name, getattr(with_fault(formats, old, new, tmp_path), name))
    assert not multiplies(form, torch.float32, ins=256)
