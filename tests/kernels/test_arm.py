"""On ARM all instruction sets have the same bits, in products and whole passes; faults in any of them are seen."""

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.kernels import compiler, load
from tests.kernels.arm import ROWS, agrees

pytestmark = pytest.mark.skipif(compiler.HOST.machine != "aarch64", reason="not an ARM processor")


@pytest.mark.parametrize("isa", ROWS)
def test_bits_are_those_of_the_portable_kernels(isa):
    if isa not in load().isas:
        pytest.skip(f"this processor lacks it: {load()}")
    assert agrees(isa)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_faults_are_seen():
    words = [sys.executable, "-m", "tests.kernels.arm"]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
