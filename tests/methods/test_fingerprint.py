"""A checkpoint has one fingerprint, whatever it is loaded as; another checkpoint has another."""

import pytest
import torch

from paceline import LLM
from paceline.hf import fingerprint
from paceline.hf.gguf.load import open_gguf
from paceline.quant.linears import quantize_linears
from paceline.target import load_model, with_weights, wrap_model
from paceline.target.adapters import share_copy
from tests.gguf_files import write_gguf
from tests.gguf_mmproj import write_pair
from tests.helpers import tokenizer
from tests.tiny import tiny_model
from tests.vision.families import make

NAMES = ("llama", "qwen3", "gpt2", "gpt_oss")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint in bfloat16, with a weight too small for float16's normal numbers."""
    path = tmp_path_factory.mktemp("checkpoint")
    model = tiny_model("llama", torch.bfloat16)
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = 3e-6
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def test_one_fingerprint_in_every_dtype(folder):
    found = {load_model(folder, dtype).fingerprint for dtype in (None, "float16", "float32", "float64")}
    assert len(found) == 1


def test_rounded_weights_keep_it():
    target = wrap_model(tiny_model("llama", hidden_size=64, intermediate_size=64))
    rounded, _ = with_weights(target, "int4")
    assert rounded.fingerprint == target.fingerprint
    assert target.with_model(share_copy(target.model)).fingerprint == target.fingerprint


@pytest.mark.parametrize("name", NAMES)
def test_wrapped_twice(name):
    once = wrap_model(tiny_model(name))
    assert fingerprint.fingerprint(share_copy(once.model)) == once.fingerprint
    assert wrap_model(once.model).fingerprint == once.fingerprint
    assert wrap_model(tiny_model(name)).fingerprint == once.fingerprint  # a second load of the same weights


def test_rounded_outside_and_wrapped_again():
    once = wrap_model(tiny_model("llama", hidden_size=64, intermediate_size=64))
    copy = share_copy(once.model)
    quantize_linears(copy)
    assert fingerprint.fingerprint(copy) == once.fingerprint


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_weight_counts(name, tied):
    model = tiny_model(name, tie_word_embeddings=tied)
    before = fingerprint.fingerprint(model)
    seen = {before}
    for parameter in model.parameters():
        parameter.data.add_(0.5)
        seen.add(fingerprint.fingerprint(model))
    assert len(seen) == 1 + len(list(model.parameters()))


def test_fine_tuning_one_layer_changes_it():
    model = tiny_model("llama")
    before = wrap_model(model).fingerprint
    weight = model.model.layers[1].self_attn.q_proj.weight
    weight.data += 0.02 * torch.randn_like(weight)
    assert wrap_model(model).fingerprint != before


def test_the_architecture_counts():
    other = tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert wrap_model(other).fingerprint != wrap_model(tiny_model("llama")).fingerprint
    assert wrap_model(tiny_model("mistral")).fingerprint != wrap_model(tiny_model("qwen2")).fingerprint


def test_a_changed_model_of_transformers_own_layers_is_hashed_anew():
    """What was remembered counts only where layers of ours hide the weights."""
    once = wrap_model(tiny_model("gpt2", torch.float64))  # in other dtypes its output head is packed
    once.model.transformer.h[0].mlp.c_fc.weight.data.add_(1.0)
    assert wrap_model(once.model).fingerprint != once.fingerprint


def test_mutant_that_samples_one_column(monkeypatch):
    """The stride is odd: an even one would walk along a few columns and miss a change of the others."""
    torch.manual_seed(0)
    weight = torch.randn(512, 512)
    other = weight.clone()
    other[:, 1:4] += 1.0
    assert fingerprint.sample(weight) != fingerprint.sample(other)
    even = weight.reshape(-1)[::1024], other.reshape(-1)[::1024]
    assert torch.equal(*even)


def test_a_sketch_tells_copies_in_fewer_bits(tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 300}
    model = tiny_model("llama", **sizes)
    _, sketch = fingerprint.identity(model)
    for form, least in (("Q8_0", 0.97), ("Q5_1", 0.9), ("Q4_0", 0.85)):
        path = write_gguf(tmp_path / f"{form}.gguf", model, "llama", quantized=form)
        other, known = fingerprint.identity(open_gguf(path, lambda _: None)[0])
        assert other != fingerprint.fingerprint(model)
        assert least < fingerprint.likeness(sketch, known) <= 1
    for other in (tiny_model("llama", seed=1, **sizes), tiny_model("llama", **sizes, num_hidden_layers=3)):
        assert fingerprint.likeness(sketch, fingerprint.identity(other)[1]) < 0.7
    assert fingerprint.likeness("", "") == 0


@pytest.mark.parametrize("dtype", [None, "float32", "float64"])  # in blocks, in native passes, by transformers
def test_a_rounded_file_is_told_whatever_its_weights_became(dtype, tmp_path):
    for form in ("Q8_0", None):
        model = tiny_model("llama", vocab_size=262, intermediate_size=64)
        target = load_model(str(write_gguf(tmp_path / f"{form}.gguf", model, quantized=form)), dtype)
        assert target.origin == (target.sketch if form else "")
        assert with_weights(target, "int4")[0].origin == target.origin


def test_a_rounded_file_with_a_projector_is_told(tmp_path):
    for form in ("Q8_0", None):
        text, mmproj = write_pair(tmp_path, "llava", *make("llava"), form)
        target = LLM(text, mmproj=mmproj).loaded
        assert target.origin == (target.sketch if form else "")
