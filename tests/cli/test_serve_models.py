"""`paceline serve` with several models: which options each one gets, and what is refused before anything is loaded."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.cli import serve as command
from paceline.server.service import Settings
from tests import lora
from tests.cli.helpers import answer, paceline, refusal
from tests.cli.test_serve_vllm import command as vllm
from tests.tiny import tiny_model

CONFIG = """
model: {model}
drafter: lookup
max-model-len: 1k
models:
  - model: {model}
    name: small
    drafter: none
    max-model-len: 2K
    weights: int8
    allow-lossy: true
    adapters: {{poet: {adapter}}}
  - {{model: {model}, name: tuned, profile: {model}, seed: 3}}
"""


@pytest.fixture
def adapter(tmp_path):
    return str(lora.save(tmp_path / "poet", tiny_model("llama", max_position_embeddings=50_000), strength=1.0))


@pytest.fixture
def chosen(monkeypatch):
    """The models that would be served."""
    seen = []

    def models(given, *_):
        seen.extend(given)
        raise OSError("enough")

    monkeypatch.setattr(command, "_models", models)
    return seen


def serve(tmp_path, text, *arguments):
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    return paceline("serve", "--config", str(file), "--port", "0", *arguments)


def test_each_model_has_options_of_its_own(chosen, model, adapter, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.tuned.load_tuned", lambda path: SimpleNamespace(
        profile=path, config=SimpleNamespace(as_dict=lambda: {"method": "suffix"})))  # fmt: skip
    told = serve(tmp_path, CONFIG.format(model=model, adapter=adapter), "--threads", "1")
    assert told.stderr.splitlines()[-1] == "Error: enough."
    first, small, tuned = chosen
    assert [one.speculation.config.name for one in chosen] == ["lookup", "none", "suffix"]
    assert [one.name for one in chosen] == [model.rpartition("/")[2], "small", "tuned"]
    assert [one.loading.max_model_len for one in chosen] == [1000, 2048, 1000]
    assert [one.loading.weights for one in chosen] == [None, "int8", None]
    assert [one.loading.threads for one in chosen] == [1, 1, 1]
    assert [one.speculation.allow_lossy for one in chosen] == [False, True, False]
    assert (first.adapters, small.adapters, tuned.adapters) == ({}, {"poet": adapter}, {})
    assert (first.server.seed, tuned.server.seed, str(tuned.speculation.profile)) == (None, 3, model)


def test_what_is_told_of_a_model_that_is_not_loaded(chosen, model, tmp_path):
    paceline("serve", model, "--port", "0", "--max-model-len", "2K", "--chat-template", "{{ messages }}")
    about = command._teller(chosen[0], Path(model), Settings(model="small"))()
    assert (about.context_length, about.num_slots, about.template) == (2048, 8, "{{ messages }}")
    assert about.architecture == "llama"
    assert command._teller(chosen[0], tmp_path / "nowhere", None) is None


def test_adapters_of_the_command_line(chosen, model, adapter):
    more = json.dumps({"name": "law", "path": adapter, "base_model_name": model.rpartition("/")[2]})
    for words in (
        ["--adapter", f"poet={adapter}", "--adapter", more],
        ["--lora-modules", f"poet={adapter}", f"law={adapter}", "--enable-lora"],
    ):
        told = paceline("serve", model, "--port", "0", *words)
        assert told.stderr.splitlines()[-1] == "Error: enough."
        assert chosen.pop().adapters == {"poet": adapter, "law": adapter}
    paceline("serve", model, "--port", "0", "--lora-modules", more)
    assert chosen.pop().adapters == {"law": adapter}


@pytest.mark.parametrize(
    ("text", "told"),
    [("models: [{name: a}]", "names no model"),
     ("models: [{model: a, port: 3}]", "has an option that a model does not have. Got: port"),
     ("models: [{model: a, max-num-seqs: [1, 2]}]", "has a wrong max-num-seqs"),
     ("models: [{model: a, allow_lossy: 3}]", "true or false"),
     ("models: [{model: a, adapters: [x]}]", "the adapters of a"),
     ("models: [{model: a, adapters: {x: nowhere}}]", "an adapter is not there"),
     ("models: [{model: a}, {model: b}]\nserved-model-name: c", "--served-model-name names one model"),
     ("models: [{model: a}, {model: b}]\nlearn: d", "--learn is for one model"),
     ("models: [{model: a}, {model: b}]\nadapter: x=y", "of none of the models"),
     ("model: a\nadapter: x", "NAME=DIR"),
     ("model: a\nadapter: a=b", "same name"),
     ("models: [{model: a, drafter: nonsense}]", "nonsense")],
)  # fmt: skip
def test_wrong_models_of_a_file(text, told, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    assert told in refusal("serve", "--config", str(file))


def test_a_wrong_value_of_a_model_is_a_usage_error(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("models: [{model: a, weights: int5}]")
    assert "--weights" in refusal("serve", "--config", str(file), code=2)


def test_two_models_of_the_same_name(model):
    assert "two models or adapters have the same name" in refusal("serve", model, model, "--port", "0")


def test_vllm_gets_adapters(model):
    words = vllm(model, "--adapter", "a=b", "--max-loras", "3")
    place = words.index("--lora-modules")
    assert words[place : place + 2] == ["--lora-modules", "a=b"]
    assert "--enable-lora" in words
    assert vllm(model, "--lora-modules", "a=b", "c=d")[place:][:4] == ["--lora-modules", "a=b", "c=d", "--enable-lora"]
    assert "one model" in refusal("serve", model, "--engine", "vllm", "--print", "--preload")
    assert "vLLM serves one model" in refusal("serve", model, model, "--engine", "vllm", "--print")


def test_generate_answers_with_an_adapter(model, adapter):
    asked = "generate", model, "-p", "w5 w9", "--max-tokens", "8"
    plain, adapted = answer(*asked), answer(*asked, "--adapter", adapter)
    drafted = answer(*asked, "--adapter", adapter, "--drafter", "lookup")
    assert plain["token_ids"] != adapted["token_ids"] == drafted["token_ids"]
    assert "adapter_config.json" in refusal(*asked, "--adapter", model)
