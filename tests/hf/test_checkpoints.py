"""The dtype of a checkpoint, and what becomes of a model that the caller loaded; damage: `test_damaged_folders`."""

import pytest
import torch

from paceline.hf import load
from paceline.target import load_model, wrap_model
from paceline.target.load import with_weights
from paceline.target.self_test import tolerance
from tests.helpers import tokenizer
from tests.tiny import tiny_model


def test_a_model_that_the_caller_loaded_stays_as_it_is():
    model = tiny_model("llama", torch.bfloat16).train()
    modules, attention = [type(m) for m in model.modules()], model.config._attn_implementation
    wrap_model(model)
    assert [type(m) for m in model.modules()] == modules
    assert model.config._attn_implementation == attention
    assert model.training
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.diagonal
@pytest.mark.parametrize("asked", [None, "auto"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("has_16_bits", [True, False])
def test_the_usual_dtype_is_the_stored_one_or_float32_where_the_processor_lacks_it(
    tmp_path, monkeypatch, asked, stored, has_16_bits
):
    monkeypatch.setattr(load, "multiplies", lambda dtype, device: has_16_bits or dtype is torch.float32)
    tiny_model("llama", stored).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with monkeypatch.context() as without:  # as where no compiler is
        without.setattr(load, "library", lambda: None)
        assert load_model(str(tmp_path), asked, "cpu").dtype is (stored if has_16_bits else torch.float32)
    if load.library() is not None:  # native passes widen 16 bits in registers
        assert load_model(str(tmp_path), asked, "cpu").dtype is stored
    assert load_model(str(tmp_path), "bfloat16", "cpu").dtype is torch.bfloat16  # what is asked for is what is got


def test_a_gpu_is_never_said_to_lack_16_bits():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert load.multiplies(dtype, torch.device("cuda"))
    assert load.multiplies(torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_layers_of_few_bits_are_held_to_what_16_bits_can_promise(weights):
    """They round their inputs, so two float32 passes that differ in the last bit come out a level apart."""
    plain = wrap_model(tiny_model("llama", hidden_size=64, intermediate_size=64))
    rounded, _ = with_weights(plain, weights)
    assert tolerance(plain) == 0.02 < tolerance(rounded) == 0.35
