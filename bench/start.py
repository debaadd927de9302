"""From a cold process to the first token: CPU and wall seconds of imports, load and first token, and memory.

    python bench/start.py smollm2-135m /path/to/model.gguf
    python bench/start.py FILE.gguf --peer llama.cpp=/path/to/python

Every row is a process of its own, the best of `--runs` by CPU seconds, which other programs disturb less than the wall
clock. `resident` is memory after the first token; its `anonymous` part is not shared with files. `peak` is the highest
ever. MB = 10^6 bytes. A peer is the python of an environment with `xllamacpp`; it takes the GGUF files among the
models. The first run compiles the kernels and tests the model if that has not been done. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

STAGES = ("imports", "load", "first")


class Clock:
    """CPU and wall seconds of stages; those of the first begin with the process."""

    def __init__(self):
        self.row: dict[str, float] = {}
        self._cpu, self._wall = 0.0, time.time() - age()

    def stop(self, stage: str) -> None:
        """Note the seconds since the stage before."""
        cpu, wall = time.process_time(), time.time()
        self.row |= {f"{stage}_cpu_s": round(cpu - self._cpu, 2), f"{stage}_s": round(wall - self._wall, 2)}
        self._cpu, self._wall = cpu, wall


def age() -> float:
    """Seconds since this process started, to a hundredth."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / 100


def memory() -> dict[str, int]:
    """Of this process, in MB."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    names = {"resident_mb": "VmRSS", "anonymous_mb": "RssAnon", "peak_mb": "VmHWM"}
    return {name: round(int(fields[key].split()[0]) * 1024 / 1e6) for name, key in names.items()}


def ours(model: str, clock: Clock) -> object:
    """Paceline's first token; returns what must stay in memory."""
    from paceline import LLM, SamplingParams

    clock.stop("imports")
    llm = LLM(model, max_num_seqs=1)
    clock.stop("load")
    llm.generate("Hello", SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    clock.stop("first")
    return llm


def llamacpp(model: str, clock: Clock) -> object:
    """llama.cpp's first token, in the process of its server; returns what must stay in memory."""
    import xllamacpp  # type: ignore[import-not-found]

    clock.stop("imports")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.verbosity = model, 4096, 1, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
    server = xllamacpp.Server(params)
    clock.stop("load")
    server.handle_completions({"prompt": "Hello", "n_predict": 1, "temperature": 0})
    clock.stop("first")
    return server


def best(python: str, system: str, model: str, runs: int) -> dict[str, object]:
    """The row of the run that took the fewest CPU seconds."""
    rows = []
    for _ in range(runs):
        done = subprocess.run(
            [python, __file__, "--child", system, model], stdout=subprocess.PIPE, text=True, check=True
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    return min(rows, key=lambda row: sum(row[f"{stage}_cpu_s"] for stage in STAGES))


def main() -> None:
    """One child process for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="names, folders or GGUF files")
    parser.add_argument("--peer", metavar="llama.cpp=PYTHON", help="also measure llama.cpp on the GGUF files")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--child", choices=("ours", "llamacpp"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        clock = Clock()
        held = {"ours": ours, "llamacpp": llamacpp}[options.child](options.models[0], clock)
        print(json.dumps({**clock.row, **memory()}), flush=True)
        del held
        return
    name, _, python = (options.peer or "").partition("=")
    if options.peer and (name != "llama.cpp" or not python):
        parser.error(f"--peer is llama.cpp=PYTHON, not {options.peer!r}")
    systems = [("Paceline", "ours", sys.executable)] + ([("llama.cpp", "llamacpp", python)] if python else [])
    print(
        "CPU seconds (wall)".ljust(44) + "imports     load        first       all         resident  anonymous  peak MB"
    )
    rows = []
    for model in options.models:
        for title, system, command in systems:
            if system == "llamacpp" and not model.endswith(".gguf"):
                continue
            row = best(command, system, model, options.runs)
            times = [(row[f"{stage}_cpu_s"], row[f"{stage}_s"]) for stage in STAGES]
            times.append((sum(cpu for cpu, _ in times), sum(wall for _, wall in times)))
            told = "".join(f"{cpu:.2f} ({wall:.1f})".ljust(12) for cpu, wall in times)
            size = f"{row['resident_mb']:<10}{row['anonymous_mb']:<11}{row['peak_mb']}"
            print(f"{Path(model).name}, {title}".ljust(44) + told + size, flush=True)
            rows.append({"model": Path(model).name, "system": title, **row})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
