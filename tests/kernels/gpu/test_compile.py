"""What the kernels are compiled to, without a GPU: `bench/gpu_kernels.py`, which finds what must not be."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
KERNELS = "settle", "rotate", "multiply"  # of which one row was once a constant


def compiled(*options: str, mutant: str = "") -> dict:
    """The script's JSON, in a process without the interpreter. mutant: what is run before it."""
    code = f"import sys; from bench.gpu_kernels import main\n{mutant}\nsys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "--json", *options],
        cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert done.returncode == bool(found["faults"])
    return found


def test_a_pass_over_one_row_and_over_many():
    options = "--model", "smollm2-135m", "--weights", "bf16", "--card", "sm_90", "--rows", "1", "64"
    found = compiled(*options, "--kernel", *KERNELS)
    assert found["faults"] == []
    assert {one["kernel"] for one in found["kernels"]} == {*KERNELS}
    assert all(one["registers"] > 0 for one in found["kernels"])
    one, many = found["passes"]
    assert one["launches"] == many["launches"] > 30 * 8
    assert one["bytes"] == 2 * (30 * 576 * (2 * 576 + 2 * 192 + 3 * 1536) + 49152 * 576)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bf16", "int8", "int4", "fp8", "q8_0", "q4_k", "q5_k", "q6_k", "mxfp4"])
def test_every_kernel_in_every_format(weights):
    options = "--model", "smollm2-135m", "--rows", "1", "64", "512", "--card", "sm_89", "sm_90"
    assert compiled(*options, "--weights", weights)["faults"] == []


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3.5-4b", "falcon-h1-1.5b", "gemma-4-e2b"])
def test_every_kernel_of_a_family(model):
    assert compiled("--model", model, "--weights", "bf16", "--rows", "1", "16", "512")["faults"] == []


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama-7b", "qwen2.5-1.5b", "smollm2-135m"])
def test_every_kernel_on_every_card(model):
    assert compiled("--model", model)["faults"] == []


TILES = "from paceline.kernels.gpu import products\nproducts._tiles = lambda rows, *_, **__: ({})"
MUTANTS = {
    "uses wgmma": TILES.format("64, 64, dict(num_warps=4, num_stages=3)"),
    "of shared memory, sm_90 has 232448": TILES.format("32, 256, dict(num_warps=8, num_stages=8)"),
    "spills": TILES.format("32, 256, dict(num_warps=1, num_stages=2)"),
    "waits for its loads": TILES.format("32, 64, dict(num_warps=4, num_stages=1)"),
    "1 and 64 rows differ": TILES.format("16 if rows == 1 else 64, 64, dict(num_warps=4, num_stages=3)"),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(one, marks=[pytest.mark.slow] * (one != "uses wgmma")) for one in MUTANTS]
)
def test_a_mutant_is_reported(fault):
    rows = ["1", "64"] if "rows" in fault else ["64"]
    options = "--model", "llama-7b", "--weights", "bf16", "--card", "sm_90", "--kernel", "multiply", "--rows", *rows
    assert any(fault in one for one in compiled(*options, mutant=MUTANTS[fault])["faults"])
