"""Milliseconds of a pass over 1 to 32 rows, native and in torch, beside what reading the weights takes.

    python bench/passes.py MODEL [--isa avx2 --isa none] [--context 100] [--turns 3] [--states 2 15 27]

Each setting of PACELINE_ISA ("none": torch) runs in a process of its own, one after the other, in turns; a cell is the
least of the turns' medians. "1+s" is a row whose states of these layers are kept, as EAGLE-3 needs them, taken in turns
with "1". The floor is the weights' bytes over the read bandwidth that `paceline doctor` measures.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

ROWS = (1, 2, 4, 8, 12, 16, 24, 32)


def measured(model: str, context: int, states: list[int], repeats: int = 15) -> dict[str, float]:
    """Median ms of passes behind `context` columns, by rows; "512": a chunk of a prompt, "1+s": a row with states."""
    from paceline.core.tree import TokenTree
    from paceline.target import ModelRunner, load_model
    from paceline.zoo import resolve

    runner = ModelRunner(load_model(resolve(model)), 1, 1024)
    text = [i % 1000 + 5 for i in range(512)]
    slot = runner.cache.allocate()
    runner.extend_cache(slot, text[:context])
    found = {}
    for rows in ROWS:
        tree, times = TokenTree.from_lists([text[:rows]], [list(range(-1, rows - 1))]), []
        for _ in range(repeats):
            begin = time.perf_counter()
            runner.forward([slot], tree)
            times.append(time.perf_counter() - begin)
        found[str(rows)] = 1e3 * statistics.median(times)
    if states:
        runner.states.watch(states)
        tree, by_kept = TokenTree.from_lists([text[:1]], [[-1]]), {False: [], True: []}
        for turn in range(8 * repeats):
            kept, begin = turn % 2 == 1, time.perf_counter()
            runner.forward([slot], tree, keep_states=kept)
            by_kept[kept].append(time.perf_counter() - begin)
        found |= {"1": 1e3 * statistics.median(by_kept[False]), "1+s": 1e3 * statistics.median(by_kept[True])}
    times = []
    for _ in range(3):
        runner.cache.truncate(slot, 0)
        begin = time.perf_counter()
        runner.prefill_chunk(slot, text, keep_states=False)
        times.append(time.perf_counter() - begin)
    return {**found, "512": 1e3 * statistics.median(times)}


def main() -> None:
    """Print a line for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--isa", action="append")
    parser.add_argument("--context", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--states", type=int, nargs="+", default=[])
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measured(given.model, given.context, given.states)))
        return
    from paceline.kernels import load

    best: dict[str, dict[str, float]] = {}
    command = [sys.executable, __file__, given.model, "--context", str(given.context), "--one"]
    command += ["--states", *map(str, given.states)] if given.states else []
    for _ in range(given.turns):
        for isa in given.isa or [str(load().isa), "none"]:
            done = subprocess.run(command, env={**os.environ, "PACELINE_ISA": isa}, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            new = json.loads(done.stdout.splitlines()[-1])
            old = best.setdefault(isa, new)
            best[isa] = {rows: min(new[rows], old[rows]) for rows in new}
    print("rows".ljust(14) + "".join(rows.rjust(8) for rows in next(iter(best.values()))))
    for isa, found in best.items():
        print(isa.ljust(14) + "".join(f"{ms:8.1f}" for ms in found.values()))


if __name__ == "__main__":
    main()
