"""Passes and damaged files under the sanitizers of the compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.kernels import compiler

SANITIZED = "passes", "recurrent", "bf12", "blocks", "experts", "attention", "latent"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(kind, tmp_path):
    """Tests of passes and of damaged files in a process of their own, whose library is compiled with sanitizers."""
    maker = compiler.find_compiler()
    if maker.name.startswith("zig"):
        pytest.skip("zig brings no sanitizers' runtime")
    names = [f"lib{name}.so" for name in {"address,undefined": ("asan", "ubsan"), "thread": ("tsan",)}[kind]]
    found = [
        subprocess.run([*maker.command, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in names
    ]
    if not all(Path(path).is_absolute() for path in found):
        pytest.skip(f"the compiler has no runtime for {kind}")
    script = f"""
import sys
from pathlib import Path
import pytest
from paceline.kernels import compiler
compiler.FLAGS = (*compiler.FLAGS, "-g", "-fsanitize={kind}", "-fno-omit-frame-pointer")
from paceline.kernels import load
assert load().library is not None, load().reason
tests = {[str(Path(__file__).with_name(f"test_{name}.py")) for name in SANITIZED]!r}
tests.append({str(Path(__file__).parents[1] / "hf" / "test_gguf_contradictions.py")!r})
some = "llama or qwen3_5 or gemma2 or olmo2 or bf12 or products or largest or changes_of_blocks"
some += " or experts or attention or latent"
sys.exit(pytest.main(["-n", "0", "-q", "-x", "-m", "not more and not gpu", "-k", some, *tests]))
"""
    environment = {
        **os.environ, "LD_PRELOAD": " ".join(found), "PACELINE_CACHE": str(tmp_path),
        "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1",
        "TSAN_OPTIONS": "halt_on_error=1 exitcode=66 ignore_noninstrumented_modules=1",
    }  # fmt: skip
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=root, capture_output=True, text=True, timeout=2400
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
