"""The script that measures what 16 bits change, on a tiny model."""

import pytest
import torch

from tests.cli.helpers import save
from tests.tiny import tiny_model

SCRIPT = "rounding"


def test_in_float32_both_are_exact_and_in_bfloat16_neither_is(script, tmp_path):
    kinds = {kind: save(tmp_path / str(kind), tiny_model("llama").to(kind)) for kind in (torch.float32, torch.bfloat16)}
    whole, half = (script.compare(folder, 2, 8) for folder in kinds.values())
    assert (whole["dtype"], whole["prompts"], half["dtype"]) == ("torch.float32", 2, "torch.bfloat16")
    for side in ("paceline", "transformers"):
        assert whole[side]["same_top"] == 1
        assert abs(whole[side]["mean_kl"]) < 1e-9 < half[side]["mean_kl"] < 0.1


def test_divergence(script):
    p, q = torch.tensor([[0.25, 0.75]]), torch.tensor([[0.5, 0.5]])
    expected = 0.25 * torch.tensor(0.5).log() + 0.75 * torch.tensor(1.5).log()
    assert script.divergence(p.log(), q.log()).item() == pytest.approx(expected.item())
