"""The script that measures what 16 bits change, on a tiny model."""

import pytest
import torch

from tests.cli.helpers import save
from tests.gguf_files import vocabulary, write_gguf
from tests.tiny import tiny_model

SCRIPT = "rounding"


def test_in_float32_both_are_exact_and_in_bfloat16_neither_is(script, tmp_path):
    kinds = {kind: save(tmp_path / str(kind), tiny_model("llama").to(kind)) for kind in (torch.float32, torch.bfloat16)}
    whole, half = (script.compare(folder, 2, 8) for folder in kinds.values())
    assert (whole["dtype"], whole["prompts"], half["dtype"]) == ("torch.float32", 2, "torch.bfloat16")
    for side in ("paceline", "transformers"):
        assert whole[side]["same_top"] == 1
        assert abs(whole[side]["mean_kl"]) < 1e-9 < half[side]["mean_kl"] < 0.1


def test_a_file_in_blocks_also_without_a_cache_of_16_bits(script, tmp_path):
    path = write_gguf(
        tmp_path / "tiny.gguf",
        tiny_model("llama", vocab_size=len(vocabulary()), intermediate_size=64),
        quantized="Q8_0",
    )
    found = script.compare(path, 2, 8, every=2)
    assert (found["model"], found["tokens"]) == ("tiny.gguf", 8)
    whole, half = (found[side]["mean_kl"] for side in ("paceline, float32 cache", "paceline"))
    assert 0 < whole < 0.01 > half > found["paceline, int16"]["mean_kl"] > 0


def test_divergence(script):
    p, q = torch.tensor([[0.25, 0.75]]), torch.tensor([[0.5, 0.5]])
    expected = 0.25 * torch.tensor(0.5).log() + 0.75 * torch.tensor(1.5).log()
    assert script.divergence(p.log(), q.log()).item() == pytest.approx(expected.item())
