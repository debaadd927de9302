"""The tests of bits must be able to fail: each fault below is compiled into the kernels, and seen.

Also runs the passes under the sanitizers of the compiler (slow).
"""

import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.kernels import build, compiler, load
from paceline.kernels import library as library_module
from paceline.runner import ModelRunner, wrap_model
from tests.kernels.test_passes import random_tree, rows
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")

FAULTS = {  # file, then pairs: what is there, what takes its place
    "none": ("body.cpp", "", ""),
    "a sum over k that depends on the rows": (
        "body.cpp",
        "load_pair(w, k, column + c * LANES",
        "load_pair(w, R > 1 ? pairs - 1 - k : k, column + c * LANES",
    ),
    "a path in the order of the tree": (
        "pass.h",
        "s.paths[used++] = (int32_t)(start + n);",
        "s.paths[used++] = (int32_t)(start + n); if (used - r.path > 1) "
        "{ auto t = s.paths[used - 1]; s.paths[used - 1] = s.paths[r.path]; s.paths[r.path] = t; }",
    ),
    "a stale column": (
        "pass.h",
        "store_row((char*)pass->values[index] + at",
        "if (!n || n % 3) store_row((char*)pass->values[index] + at",
    ),
    "a sibling seen": (
        "pass.h",
        "if (r.straight == r.own - 1 && start + n == r.straight) {",
        "if (r.straight == r.own - 1) {",
    ),
    # A busy machine may run two threads one after the other, so the second one is slow: it is late wherever it runs.
    "no waiting for the others": (
        "pool.h",
        "      f(piece);",
        "      if (me.id) for (volatile int i = 0; i < 50000; i = i + 1) {}\n      f(piece);",
        "if (load_acquire(done) != pieces) wait_for(done, pieces);",
        "",
    ),
}


def compiled(folder: Path, fault: str, monkeypatch, flags: tuple[str, ...] = ("-O0",)) -> None:
    """Have the library with this fault in the place of ours, in its portable form."""
    name, *pairs = FAULTS[fault]
    sources = folder / "sources"
    shutil.copytree(compiler.SOURCES, sources, ignore=shutil.ignore_patterns("*.py", "*.so", "__pycache__"))
    text = (sources / name).read_text()
    for right, wrong in zip(pairs[::2], pairs[1::2], strict=True):
        assert right in text
        text = text.replace(right, wrong)
    (sources / name).write_text(text)
    monkeypatch.setattr(compiler, "ISAS", {"portable": ()})
    monkeypatch.setattr(compiler, "FLAGS", tuple(f for f in compiler.FLAGS if f != "-O3") + flags)
    out = folder / compiler.LIBRARY
    compiler.compile_library(out, compiler.find_compiler(), sources)
    found = replace(load(), library=build.ctypes.CDLL(str(out)), isa="portable")
    monkeypatch.setattr(library_module, "load", lambda: found)
    library_module.library.cache_clear()


@pytest.fixture
def restored(monkeypatch):
    """Our own library again, once the test is over."""
    yield
    monkeypatch.undo()
    library_module.library.cache_clear()
    library_module.library()


def has_the_bits_of_plain_decoding(trials: int = 6) -> bool:
    """Random trees of tiny models on two threads, each path against one row at a time."""
    rng, threads = random.Random(1), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runner = ModelRunner(wrap_model(tiny_model("llama")), 1, 200)
        slot = runner.cache.allocate()
        for _ in range(trials):
            runner.cache.truncate(slot, 0)
            runner.prefill(slot, [rng.randrange(3, 97) for _ in range(rng.choice((1, 17, 60)))])
            tree = random_tree(12, rng)
            got = runner.forward([slot], tree)[0].clone()
            for leaf in set(range(12)) - set(tree.parents[0].tolist()):
                path = [0, *tree.path_to(0, leaf)]
                if not torch.equal(got[path], rows(runner, slot, tree.token_ids[0, path].tolist())):
                    return False
        return True
    except Exception:  # the check at loading sees the worst of them
        return False
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault, tmp_path, monkeypatch, restored):
    compiled(tmp_path, fault, monkeypatch)
    trials = 60 if fault == "no waiting for the others" else 6
    assert has_the_bits_of_plain_decoding(trials) == (fault == "none")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(kind, tmp_path):
    """The tests of passes in a process of their own, whose library is compiled with sanitizers."""
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
tests = {str(Path(__file__).with_name("test_passes.py"))!r}
sys.exit(pytest.main(["-n", "0", "-q", "-x", "-k", "llama or gemma2 or olmo2", tests]))
"""
    environment = {
        **os.environ, "LD_PRELOAD": " ".join(found), "PACELINE_CACHE": str(tmp_path),
        "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1",
        "TSAN_OPTIONS": "halt_on_error=1 exitcode=66 ignore_noninstrumented_modules=1",
    }  # fmt: skip
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=root, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
