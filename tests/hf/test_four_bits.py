"""Layers that other tools rounded to 4 bits, packed here as they pack them."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline import LLM, Fixed, SamplingParams
from paceline.core.tree import TokenTree
from paceline.errors import ConfigError
from paceline.hf import quantized
from paceline.hf.checkpoint import Stored
from paceline.hf.four_bits import four_bits
from paceline.kernels import load
from paceline.kernels.library import BlockFormat
from paceline.kernels.packing import unpack
from paceline.quant.blocks import BlockLinear
from tests.helpers import REPEATING, tokenizer
from tests.tiny import tiny_model

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


def layer(
    kind: str, symmetric: bool, outs: int = OUTS, ins: int = INS, group: int = 64
) -> tuple[dict[str, Tensor], Tensor]:
    """A layer's tensors, and its weights."""
    generator = torch.Generator().manual_seed(len(kind))
    codes = torch.randint(16, (outs, ins), generator=generator)
    zeros = torch.full((outs, ins // group), 8)
    if not symmetric:
        zeros = torch.randint(1, 16, (outs, ins // group), generator=generator)
    scales = (torch.rand(outs, ins // group, generator=generator) / 50).half()
    weight = (codes - zeros.repeat_interleave(group, 1)) * scales.float().repeat_interleave(group, 1)
    if kind == "packed":
        parts = {"weight_packed": words(codes), "weight_scale": scales, "weight_shape": torch.tensor([outs, ins])}
        return parts if symmetric else {**parts, "weight_zero_point": words(zeros.t()).t().contiguous()}, weight
    if kind == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        parts = {"qweight": words(codes.t(), order), "qzeros": words(zeros.t(), order)}
    else:
        stored = zeros - 1 if kind == "gptq" else zeros
        parts = {"qweight": words(codes).t().contiguous(), "qzeros": words(stored.t())}
        parts["g_idx"] = (torch.arange(ins) // group).int()
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
    read = dict(form.weights(stored, lambda names: ((name, tensors[name]) for name in names), outlined))
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
        ("packed", lambda parts: {"weight_scale": parts["weight_scale"] * float("inf")}, "not finite"),
        ("awq", lambda parts: {"scales": parts["scales"] * float("nan")}, "not finite"),
        ("awq", lambda parts: {"scales": parts["scales"].bfloat16() * 1e7}, "bfloat16 that float16"),
        ("gptq", lambda parts: {"scales": torch.full_like(parts["scales"], 1.1e-6, dtype=torch.bfloat16)}, "float16"),
        ("gptq", lambda parts: {"scales": torch.full_like(parts["scales"], 6e4)}, "zero points times"),
    ],
)
def test_layers_that_are_no_blocks(kind, change, message):
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
        {**SETTINGS["packed"], "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
        {"quant_method": "fp8"},
    ],
)
def test_other_layouts_are_left_to_their_packages(about):
    assert four_bits(about) is None


def saved(folder, kind: str, spare_bias: float | None = None, group: int = 64, changed=dict, **about):
    """A tiny model whose linear layers are rounded, and the model with the weights that they stand for.

    changed: gives the tensors of a layer that are stored, from those that fit.
    """
    model = tiny_model("llama", torch.float16, hidden_size=64, intermediate_size=128, head_dim=16)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    tensors, state = {}, model.state_dict()
    for name, weight in state.items():
        if not name.endswith("proj.weight"):
            tensors[name] = weight
            continue
        path = name.removesuffix(".weight")
        parts, state[name] = layer(kind, False, *weight.shape, group)
        tensors |= {f"{path}.{end}": one.contiguous() for end, one in changed(parts).items()}
        if spare_bias is not None:
            tensors[f"{path}.bias"] = torch.full((len(weight),), spare_bias, dtype=torch.float16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {**SETTINGS[kind], **about}}))
    model.load_state_dict(state)
    return model.float()


@needs_native
@pytest.mark.parametrize("kind", SETTINGS)
def test_a_checkpoint_is_read_without_the_packages_of_its_tool(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    plain = saved(tmp_path, kind, 0.0 if kind == "gptq" else None)
    llm = LLM(str(tmp_path), activations="int16", device="cpu")
    assert llm.loaded.is_native
    assert llm.loaded.origin == llm.loaded.sketch
    forms = {one.form for one in llm.loaded.model.modules() if isinstance(one, BlockLinear)}
    assert forms == {BlockFormat.Q4_1}
    slot = llm.runner.admit([0])
    got = llm.runner.forward([slot], TokenTree.chain([REPEATING]))[0]
    with torch.inference_mode():
        want = plain(torch.tensor([REPEATING])).logits[0]
    assert float((got - want).abs().max()) < 0.02 * float(want.std())
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    drafted = LLM(str(tmp_path), drafter="lookup", policy=Fixed(3), device="cpu").generate(REPEATING, params)[0]
    assert drafted.token_ids == LLM(str(tmp_path), device="cpu").generate(REPEATING, params)[0].token_ids


@needs_native
def test_what_cannot_become_blocks_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    saved(tmp_path / "a", "gptq", desc_act=True)
    with pytest.raises(ConfigError, match="gptqmodel"):
        LLM(str(tmp_path / "a"), device="cpu")
    saved(tmp_path / "b", "gptq", spare_bias=1.0)
    with pytest.raises(ConfigError, match=r"proj\.bias is a bias, which this model does not have"):
        LLM(str(tmp_path / "b"), device="cpu")


@pytest.mark.parametrize(
    ("kind", "codes", "scales", "fits"),
    [
        ("gptq", (16, 48), (2, 48), True),
        ("awq", (128, 6), (1, 48), True),
        ("packed", (48, 16), (48, 4), True),
        ("packed", (48, 16), (48, 8), False),  # groups of 16
        ("packed", (48, 18), (48, 1), False),  # 144 inputs in one
        ("packed", (48, 16), (48,), False),
        ("gptq", (16, 48), (0, 48), False),
        ("gptq", (48,), (2, 48), False),
    ],
)
def test_shapes_tell_before_weights_are_read(kind, codes, scales, fits):
    form = four_bits(SETTINGS[kind])
    assert form is not None
    first, *_, last = form.suffixes
    assert form.fits({f"x.{first}": Stored("I32", codes), f"x.{last}": Stored("F16", scales)}) is fits


@needs_native
@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("gptq", {"group": 16}, "by gptq, and what reads them is not installed.*gptqmodel"),
        ("awq", {"group": 16}, "by awq, and.*gptqmodel"),
        ("packed", {"group": 16}, "by compressed-tensors, and"),
        ("packed", {"changed": lambda parts: {**parts, "weight_scale": torch.ones(1)}}, "by compressed-tensors, and"),
        ("packed", {"transform_config": {"config_groups": {"R1": {}}}}, "by compressed-tensors, and"),
        (
            "gptq",
            {"changed": lambda parts: {**parts, "g_idx": parts["g_idx"] * 0}},
            r"by gptq with groups that are not of adjacent inputs \(desc_act, actorder\), and.*gptqmodel",
        ),
        (
            "awq",
            {"changed": lambda parts: {**parts, "scales": parts["scales"].bfloat16() * 1e-5}},
            "by awq with scales in bfloat16 that float16 does not hold",
        ),
    ],
)
def test_what_blocks_cannot_hold_is_left_to_the_packages(kind, options, said, tmp_path, monkeypatch):
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    saved(tmp_path, kind, **options)
    with pytest.raises(ConfigError, match=said):
        LLM(str(tmp_path), device="cpu")


@needs_native
def test_the_packages_read_what_turns_out_unlike_blocks(tmp_path, monkeypatch, caplog):
    """Here the package is not there, and transformers says so."""
    monkeypatch.setattr(quantized, "find_spec", lambda name: True)
    saved(tmp_path, "gptq", changed=lambda parts: {**parts, "g_idx": parts["g_idx"] * 0})
    with pytest.raises(ConfigError, match=r"cannot be read.*(optimum|gptqmodel)"):
        LLM(str(tmp_path), device="cpu")
    assert "blocks cannot hold groups that are not of adjacent inputs" in caplog.text
