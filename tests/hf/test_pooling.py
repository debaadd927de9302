"""Embedding models: folders of sentence-transformers and GGUF files say how their embeddings are made."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError, IncompatibleModels
from paceline.hf import pooling
from tests.gguf_files import write_gguf
from tests.structured.common import byte_tokenizer
from tests.tiny import SMALL, tiny_model

IDS = [5, 9, 31, 7]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Path, torch.Tensor]:
    """A checkpoint of layers alone, as that of e5-mistral, and the last states of a text."""
    folder = tmp_path_factory.mktemp("embedding")
    torch.manual_seed(0)
    made = AutoModel.from_config(AutoConfig.for_model("mistral", **{**SMALL, "tie_word_embeddings": False})).eval()
    made.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    with torch.inference_mode():
        return folder, made(torch.tensor([IDS])).last_hidden_state[0]


@pytest.fixture
def told(model, tmp_path, monkeypatch):
    """The model's folder with other modules, by a function."""
    folder = model[0]
    pooling._of_folder.cache_clear()

    def tell(modes: dict | None, *kinds: str) -> LLM:
        modules = [{"idx": place, "type": f"sentence_transformers.models.{kind}"} for place, kind in enumerate(kinds)]
        (folder / "modules.json").write_text(json.dumps(modules))
        if modes is not None:
            (folder / "1_Pooling").mkdir(exist_ok=True)
            (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **modes}))
        return LLM(str(folder))

    return tell


def mode(name: str) -> dict:
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    return {f"pooling_mode_{one}": one == name for one in names}


def made(llm: LLM, **options) -> torch.Tensor:
    return torch.tensor(llm.embed([IDS], **options)[0].outputs.embedding)


@pytest.mark.parametrize(
    ("modes", "kinds", "is_mean", "is_normal"),
    [
        (mode("lasttoken"), ("Transformer", "Pooling", "Normalize"), False, True),
        (mode("mean_tokens"), ("Transformer", "Pooling"), True, False),
        ({"pooling_mode": "mean"}, ("Transformer", "Pooling", "Normalize"), True, True),
        (None, ("Transformer", "Normalize"), False, True),
    ],
)
def test_folders_of_sentence_transformers(model, told, modes, kinds, is_mean, is_normal):
    llm, states = told(modes, *kinds), model[1]
    state = states.mean(0) if is_mean else states[-1]
    want = torch.nn.functional.normalize(state, dim=0) if is_normal else state
    torch.testing.assert_close(made(llm), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(made(llm, pooling="last", normalize=False), states[-1], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("modes", "kinds", "words"),
    [
        (mode("cls_token"), ("Transformer", "Pooling"), "pooling 'cls_token'.*last or mean.*give pooling"),
        (mode("max_tokens"), ("Transformer", "Pooling"), "pooling 'max_tokens'"),
        ({**mode("lasttoken"), **mode("none")}, ("Transformer", "Pooling"), "no pooling"),
        (
            {**mode("lasttoken"), "pooling_mode_max_tokens": True},
            ("Transformer", "Pooling"),
            "max_tokens and lasttoken",
        ),
        (mode("lasttoken"), ("Transformer", "Pooling", "Dense"), "a module 'Dense'"),
    ],
)
def test_what_is_made_otherwise_is_refused(told, modes, kinds, words):
    llm = told(modes, *kinds)
    with pytest.raises(ConfigError, match=words):
        llm.embed([IDS])
    assert made(llm, pooling="last", normalize=True).norm() == pytest.approx(1)


def test_layers_alone_make_embeddings_alone(model, told):
    llm = told(mode("lasttoken"), "Transformer", "Pooling")
    for ask in (
        lambda: llm.generate([IDS]),
        lambda: llm.generate([IDS], SamplingParams(max_tokens=0, prompt_logprobs=1)),
        lambda: llm.score("a", "b"),
    ):
        with pytest.raises(ConfigError, match=r"makes embeddings alone.*Fix: use LLM\.embed"):
            ask()
    assert made(llm).shape == (32,)


@pytest.mark.parametrize(("number", "words"), [(0, ""), (1, ""), (3, ""), (2, "pooling 'cls'"), (4, "pooling 'rank'")])
def test_gguf_files(tmp_path, number, words):
    model = tiny_model("llama", vocab_size=262)
    llm = LLM(write_gguf(tmp_path / "tiny.gguf", model, more={"llama.pooling_type": number}))
    if words:
        with pytest.raises(ConfigError, match=words):
            made(llm)
        return
    with torch.inference_mode():
        states = model.base_model(torch.tensor([IDS])).last_hidden_state[0]
    want = torch.nn.functional.normalize(states.mean(0) if number == 1 else states[-1], dim=0)
    torch.testing.assert_close(made(llm), want, atol=1e-4, rtol=0)


def test_attention_in_both_directions_is_refused(model, told):
    llm = told(mode("lasttoken"), "Transformer", "Pooling")
    llm.loaded.model.config.is_causal = False
    with pytest.raises(ConfigError, match="both directions"):
        made(llm)


def test_encoders_are_refused(tmp_path):
    config = AutoConfig.for_model("bert", hidden_size=32, intermediate_size=32, num_attention_heads=2)
    AutoModel.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(IncompatibleModels, match=r"not a causal language model.*'bert'.*decoder-only"):
        LLM(str(tmp_path))
