"""The kernels of ARM pass their tests on emulated processors, each of which gets the best ones that it can run."""

import subprocess

import pytest

from tests.kernels.qemu import PYTHON, ROOT, environment, missing

MISSING = missing() or ("" if PYTHON.exists() else "`python -m tests.kernels.qemu` has not fetched its Python yet")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]
LOADED = """
import sys, types
torch = sys.modules["torch"] = types.ModuleType("torch")  # the library is loaded without
torch.device = object
from paceline.kernels import load
print(*load().isas, load().isa)
"""
ISAS = "portable", "neon", "neon_dotprod", "neon_i8mm"


def emulated(*words: str, processor: str = "max", asked: str = "") -> "subprocess.CompletedProcess[str]":
    """What the emulated Python says. asked: PACELINE_ISA."""
    settings = environment() | {"QEMU_CPU": processor, "PACELINE_ISA": asked}
    return subprocess.run([PYTHON, *words], cwd=ROOT, env=settings, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("processor", "count"), [("cortex-a72", 2), ("neoverse-n1", 3), ("max", 4)])
def test_the_best_that_a_processor_can_run(processor, count):
    found = emulated("-c", LOADED, processor=processor)
    assert found.stdout.split() == [*ISAS[:count], ISAS[count - 1]], found.stderr


def test_what_a_processor_cannot_run_is_refused():
    found = emulated("-c", LOADED, processor="neoverse-n1", asked="neon_i8mm")
    assert "lacks the instruction set" in found.stderr
    assert "Got: neon_i8mm. Expected: none or one of portable, neon, neon_dotprod. Fix: unset" in found.stderr


@pytest.mark.parametrize("what", ["test_arm.py", "test_blocks.py", "test_noise.py", "test_mutants.py"])
def test_the_kernels_of_arm(what):
    which = ["-m", "not slow and not more", "-k", "not late"]  # qemu 7 cannot fork a process that has threads
    done = emulated("-m", "pytest", "-n", "0", "-x", *which, f"tests/kernels/{what}")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_faults_in_them_are_seen():
    done = emulated("-m", "tests.kernels.arm")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
