"""Folders of peft: what is read, and what is refused by name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import ConfigError
from paceline.hf.peft import read_adapter
from tests import lora
from tests.tiny import tiny_model

KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


@pytest.fixture
def folder(tmp_path):
    return lora.save(tmp_path / "adapter", tiny_model("llama"), names=("q_proj", "up_proj"))


def configure(folder, **options: object) -> None:
    about = json.loads((folder / lora.CONFIG).read_text())
    (folder / lora.CONFIG).write_text(json.dumps(about | options))


def rewrite(folder, **tensors: torch.Tensor | None) -> None:
    """tensors: by letter, those of one layer."""
    held = load_file(folder / lora.WEIGHTS)
    for name, tensor in tensors.items():
        held.pop(KEY.format(name), None) if tensor is None else held.update({KEY.format(name): tensor})
    save_file(held, folder / lora.WEIGHTS)


SCALES = {
    "alpha / r": ({"lora_alpha": 6}, 6 / 4),
    "rsLoRA": ({"lora_alpha": 6, "use_rslora": True}, 6 / 2),
    "alpha of a layer": ({"alpha_pattern": {"q_proj": 10}}, 10 / 4),
    "alpha of one path": ({"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 8, "q_proj": 1}}, 8 / 4),
    "alpha of another layer": ({"alpha_pattern": {"v_proj": 10, "proj": 3}}, 1.0),
}


@pytest.mark.parametrize("case", SCALES)
def test_b_has_the_scale(folder, case):
    options, scale = SCALES[case]
    configure(folder, **options)
    a, b = read_adapter(folder).pairs["model.layers.0.self_attn.q_proj"]
    held = load_file(folder / lora.WEIGHTS)
    assert torch.equal(a, held[KEY.format("A")])
    assert torch.equal(b, held[KEY.format("B")] * scale)


def test_ranks_of_layers(tmp_path):
    read = read_adapter(lora.save(tmp_path, tiny_model("llama"), ranks={"q_proj": 7, "down_proj": 2}))
    assert {path.rsplit(".")[-1]: len(a) for path, (a, _) in read.pairs.items()}["q_proj"] == read.rank == 7
    assert len(read.pairs["model.layers.1.mlp.down_proj"][0]) == 2


def test_the_fingerprint_tells_weights_and_scales(folder):
    first = read_adapter(folder).fingerprint
    assert read_adapter(folder).fingerprint == first
    configure(folder, lora_alpha=5)
    second = read_adapter(folder).fingerprint
    rewrite(folder, A=torch.zeros(4, 32))
    assert len({first, second, read_adapter(folder).fingerprint}) == 3


REFUSED = {
    "DoRA": ({"use_dora": True}, "DoRA.*use_dora.*merge"),
    "bias": ({"bias": "all"}, "biases.*bias"),
    "bias of B": ({"lora_bias": True}, "biases.*lora_bias"),
    "modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save.*merge"),
    "tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    "parameters": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
    "another kind": ({"peft_type": "IA3"}, "no LoRA adapter.*IA3"),
    "base changed": ({"init_lora_weights": "pissa"}, "own weights.*pissa.*convert"),
    "not known": ({"kasa_config": {"beta": 1}}, "not known.*kasa_config"),
    "rank": ({"r": 0}, r"\br\b"),
    "alpha": ({"lora_alpha": "16"}, "lora_alpha"),
    "NaN": ({"lora_alpha": float("nan")}, "lora_alpha|cannot be read"),
    "another rank": ({"r": 5}, "another rank.*rank 5"),
    "pattern": ({"alpha_pattern": {"(": 1}}, "pattern"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_cannot_be_computed_are_refused(folder, case):
    options, about = REFUSED[case]
    configure(folder, **options)
    with pytest.raises(ConfigError, match=rf"(?s){about}"):
        read_adapter(folder)


TENSORS = {
    "NaN": ({"A": torch.full((4, 32), float("nan"))}, "q_proj.lora_A.*NaN"),
    "infinity": ({"B": torch.full((32, 4), float("inf"))}, "q_proj.lora_B.*NaN or inf"),
    "no B": ({"B": None}, "lacks lora_B of model.layers.0.self_attn.q_proj"),
    "no A": ({"A": None}, "lacks lora_A"),
    "shapes": ({"A": torch.zeros(3, 32)}, "another rank"),
    "dimensions": ({"A": torch.zeros(4)}, "no matrix"),
    "integers": ({"A": torch.zeros(4, 32, dtype=torch.int8)}, "no matrix.*I8"),
    "too large": ({"A": torch.zeros(257, 32), "B": torch.zeros(32, 257)}, "rank of .*257.*at most 256"),
    "magnitudes": ({"magnitude_vector": torch.zeros(32)}, "none of a LoRA layer.*magnitude_vector"),
    "embeddings": ({"embedding_A": torch.zeros(4, 97)}, "none of a LoRA layer.*embedding_A"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_are_none_of_an_adapter_are_refused(folder, case):
    tensors, about = TENSORS[case]
    rewrite(folder, **tensors)
    with pytest.raises(ConfigError, match=rf"(?s){about}"):
        read_adapter(folder)


def test_files_that_are_not_there(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"no adapter at.*no such folder"):
        read_adapter(tmp_path / "nowhere")
    (folder / lora.WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model\.bin.*adapter_model\.safetensors.*run code"):
        read_adapter(folder)
    (folder / lora.WEIGHTS).write_bytes(b"\0" * 40)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_adapter(folder)
    (folder / lora.CONFIG).write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        read_adapter(folder)
