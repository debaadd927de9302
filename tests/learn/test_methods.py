"""Heads of each method learn, go on trial and stay or go; so do they over rounded caches and packed targets."""

from dataclasses import replace

import pytest
import torch

from paceline.kernels import load
from paceline.learn import trainer as module
from paceline.learn.folder import LearnFolder
from tests.gguf_files import vocabulary, write_gguf
from tests.helpers import loaded
from tests.learn.helpers import QUICK, answers, head_spec, learning_llm, trainer, until
from tests.methods.common import saved
from tests.tiny import tiny_model

METHODS = [
    "dspark",
    "jetspec",
    *(pytest.param(m, marks=pytest.mark.more) for m in ("dflash", "peagle", "mtp", "medusa")),
]
SOON = replace(QUICK, epochs=1)
native = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")


def learns(llm, monkeypatch) -> None:
    """A round gives a head, which is on trial for some requests and then stays or goes, while answers stay."""
    monkeypatch.setattr(module, "estimate", lambda task: -1.0)
    learned = llm.decoder.drafter
    expected = answers(llm.plain())
    assert answers(llm) == expected
    until(lambda: learned.learner.recorder.answers == 16)
    old = [type(head.drafter) for head in learned._heads]
    new = trainer(learned._folder.path, SOON).step()
    until(lambda: learned.learner.offered or learned.learner.has_failed)
    assert learned.learner.offered, "it cannot be read"
    assert learned.learner.offered[0] == new
    assert not old or [type(learned.learner.offered[1])] == old
    while not learned.swaps + learned.rollbacks:
        assert answers(llm) == expected
    assert len(learned._heads) == 1
    assert answers(llm) == expected
    assert not learned.learner.has_failed
    learned.close()
    assert LearnFolder(learned._folder.path).heads()


@pytest.mark.parametrize("method", METHODS)
def test_heads_of_each_method(method, tmp_path, monkeypatch):
    learns(learning_llm(tmp_path / "learn", head_spec(saved(tmp_path / "head", method), method)), monkeypatch)


@native
@pytest.mark.parametrize("form", ["int8", pytest.param("fp8", marks=pytest.mark.more)])
def test_over_a_rounded_cache(form, tmp_path, monkeypatch):
    target = loaded("llama", torch.bfloat16)
    learns(learning_llm(tmp_path, target=target, kv_cache_dtype=form), monkeypatch)


@native
def test_of_a_packed_target(tmp_path, monkeypatch):
    model = tiny_model("llama", vocab_size=len(vocabulary()), intermediate_size=64)
    path = write_gguf(tmp_path / "tiny.gguf", model, quantized="Q8_0")
    learns(learning_llm(tmp_path / "learn", target=path), monkeypatch)
