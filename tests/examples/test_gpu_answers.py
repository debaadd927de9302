"""Answers in large batches: the tokens are those of `generate`, and samples follow the model's distribution."""

import sys
from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_model

SCRIPTS = Path(__file__).parents[2] / "examples" / "train_smollm2"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield __import__("gpu_answers")
    for name in ("gpu_answers", "own_prompts"):
        sys.modules.pop(name, None)


@torch.no_grad()
def test_greedy_texts_are_those_of_generate(script, monkeypatch):
    monkeypatch.setattr(script, "EVERY", 3)
    monkeypatch.setattr(script, "COLUMNS", 60)  # several groups
    model = tiny_model("llama")
    prompts = [[5, 9, 2, 7, 7, 1, 3], [4], [8, 8, 1], [3, 1], [6, 2, 9, 4]]
    whole = [
        model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12, eos_token_id=None)[0, len(ids) :]
        for ids in prompts
    ]
    end = int(whole[2][5])  # some of the texts stop early
    expected = [ids.tolist()[: next((n + 1 for n, one in enumerate(ids) if one == end), 12)] for ids in whole]
    assert min(map(len, expected)) < 12
    assert dict(script.written(model, prompts, [False] * 5, {end}, 12)) == dict(enumerate(expected))


def test_samples_follow_the_distribution_within_top_p(script):
    torch.manual_seed(0)
    p = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04])
    script.MOST_LIKELY = 5
    is_sampled = torch.arange(40_001) > 0
    drawn = script.chosen(p.log().expand(40_001, -1), is_sampled, 0.85)
    assert drawn[0] == 0  # greedy
    shares = torch.bincount(drawn[1:], minlength=5) / 40_000
    assert torch.allclose(shares, torch.tensor([4, 3, 2, 0, 0]) / 9, atol=0.01)
