"""What is told of a model from its files is what is told once it is loaded."""

import json
from pathlib import Path

import pytest
from transformers import GenerationConfig

from paceline import LLM
from paceline.async_llm import AsyncLLM
from paceline.errors import ConfigError
from paceline.hf.load import context_of
from paceline.hf.model_files import read_files
from paceline.server.metrics import Metrics
from paceline.server.service import About, Service, Settings
from tests.cli.helpers import save
from tests.hf.test_gguf import written
from tests.tiny import tiny_model
from tests.vision.families import save_made


def folder(tmp_path):
    made = save(tmp_path, tiny_model("llama", max_position_embeddings=300))
    GenerationConfig(temperature=0.3, top_k=7, do_sample=True).save_pretrained(made)
    return made


FILES = {"folder": folder, "gguf": lambda tmp_path: written(tmp_path)[0], "vision": save_made}


def told(about):
    config, tokenizer = about.files.config.get_text_config(), about.files.tokenizer
    facts = about.architecture, about.dtype, about.sees, about.template, about.format.thinks, about.defaults
    return (*facts, about.context_length, config.hidden_size, config.num_hidden_layers, tokenizer.eos_token)


@pytest.mark.parametrize("kind", FILES)
def test_files_tell_what_the_loaded_model_tells(kind, tmp_path):
    place, settings = Path(FILES[kind](tmp_path)), Settings(model="m")
    files = read_files(place)
    about = About(files, settings, context_of(files.config.get_text_config()), 1)
    engine = AsyncLLM(LLM(place, max_num_seqs=1))
    loaded = engine.llm.loaded
    engine.shutdown()
    assert told(about) == told(Service(engine, settings, Metrics("paceline", "m")).about)
    assert told(about)[7:9] == (loaded.hidden_size, loaded.num_layers)
    assert about.sees == (kind == "vision")
    assert kind != "folder" or about.defaults == {"temperature": 0.3, "top_k": 7}


def test_dtype_and_tokenizer_may_be_others(tmp_path):
    other = save(tmp_path / "other", tiny_model("llama"))
    file = Path(other) / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token": "<s>"}))
    files = read_files(Path(save(tmp_path / "model", tiny_model("llama"))), "bfloat16", tokenizer=other)
    assert (str(files.dtype), files.tokenizer.eos_token) == ("torch.bfloat16", "<s>")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.gguf"])
def test_broken_files_are_named(name, tmp_path):
    made = Path(folder(tmp_path))
    (made / name).write_text("{")
    with pytest.raises(ConfigError, match=made.name):
        read_files(made / name if name.endswith("gguf") else made)
