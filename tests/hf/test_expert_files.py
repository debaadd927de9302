"""Checkpoints of mixtures: read expert by expert, whatever names and tensors they have; damaged ones are named."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from paceline.errors import ConfigError, IncompatibleModels, NumericsError
from paceline.hf.checkpoint import Stored
from paceline.hf.described import DescribedModel
from paceline.hf.expert_files import check_experts
from paceline.hf.experts import state_by_expert
from paceline.hf.fingerprint import fingerprint
from paceline.hf.load import open_checkpoint
from paceline.kernels import load
from paceline.kernels.library import BlockFormat
from paceline.target import load_model, wrap_model
from paceline.target.prefill import reference_logits
from tests.helpers import tokenizer
from tests.tiny import EXPERTS, tiny_model

pytestmark = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")
LEFT = ("granitemoe_swa", "granitemoeshared", "sarvam_moe", "solar_open")  # transformers reads these


def written(folder, model):
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    "name",
    ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "granitemoe", "qwen3_next", *sorted(EXPERTS.keys() - {*LEFT})],
)
def test_each_expert_is_that_of_transformers(name, tmp_path):
    written(tmp_path, tiny_model(name))
    ours = open_checkpoint(str(tmp_path), None, "cpu", False, packs=True)[0]
    theirs = open_checkpoint(str(tmp_path), None, "cpu", False)[0]
    assert isinstance(ours, DescribedModel)
    assert fingerprint(ours) == fingerprint(theirs)
    for path, weight in state_by_expert(theirs).items():
        module, _, leaf = path.rpartition(".")
        assert torch.equal(getattr(ours.get_submodule(module), leaf), weight), path


def rounded(folder):
    """A gpt-oss whose experts are in MXFP4, and the model of transformers with what these say."""
    model = tiny_model("gpt_oss", torch.bfloat16, intermediate_size=64, moe_intermediate_size=64)
    tensors = dict(model.state_dict())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, ins, outs = tensors.pop(name).shape
        blocks = torch.randint(256, (count, outs, ins // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 126, (count, outs, ins // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        model.get_parameter(name).data.copy_(convert_moe_packed_tensors(blocks, scales))
    model.config.quantization_config = {"quant_method": "mxfp4"}
    model.config.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors")
    return model, tensors


def test_mxfp4_stays_in_its_blocks(tmp_path):
    """Loading compares its passes with transformers' in float32; the weights are those of transformers' reader."""
    model, tensors = rounded(tmp_path)
    loaded = load_model(str(tmp_path))
    assert loaded.is_native
    assert loaded.is_rounded
    held = dict(loaded.model.named_modules())
    for path, weight in state_by_expert(model).items():
        if ".experts." in path:
            module, _, leaf = path.rpartition(".")
            assert torch.equal(getattr(held[module], leaf), weight), path
    assert held["model.layers.0.mlp.experts.1.up_proj"].blocks.form == BlockFormat.MXFP4
    scales = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[scales][2, 3, 0] = 255
    save_file({name: one.contiguous() for name, one in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_model(str(tmp_path))
    del tensors[scales]
    save_file({name: one.contiguous() for name, one in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"down_proj_blocks has no scales"):
        load_model(str(tmp_path))


def settings(**changed):
    def change(folder, _):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    return change


def tensor(name, change):
    def damage(folder, tensors):
        tensors[name] = change(tensors[name])
        held = {name: one.contiguous() for name, one in tensors.items() if one is not None}
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


LAYER = "model.layers.1.mlp"


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (settings(num_local_experts=3), ConfigError, "4 model.*with .*experts.3.*3 in each layer"),
        (settings(num_experts_per_tok=5), IncompatibleModels, "5 of 4.*num_experts_per_tok"),
        (
            tensor(f"{LAYER}.experts.2.up_proj.weight", lambda _: None),
            ConfigError,
            f"without {LAYER}.experts.2.up_proj",
        ),
        (tensor(f"{LAYER}.gate.weight", lambda one: one * torch.nan), NumericsError, f"router.*{LAYER}.gate.weight"),
    ],
)
def test_damaged_mixtures_are_named(damage, error, words, tmp_path):
    damage(tmp_path, written(tmp_path, tiny_model("qwen3_moe")))
    with pytest.raises(error) as told:
        load_model(str(tmp_path))
    assert re.search(words, str(told.value), re.DOTALL), told.value


@pytest.mark.parametrize("name", ["hy_v3", "ernie4_5_moe", "deepseek_v3"])
def test_corrections_of_scores_are_not_rounded(name, tmp_path):
    model = tiny_model(name, torch.bfloat16)
    paths = [path for path in model.state_dict() if path.endswith("e_score_correction_bias")]
    stored = written(tmp_path, model)
    stored = {key: torch.rand(one.shape) if key.endswith("_bias") else one for key, one in stored.items()}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ours, theirs = (open_checkpoint(str(tmp_path), None, "cpu", False, packs=packs)[0] for packs in (True, False))
    assert paths
    for path in paths:
        assert ours.state_dict()[path].dtype is torch.float32
        assert torch.equal(ours.state_dict()[path], theirs.state_dict()[path])


def test_experts_of_several_kinds_are_left_to_transformers():
    """Ernie 4.5 VL numbers those of images behind those of text."""
    stored = {f"model.layers.1.mlp.experts.{index}.up_proj.weight": Stored("F32", (2, 2)) for index in range(8)}
    config = tiny_model("ernie4_5_moe").config
    with pytest.raises(ConfigError, match="8 model"):
        check_experts("a", config, stored)
    config.model_type = "ernie4_5_vl_moe_text"
    check_experts("a", config, stored)


def test_a_greedy_choice_knows_no_groups(tmp_path):
    """Whatever else the config says."""
    model, ids = tiny_model("deepseek_v2_lite", topk_group=1), list(range(1, 60))
    written(tmp_path, model)
    loaded = load_model(str(tmp_path))
    assert isinstance(loaded.model, DescribedModel)
    got, expected = (reference_logits(one, ids, 40) for one in (loaded, wrap_model(model)))
    assert torch.allclose(got, expected, atol=1e-3)
