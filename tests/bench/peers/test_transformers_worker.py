"""The transformers worker in this process: its counters, and that it asks for the plain distribution."""

import importlib.util

import pytest
import torch

from bench.peers.isolated import TRANSFORMERS
from tests.helpers import tokenizer
from tests.tiny import tiny_model

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model("llama")
    model.generation_config.repetition_penalty = 5.0  # a checkpoint's own taste, which no system must follow
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    spec = importlib.util.spec_from_file_location("transformers_worker", TRANSFORMERS.script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    settings = {"model": str(folder), "draft_model": str(folder), "num_speculative_tokens": 3, "threads": 1,
                "dtype": "float32"}  # fmt: skip
    return module.Worker(settings)


def greedy(model, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == 2:
                break
    return ids[len(prompt) :]


def test_plain_is_greedy_without_penalties(worker):
    answer = worker.run("plain", PROMPT, 12, 0.0)
    assert answer["token_ids"] == greedy(worker.model, PROMPT, 12)
    assert answer["num_tokens"] == answer["num_passes"] == len(answer["token_ids"]) - 1
    assert answer["prefill_s"] > 0
    assert answer["decode_s"] > 0


@pytest.mark.parametrize("mode", ["lookup", "draft"])
def test_speculation(worker, mode):
    plain, answer = (worker.run(m, PROMPT, 24, 0.0) for m in ("plain", mode))
    assert answer["token_ids"] == plain["token_ids"]
    assert 0 < answer["num_tokens"] <= len(answer["token_ids"]) - 1
    assert answer["num_passes"] < plain["num_passes"], "several tokens came out of one pass"
    assert answer["num_tokens"] >= answer["num_passes"]


def test_sampling(worker):
    answers = {tuple(worker.run("plain", PROMPT, 8, 1.0)["token_ids"]) for _ in range(4)}
    assert len(answers) > 1
