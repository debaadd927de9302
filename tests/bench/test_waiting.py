"""Benchmarks tell threads how to wait before torch is imported, which reads it once."""

import subprocess
import sys

import pytest

COMMAND = """
import os, sys
from paceline.system import hardware
choose, early = hardware.set_waiting, []
hardware.set_waiting = lambda *args: (early.append("torch" not in sys.modules), choose(*args))
import {module}
assert early and early[0]
assert "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ
"""


@pytest.mark.parametrize("module", ["bench.speeds", pytest.param("bench.long", marks=pytest.mark.more)])
def test_threads_are_told_before_torch_is_imported(module, monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    subprocess.run([sys.executable, "-c", COMMAND.format(module=module)], check=True)
