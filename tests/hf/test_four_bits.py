"""Layers that other tools rounded to 4 bits, packed here as they pack them."""

import pytest
import torch
from torch import Tensor

from paceline.hf.checkpoint import Stored
from paceline.hf.four_bits import four_bits
from paceline.kernels import load
from paceline.kernels.library import BlockFormat
from paceline.kernels.packing import unpack

needs_native = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")
OUTS, INS = 48, 128
SETTINGS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 64},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4, "version": "gemm"},
    "packed": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}},
    },
}  # fmt: skip


def words(codes: Tensor, order=range(8)) -> Tensor:
    """Integers 0..15 [R, 8 W] -> int32 [R, W]; number order[i] of eight in bits 4 i."""
    rows = [
        [sum(int(row[8 * w + place]) << 4 * i for i, place in enumerate(order)) for w in range(len(row) // 8)]
        for row in codes.tolist()
    ]
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)  # the highest bit becomes the sign


def layer(kind: str, symmetric: bool, group: int = 64) -> tuple[dict[str, Tensor], Tensor]:
    """A layer's tensors, and its weights."""
    generator = torch.Generator().manual_seed(len(kind))
    codes = torch.randint(16, (OUTS, INS), generator=generator)
    zeros = torch.full((OUTS, INS // group), 8)
    if not symmetric:
        zeros = torch.randint(1, 16, (OUTS, INS // group), generator=generator)
    scales = (torch.rand(OUTS, INS // group, generator=generator) / 50).half()
    weight = (codes - zeros.repeat_interleave(group, 1)) * scales.float().repeat_interleave(group, 1)
    if kind == "packed":
        parts = {"weight_packed": words(codes), "weight_scale": scales, "weight_shape": torch.tensor([OUTS, INS])}
        return parts if symmetric else {**parts, "weight_zero_point": words(zeros.t()).t().contiguous()}, weight
    if kind == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        parts = {"qweight": words(codes.t(), order), "qzeros": words(zeros.t(), order)}
    else:
        stored = zeros - 1 if kind == "gptq" else zeros
        parts = {"qweight": words(codes).t().contiguous(), "qzeros": words(stored.t())}
        parts["g_idx"] = (torch.arange(INS) // group).int()
    return {**parts, "scales": scales.t().contiguous()}, weight


@needs_native
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", SETTINGS)
def test_weights_are_those_of_the_tool(kind, symmetric):
    parts, weight = layer(kind, symmetric)
    form = four_bits(SETTINGS[kind])
    assert form is not None
    tensors = {"a.scale": torch.ones(1), **{f"m.x.{name}": one for name, one in parts.items()}}
    stored = {name: Stored("I32", tuple(one.shape)) for name, one in tensors.items()}
    outlined = form.outline(stored)
    assert {name: one.shape for name, one in outlined.items()} == {"a.scale": (1,), "m.x.weight": (OUTS, INS)}
    read = dict(form.weights(stored, lambda names: ((name, tensors[name]) for name in names)))
    assert read.keys() == outlined.keys()
    blocks = read["m.x.weight"]
    assert blocks.form is (BlockFormat.Q4_0 if symmetric else BlockFormat.Q4_1)
    got = unpack(blocks, OUTS, INS)
    if symmetric:
        assert torch.equal(got, weight)
    else:  # the minimum is rounded
        torch.testing.assert_close(got, weight, atol=15 * 0.02 * 2**-11, rtol=0)


@needs_native
@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("gptq", lambda parts: {"g_idx": parts["g_idx"].flip(0)}, "adjacent"),
        ("gptq", lambda parts: {"scales": parts["scales"][:, :-8]}, "groups"),
        ("awq", lambda parts: {"qzeros": parts["qzeros"][:1]}, "groups"),
        ("packed", lambda parts: {"weight_scale": torch.ones(OUTS, 8)}, "multiples of 32"),
    ],
)
def test_what_blocks_cannot_hold_is_refused(kind, change, message):
    parts, _ = layer(kind, symmetric=False)
    form = four_bits(SETTINGS[kind])
    assert form is not None
    with pytest.raises(ValueError, match=message):
        form.blocks({**parts, **change(parts)})


@pytest.mark.parametrize(
    "about",
    [
        {"quant_method": "gptq", "bits": 8},
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"a": {"weights": {}}},
        },
        {**SETTINGS["packed"], "config_groups": {"a": {"weights": {"num_bits": 8, "type": "int"}}}},
        {**SETTINGS["packed"], "kv_cache_scheme": {"num_bits": 8}},
        {"quant_method": "fp8"},
    ],
)
def test_other_layouts_are_left_to_their_packages(about):
    assert four_bits(about) is None
