"""The GPU benchmark's own code, on a tiny model on the CPU: the table is complete, and refusals say what to do."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_whole_table_on_a_tiny_model(bench, capsys):
    bench.main(["--device", "cpu", "--tiny", "--context", "20", "--repeat", "1", "--tokens", "6"])
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert [row["target"] for row in result["rows"]] == ["bf16", "int4"]
    for row in result["rows"]:
        assert list(row["growth"]) == ["1", "2", "4", "8", "16", "32", "64"]
        assert row["growth"]["1"] == 1.0
        assert 0 < row["fraction"] < 1
    assert "compute capability 8.9" in result["not_measured"]["fp8"]
    parts = result["round_ms"]
    assert 0 <= parts["gap"] < parts["draft"] < parts["round"]
    assert 0 < parts["verify"] < parts["round"]
    assert result["copy_gb_per_s"] > 0.1
    assert not any("the goal" in line for line in lines)  # a tiny model shows nothing about a GPU
    for word in ("copies:", "bf16", "fp8", "a round of self-int4"):
        assert any(line.startswith(word) for line in lines), word


def test_without_a_gpu_it_names_what_can_be_run(bench, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"no CUDA device.*--device cpu --tiny"):
        bench.main([])
    with pytest.raises(SystemExit, match="--tiny"):
        bench.main(["--device", "cpu"])


def test_the_shape_is_that_of_a_7b(bench):
    e, f, layers, v = (bench.SHAPE[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"))
    assert 6.5e9 < layers * (4 * e * e + 3 * e * f) + 2 * v * e < 7.0e9
