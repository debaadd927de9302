"""A checkpoint that does not hold the whole model is refused: transformers would fill the gap with random numbers."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import ConfigError
from paceline.runner import load_model, wrap_model
from tests.helpers import tokenizer
from tests.tiny import tiny_model


@pytest.fixture
def folder(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    return tmp_path


def edit(folder, change) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_whole_checkpoint_loads(folder):
    assert load_model(str(folder), dtype="float32", device="cpu").vocab_size == 97


def test_a_missing_tensor_is_named(folder):
    edit(folder, lambda state: state.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ConfigError, match=r"lacks weights.*model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(str(folder), device="cpu")


def test_a_misshapen_tensor_is_refused(folder):
    edit(folder, lambda state: state.update({"model.norm.weight": torch.ones(31)}))
    with pytest.raises(ConfigError, match=r"weights.*model\.norm\.weight|cannot be read"):
        load_model(str(folder), device="cpu")


def test_a_model_that_the_caller_loaded_stays_as_it_is():
    model = tiny_model("llama", torch.bfloat16).train()
    modules, attention = [type(m) for m in model.modules()], model.config._attn_implementation
    wrap_model(model)
    assert [type(m) for m in model.modules()] == modules
    assert model.config._attn_implementation == attention
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
