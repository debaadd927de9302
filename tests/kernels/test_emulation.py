"""The AVX-512 kernels pass the tests of products and passes where their instructions are emulated."""

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.kernels import load

TESTS = ("blocks", "integers", "bf12", "noise", "passes")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_avx512_kernels_in_emulation():
    if "avx2" not in load().isas:
        pytest.skip("emulation needs AVX2")
    tests = [str(Path(__file__).with_name(f"test_{name}.py")) for name in TESTS]
    words = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-p", "tests.kernels.emulation", "-k", "avx512 or agree"]
    done = subprocess.run([*words, *tests], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
