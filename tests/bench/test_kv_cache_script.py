"""The script that measures rounded caches, on a tiny model."""

import pytest
import torch

from paceline.kernels import load
from paceline.target.load import with_kv_cache
from tests.helpers import loaded, prompt

SCRIPT = "kv_cache"


@pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")
def test_less_memory_and_other_scores(script):
    plain = loaded("llama", torch.bfloat16)
    models = {"auto": plain, "int8": with_kv_cache(plain, "int8"), "fp8": with_kv_cache(plain, "fp8")}
    found = script.passes(models, [300], [1, 2], 1)[300]
    assert found["MB"]["fp8"] <= found["MB"]["int8"] < found["MB"]["auto"]
    assert all(ms > 0 for rows in (1, 2) for ms in found[rows].values())
    moved = script.errors(models, [prompt(80)])
    assert 0 < moved["int8"]["mean_kl"] < moved["fp8"]["mean_kl"]
    assert moved["int8"]["same_top"] > 0.8
