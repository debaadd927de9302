"""Checkpoints that were quantised elsewhere are read, or refused before their weights are."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import save_file

from paceline.errors import ConfigError
from paceline.hf import quantized
from paceline.target import load_model, wrap_model
from paceline.target.self_test import plain_reference
from tests.helpers import tokenizer
from tests.tiny import tiny_model

KINDS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]},
    "mxfp4": {"quant_method": "mxfp4"},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
    "bitsandbytes": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}


def saved(folder, about):
    """A tiny model with weights in full, whose config.json says that they are quantised."""
    tiny_model("llama").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16", "quantization_config": about}))
    return folder


@pytest.mark.parametrize("method", quantized.METHODS)
def test_what_must_be_installed_is_said_before_weights_are_read(method, tmp_path, monkeypatch):
    folder = saved(tmp_path, KINDS[method])
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-8])  # nothing reads it
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    monkeypatch.setattr("paceline.hf.load.read_headers", lambda files: {f"layer{i}": None for i in range(99)})
    with pytest.raises(ConfigError, match=f"quantised by {method}") as caught:
        load_model(str(folder), device="cpu")
    for package in quantized.METHODS[method]:
        assert package.replace("_", "-") in str(caught.value)
    assert "--weights int4" in str(caught.value)


@pytest.mark.parametrize("method", ["quip", "hqq", None])
def test_other_kinds_are_refused(method, tmp_path):
    with pytest.raises(ConfigError, match=rf"not read\. Got: {method}\. Expected: .*gptq.*--weights int4"):
        load_model(str(saved(tmp_path, {"quant_method": method, "bits": 2})), device="cpu")


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="transformers reads FP8 with accelerate")
def test_fine_grained_fp8_becomes_bfloat16_on_a_cpu(tmp_path):
    """Of blocks with a scale each, as DeepSeek and Qwen publish them."""
    folder = saved(tmp_path, KINDS["fp8"])
    model = tiny_model("llama", dtype=torch.bfloat16)
    stored, expected = {}, {}
    for name, weight in model.state_dict().items():
        if not name.endswith("proj.weight"):
            stored[name] = expected[name] = weight
            continue
        blocks = weight.float().view(weight.shape[0] // 16, 16, weight.shape[1] // 16, 16)
        scales = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        stored[name], stored[name + "_scale_inv"] = codes.view(weight.shape), scales
        expected[name] = (codes.float() * scales[:, None, :, None]).view(weight.shape).bfloat16()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(str(folder), device="cpu")
    model.load_state_dict(expected)
    assert loaded.is_native
    for ours, theirs in zip(loaded.reference, plain_reference(model), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("about", "shared"),
    [
        ({"load_in_8bit": True}, True),
        ({"load_in_8bit": True, "llm_int8_threshold": 0.0}, False),
        (KINDS["bitsandbytes"], False),
    ],
)
def test_outliers_of_bitsandbytes_forbid_invariant_numerics(about, shared):
    """By what config.json says: random tokens need not have an outlier, so measuring might not find it."""
    model = tiny_model("llama")
    model.config.quantization_config = about
    assert wrap_model(model).mixes_rows is shared


def test_a_dtype_that_quantised_weights_did_not_take_is_refused():
    model = tiny_model("llama", torch.bfloat16)
    quantized.check_dtype("m", model, torch.float32)  # as transformers loaded it: not quantised
    model.config.quantization_config = KINDS["bitsandbytes"]
    quantized.check_dtype("m", model, None)
    quantized.check_dtype("m", model, torch.bfloat16)
    with pytest.raises(ConfigError, match=r"in this dtype. Got: float32. Expected: bfloat16. Fix: leave dtype out"):
        quantized.check_dtype("m", model, torch.float32)
