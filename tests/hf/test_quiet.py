"""Loading, converting and training draw no bar in a script, unless it is asked for; what a process set holds again."""

import pytest
import torch
from transformers.utils import logging

from paceline import LLM
from paceline.hf.gguf.load import convert_gguf
from paceline.train.models import plain_models
from tests.cli.helpers import save
from tests.hf.test_gguf import written
from tests.tiny import tiny_model


def load(folder, gguf, out):
    LLM(folder)


def load_gguf(folder, gguf, out):
    LLM(str(gguf))


def convert(folder, gguf, out):
    out.mkdir()
    convert_gguf(gguf, out)


def train(folder, gguf, out):
    plain_models(folder, torch.device("cpu"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    base = tmp_path_factory.mktemp("quiet")
    return save(base / "model", tiny_model("llama")), written(base)[0], base / "out"


@pytest.mark.parametrize("work", [load, load_gguf, convert, train])
@pytest.mark.parametrize("is_asked", [False, True])
def test_a_bar_is_drawn_only_where_it_is_asked_for(files, work, is_asked, capfd, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS", False if is_asked else None)
    before = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    try:
        work(*files[:2], tmp_path / "out")
        assert logging.is_progress_bar_enabled()
    finally:
        if not before:
            logging.disable_progress_bar()
    assert ("Loading weights" in capfd.readouterr().err) == is_asked
