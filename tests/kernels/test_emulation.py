"""The AVX-512 kernels pass their tests, and those of blocks have AVX2's bits, where the instructions are emulated."""

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.kernels import load


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_kernels_of_larger_processors():
    if "avx2" not in load().isas:
        pytest.skip(f"emulation needs AVX2, and there is: {load()}")
    root = Path(__file__).parents[2]
    what = ["-m", "not slow", "-k", "avx512 or agree", "tests/kernels", "tests/methods/test_draft_layer.py"]
    words = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-p", "tests.kernels.emulation", *what]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
