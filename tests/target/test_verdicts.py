"""Verdicts of the self-test: kept for a model, and worth nothing for any other."""

import json

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.errors import IncompatibleModels
from paceline.hf.gguf.load import open_gguf
from paceline.kernels import load as kernels
from paceline.target import LoadedModel, load_model, verdicts
from paceline.target import load as loading
from tests.gguf_files import write_gguf
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(kernels().library is None, reason=f"no native kernels here: {kernels().reason}")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4, "vocab_size": 300}


@pytest.fixture
def compared(monkeypatch, tmp_path):
    """The models that were run by plain transformers; verdicts are in a cache of their own."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(verdicts, "_SMALLEST", 0)
    models, real = [], loading.plain_reference
    monkeypatch.setattr(loading, "plain_reference", lambda model: models.append(model) or real(model))
    return models


@pytest.fixture(params=[None, "Q8_0"])
def path(request, tmp_path):
    return str(write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", **SIZES), "llama", quantized=request.param))


def kept(tmp_path):
    return sorted((tmp_path / "cache" / "self_tests").glob("*"))


def test_a_model_is_compared_once(compared, path, tmp_path):
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1)
    first, again = (LLM(path).generate([[5, 9, 31]], params)[0].outputs[0] for _ in range(2))
    assert len(compared) == 1
    assert first.logprobs == again.logprobs
    verdicts.forget()
    load_model(path)
    load_model(path, dtype="bfloat16")
    assert len(compared) == 3
    assert len(kept(tmp_path)) == 2


def test_what_is_broken_or_foreign_is_ignored(compared, path, tmp_path, monkeypatch):
    load_model(path)
    (file,) = kept(tmp_path)
    whole = file.read_text()
    for content in ("", whole[:-9], json.dumps({**json.loads(whole), "passed": "another"}), "\udcff"):
        file.write_bytes(content.encode(errors="surrogateescape"))
        count = len(compared)
        load_model(path)
        assert len(compared) == count + 1
        assert file.read_text() == whole
    monkeypatch.setattr(verdicts, "_code", lambda: "of another day")
    load_model(path)
    assert len(compared) == 6


def test_trees_are_compared_with_paths_every_time(compared, path, monkeypatch):
    load_model(path)
    real = LoadedModel.forward

    def forward(self, token_ids, layout, cache, states=None):
        logits = real(self, token_ids, layout, cache, states)
        return logits if layout.tree is None else logits + torch.arange(logits.shape[-1])

    monkeypatch.setattr(LoadedModel, "forward", forward)
    with pytest.raises(IncompatibleModels, match="for a tree"):
        load_model(path)
    assert len(compared) == 1


def test_models_that_fail_and_small_ones_leave_nothing(compared, path, tmp_path, monkeypatch):
    real = loading.plain_reference
    monkeypatch.setattr(loading, "plain_reference", lambda model: [2 * one for one in real(model)])
    with pytest.raises(IncompatibleModels):
        load_model(path)
    monkeypatch.undo()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    load_model(path)
    assert not kept(tmp_path)


def test_a_verdict_is_for_the_formats_of_the_weights(compared, tmp_path):
    model = tiny_model("llama", **SIZES)
    files = [write_gguf(tmp_path / f"{form}.gguf", model, quantized=form) for form in ("Q8_0", "Q4_0")]
    first, other = (open_gguf(file, lambda _: torch.bfloat16, packs=True)[0] for file in files)
    verdicts.keep(first, "the same")
    assert verdicts.has_passed(first, "the same")
    assert not verdicts.has_passed(other, "the same")
