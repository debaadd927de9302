"""What recurrent layers cost in a pass: the kernels with and without parts of them, in turns.

    python bench/recurrent.py [--hidden 1024] [--heads 16] [--layers 8] [--turns 9]

Random bfloat16 weights in Qwen3.5's form: heads of 128 x 128, every fourth layer attends. The kernels are compiled with
switches for this CPU, into a folder that is removed. Prints the median milliseconds of passes behind 64 tokens, and of
reading 256: whole, without the walk over states, and without convolution, norms and factors too.
"""

import argparse
import ctypes
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from paceline.core.tree import TokenTree
from paceline.kernels import compiler, load
from paceline.kernels import library as native
from paceline.target import ModelRunner, wrap_model

WHOLE, NO_WALK, NEITHER = 0, 1, 3
SWITCHES = (
    ("  mix_rows(pass,", "  if (!(paceline_switch & 2)) mix_rows(pass,"),
    ("  if (r.kind != SHORT_CONV) {\n    const", "  if (r.kind != SHORT_CONV && !(paceline_switch & 1)) {\n    const"),
)


def switched(folder: Path) -> ctypes.c_int:
    """Replace the kernels of this process by ones with switches; returns the switch."""
    sources, isa = folder / "sources", load().isa
    shutil.copytree(compiler.SOURCES, sources, ignore=shutil.ignore_patterns("*.py", "*.so", "__pycache__"))
    text = (sources / "recurrent.h").read_text()
    for whole, switch in SWITCHES:
        assert text.count(whole) == 1, whole
        text = text.replace(whole, switch)
    (sources / "recurrent.h").write_text(text)
    for name in ("abi.h", "pool.h"):
        (sources / name).write_text('extern "C" int paceline_switch;\n' + (sources / name).read_text())
    with (sources / "library.cpp").open("a") as file:
        file.write("int paceline_switch = 0;\n")
    for other in [name for name in compiler.ISAS if name not in ("portable", isa)]:
        del compiler.ISAS[other]
    compiler.compile_library(folder / compiler.LIBRARY, compiler.find_compiler(), sources)
    library = ctypes.CDLL(str(folder / compiler.LIBRARY))
    library.paceline_select(str(isa).encode())
    found = replace(load(), library=library)
    native.load = lambda: found
    native.library.cache_clear()
    return ctypes.c_int.in_dll(library, "paceline_switch")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 1024), ("heads", 16), ("layers", 8), ("turns", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        switch = switched(Path(folder))
        torch.manual_seed(0)
        config = Qwen3_5TextConfig(
            vocab_size=32000, hidden_size=args.hidden, intermediate_size=7 * args.hidden // 2, head_dim=256,
            num_hidden_layers=args.layers, num_attention_heads=args.hidden // 128, num_key_value_heads=2,
            linear_num_key_heads=16, linear_num_value_heads=args.heads, tie_word_embeddings=True,
        )  # fmt: skip
        runner = ModelRunner(wrap_model(Qwen3_5ForCausalLM(config).bfloat16().eval()), 2, 1200)
        slot = runner.cache.allocate()
        runner.extend_cache(slot, list(range(3, 67)))

        def seconds(work: Callable[[], object]) -> float:
            with runner.tentative([slot]):
                begin = time.perf_counter()
                work()
                return time.perf_counter() - begin

        text = list(range(5, 261))
        works: dict[str, Callable[[], object]] = {
            f"{n} rows": lambda n=n: runner.forward([slot], TokenTree.chain([text[:n]])) for n in (1, 2, 4, 8, 16)
        }
        works["256 tokens read"] = lambda: runner.extend_cache(slot, text)
        print("| pass | whole, ms | without the walk | without both | share |\n|---|---|---|---|---|")
        for name, work in works.items():
            taken: dict[int, list[float]] = {which: [] for which in (WHOLE, NO_WALK, NEITHER)}
            for _ in range(args.turns):
                for which, times in taken.items():
                    switch.value = which
                    times.append(seconds(work))
            whole, no_walk, neither = (1e3 * median(times) for times in taken.values())
            print(f"| {name} | {whole:.2f} | {no_walk:.2f} | {neither:.2f} | {1 - neither / whole:.0%} |", flush=True)


if __name__ == "__main__":
    main()
