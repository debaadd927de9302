"""What decoding on a GPU takes, in one prepared run: its tests, passes against the copies of its memory, answers.

    python -m bench.gpu --machine "one H100"        eight minutes; keeps records in bench/results/
    python -m bench.gpu --device cpu --tiny         the same code on tiny models, where there is no GPU
    python -m bench.gpu --only passes answers       some parts

    tests       `pytest -m gpu`
    passes      a Llama-7B's shape with random weights behind --context tokens, in bfloat16, INT4 and FP8: a plain step,
                the part of the copies' bandwidth that its weights take, T(n) / T(1); and bfloat16 without CUDA graphs
    invariance  the same pass against its products alone by torch.mm, whose sums depend on the number of rows
    rounds      a round of the INT4 self-draft, four tokens drafted, and what it is worth at 80% acceptance
    eagle       a level of a random EAGLE head on that shape, against the target's pass
    answers     SmolLM2-135M with its packaged heads, transformers' generate, and vLLM if it is installed

A part that fails says so, and the others go on; what --seconds leave no time for is skipped. A time is the median of
--repeat passes, each with the argmax read back to the host, as a greedy step does. Aims are for an H100. The last line
is JSON.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench import gpu_answers
from bench.results import RECORDS
from paceline import LLM, Fixed, SamplingParams, SelfQuantized
from paceline.core.tree import TokenTree
from paceline.measure.machine import weight_bytes
from paceline.measure.record import measured_on, record_of
from paceline.methods import Eagle
from paceline.methods.eagle.head import EagleConfig, EagleHead
from paceline.target import LoadedModel, ModelRunner, with_weights, wrap_model
from paceline.zoo import resolve

ROOT = Path(__file__).parents[1]
NODES, DRAFTED, ACCEPTANCE = (1, 2, 4, 8, 16, 32, 64), 4, 0.8
LEVELS, EAGLE_NODES = 5, 16
FORMATS: tuple[Any, ...] = ("int4", "fp8")
SHAPE = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 32}  # fmt: skip
SMALL = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
         "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}  # fmt: skip
TINY = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4}  # fmt: skip
AIMS: dict[str, tuple[str, float]] = {
    "bf16 at one row, of the copies' bandwidth": ("at least", 0.8),
    "int4 at 8 rows, ms": ("at most", 2.5),
    "fp8 at 8 rows, ms": ("at most", 3.2),
    "T(16) / T(1) in bf16": ("at most", 1.15),
    "self-int4 over plain at 80% acceptance": ("at least", 1.5),
    "a level of EAGLE, of the target's pass": ("at most", 0.03),
    "SmolLM2 with EAGLE, tokens/s": ("at least", 1500),
}


class Clock:
    """Marks in the order of the device's work: events on CUDA, the host's time elsewhere."""

    def __init__(self, device: torch.device):
        self.device = device

    def mark(self) -> "torch.cuda.Event | float":
        """A point after all work that was handed over so far."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: "torch.cuda.Event | float", last: "torch.cuda.Event | float") -> float:
        """Seconds from one mark to the next; waits for the device."""
        if isinstance(first, float) or isinstance(last, float):
            return float(last) - float(first)  # type: ignore[arg-type]
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def median(self, work: Callable[[], object], repeats: int) -> float:
        """Median seconds of `work`, which is run twice before."""
        times = []
        for _ in range(repeats + 2):
            first = self.mark()
            work()
            times.append(self.between(first, self.mark()))
        return statistics.median(times[2:])


def without_graphs() -> AbstractContextManager[None]:
    """Within it, passes on CUDA are launched kernel by kernel."""
    from paceline.kernels.gpu import graphs

    return graphs.off()


class Run:
    """What the parts share, and what they found."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.device = options, torch.device(options.device)
        self.clock, self.end = Clock(self.device), time.monotonic() + options.seconds
        self.found: dict[str, Any] = {}
        self.not_measured: dict[str, str] = {}
        self.aims: dict[str, dict[str, Any]] = {}
        self.tables: list[dict[str, Any]] = []

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def guarded(self, name: str, work: Callable[[], Any]) -> Any:
        """The result of some work; None where it failed, which is printed and kept."""
        try:
            return work()
        except (Exception, SystemExit) as error:  # whatever it is, the other parts go on
            self.not_measured[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"{name:22}not measured: {self.not_measured[name]}", flush=True)
            return None

    def aim(self, name: str, value: float) -> None:
        """Say whether an aim is reached, on a model whose size means something."""
        if not self.options.tiny:
            how, limit = AIMS[name]
            reached = value >= limit if how == "at least" else value <= limit
            self.aims[name] = {"value": round(value, 4), how: limit, "reached": reached}
            print(f"aim: {name} {how} {limit}: {value:.3f}, {'reached' if reached else 'missed'}", flush=True)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second of copies, read and written bytes both counted; the best of ten."""
        size = 8 << 20 if self.options.tiny else 1 << 30
        source = torch.ones(size // 8, dtype=torch.int64, device=self.device)
        target = torch.empty_like(source)
        found = 2 * size / min(self.clock.median(lambda: target.copy_(source), 1) for _ in range(10))
        print(f"copies: {found / 1e9:.1f} GB/s")
        return found

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model of passes and rounds."""
        kind = ("llama-tiny", TINY) if self.options.tiny else ("llama-7b-shape", SHAPE)
        return random_model(*kind, self.device, self.options.context + 1024)

    @cached_property
    def small(self) -> str | LoadedModel:
        """The model of answers: its folder; where it cannot be had, its shape with random weights."""
        found = None if self.options.tiny else self.guarded("smollm2-135m", lambda: resolve("smollm2-135m"))
        shape = TINY if self.options.tiny else SMALL
        return found or random_model("smollm2-135m-shape", shape, self.device, 2048)

    @cached_property
    def steps(self) -> dict[int, float]:
        """Median seconds of a pass of that model by its nodes."""
        return self.pass_seconds(self.loaded)

    def pass_seconds(self, loaded: LoadedModel) -> dict[int, float]:
        """Median seconds of a pass by its nodes, after a text of `--context` tokens."""
        context = self.options.context
        runner = ModelRunner(loaded, 1, context + 2 * NODES[-1])
        tokens = [7 * i % loaded.vocab_size for i in range(context + NODES[-1])]
        slot = runner.admit(tokens[:context])
        runner.extend_cache(slot, tokens[:context])
        found = {}
        for nodes in NODES:
            chain = TokenTree.chain([tokens[-nodes:]], loaded.device)
            work = lambda c=chain: runner.forward([slot], c).argmax(-1).tolist()  # noqa: E731
            found[nodes] = self.clock.median(work, self.options.repeat)
        return found


def random_model(name: str, shape: dict[str, Any], device: torch.device, length: int) -> LoadedModel:
    """A Llama in bfloat16, made where it stays."""
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM._from_config(
            LlamaConfig(**shape, max_position_embeddings=length), dtype=torch.bfloat16
        )
    return wrap_model(model, name=name)


def tests(run: Run) -> dict[str, Any]:
    """The tests of the device, and their last line."""
    command = [sys.executable, "-m", "pytest", "-n", "0", *shlex.split(run.options.tests)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "models"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
        timeout=max(run.left / 2, 1), check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    last = (done.stdout.strip() or done.stderr.strip() or "nothing").splitlines()[-1]
    print(*lines, last, sep="\n")
    return {"exit_code": done.returncode, "last": last, "failed": lines}


def passes(run: Run) -> list[dict[str, Any]]:
    """A row of the table for each format."""
    bandwidth, rows = run.bandwidth, list[dict[str, Any]]()
    print(f"{'target':22}{'GB':>8}{'step ms':>10}{'of copies':>11}" + "".join(f"{f'T({n})':>8}" for n in NODES[1:]))

    def add(name: str, loaded: LoadedModel) -> dict[int, float]:
        seconds = run.steps if loaded is run.loaded and name == "bf16" else run.pass_seconds(loaded)
        size, growth = weight_bytes(loaded) / 1e9, {n: round(seconds[n] / seconds[1], 3) for n in NODES}
        fraction, step = 1e9 * size / bandwidth / seconds[1], 1e3 * seconds[1]
        rows.append({"target": name, "weights_gb": round(size, 3), "step_ms": round(step, 4),
                     "fraction": round(fraction, 4), "growth": growth})  # fmt: skip
        told = "".join(f"{growth[n]:8.2f}" for n in NODES[1:])
        print(f"{name:22}{size:8.3f}{step:10.3f}{fraction:11.2f}{told}", flush=True)
        return seconds

    def launched() -> None:
        with without_graphs():
            add("bf16, no graphs", run.loaded)

    add("bf16", run.loaded)
    run.aim("bf16 at one row, of the copies' bandwidth", rows[0]["fraction"])
    run.aim("T(16) / T(1) in bf16", rows[0]["growth"][16])
    for kind in FORMATS:
        seconds = run.guarded(kind, lambda kind=kind: add(kind, with_weights(run.loaded, kind)[0]))
        if seconds is not None:
            run.aim(f"{kind} at 8 rows, ms", 1e3 * seconds[8])
    run.guarded("bf16, no graphs", launched)
    columns = {"target": "", "size": "GB", "a step": "ms", "of the bandwidth": "share", "T(2) / T(1)": "tokens"}
    title = f"A model of a Llama-7B's shape with random weights behind {run.options.context} tokens"
    run.tables.append({
        "table": "gpu", "model": run.loaded.name, "title": f"{title}; copies run at {bandwidth / 1e12:.2f} TB/s",
        "columns": columns | {f"T({n})": "tokens" for n in NODES[2:]},
        "rows": [[*map(one.get, ("target", "weights_gb", "step_ms", "fraction")), *[*one["growth"].values()][1:]]
                 for one in rows],
    })  # fmt: skip
    return rows


def invariance(run: Run) -> dict[str, Any]:
    """Milliseconds of passes, and of their products alone by the fastest library, by rows."""
    linears = [one for one in run.loaded.model.modules() if hasattr(one, "in_features") and hasattr(one, "weight")]
    weights = [one.weight.detach().t() for one in linears]
    found = dict[int, dict[str, float]]()
    for rows in (1, 16, 64):
        inputs = {size: torch.randn(rows, size, dtype=torch.bfloat16, device=run.device) for size in map(len, weights)}
        work = replayed(lambda x=inputs: [torch.mm(x[len(w)], w) for w in weights], run.device)
        fastest = run.clock.median(work, run.options.repeat)
        found[rows] = {"pass_ms": round(1e3 * run.steps[rows], 4), "torch_mm_ms": round(1e3 * fastest, 4)}
        print(f"{rows} rows: a pass {1e3 * run.steps[rows]:.3f} ms, its products by torch.mm {1e3 * fastest:.3f} ms")
    return found


@torch.inference_mode()
def replayed(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The same work as one launch on CUDA, so that its kernels alone are timed."""
    if device.type != "cuda":
        return work
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def rounds(run: Run) -> dict[str, float]:
    """Milliseconds of a round of the INT4 self-draft and of its parts."""
    llm = LLM(run.loaded, drafter=SelfQuantized(), policy=Fixed(DRAFTED), max_num_seqs=1)
    params = SamplingParams(max_tokens=run.options.tokens, ignore_eos=True)
    found = round_ms(llm, [3] * run.options.context, params)
    tokens = sum(ACCEPTANCE**i for i in range(DRAFTED + 1))
    found["worth"] = round(tokens * 1e3 * run.steps[1] / found["round"], 3)
    print("a round of self-int4, ms: " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()))
    run.aim("self-int4 over plain at 80% acceptance", found["worth"])
    return found


def round_ms(llm: LLM, prompt: list[int], params: SamplingParams) -> dict[str, float]:
    """Milliseconds of a round, by parts: the second of two answers."""
    llm.generate(prompt, params)
    spent = llm.generate(prompt, params)[0].metrics
    parts = {"round": spent.decode, "draft": spent.draft, "verify": spent.verify}
    return {name: round(1e3 * seconds / spent.rounds, 4) for name, seconds in parts.items()}


def eagle(run: Run) -> dict[str, float]:
    """Milliseconds of a level of a random head, and its share of the target's pass."""
    config: Any = run.loaded.model.config
    width, heads, vocabulary = config.hidden_size, config.num_attention_heads, run.loaded.vocab_size
    shape = EagleConfig(
        width, (run.loaded.num_layers,), vocabulary, vocabulary, config.intermediate_size, heads, heads,
        width // heads, 1, width,
    )  # fmt: skip
    torch.manual_seed(0)
    with run.device:
        head = EagleHead(shape, torch.arange(vocabulary)).to(run.loaded.dtype).eval()
    llm = LLM(run.loaded, drafter=Eagle(head), policy=Fixed(LEVELS, EAGLE_NODES), max_num_seqs=1)
    params = SamplingParams(max_tokens=run.options.tokens, ignore_eos=True)
    found = round_ms(llm, [3] * run.options.context, params)
    found["level"] = round(found["draft"] / LEVELS, 4)
    found["share"] = round(found["level"] / 1e3 / run.steps[1], 4)
    print("a round of EAGLE, ms: " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()))
    run.aim("a level of EAGLE, of the target's pass", found["share"])
    return found


PARTS: dict[str, Callable[[Run], Any]] = {
    **{one.__name__: one for one in (tests, passes, invariance, rounds, eagle)},
    "answers": gpu_answers.measure,
}


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of two small layers: shows that the code runs")
    parser.add_argument("--only", nargs="+", choices=[*PARTS], default=[*PARTS], help="these parts")
    parser.add_argument("--seconds", type=float, default=480, help="no part begins later")
    parser.add_argument("--tests", default="-m gpu", help="what pytest is told")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--machine", help='keep records, whose tables call this machine so, such as "one H100"')
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Refuse what cannot run; measure the rest."""
    options = parsed(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "There is no CUDA device. To run the same code on tiny models: python -m bench.gpu --device cpu --tiny"
        )
    if options.device != "cuda" and not options.tiny:
        sys.exit(f"A model of 7B on {options.device} shows nothing about a GPU. Add --tiny to see that the code runs.")
    run = Run(options)
    for name in options.only:
        print(f"-- {name}, {run.left:.0f} s left")
        if run.left <= 0:
            run.not_measured[name] = "no time was left"
            continue
        run.found[name] = run.guarded(name, lambda part=PARTS[name]: part(run))
    about = measured_on()
    if options.machine:
        for table in run.tables:
            print(record_of(about, options.machine, "python -m bench.gpu", **table).save(RECORDS))
    peak = torch.cuda.max_memory_allocated() if options.device == "cuda" else None
    bandwidth = run.__dict__.get("bandwidth")
    print(json.dumps({
        **run.found, "copy_gb_per_s": bandwidth and round(bandwidth / 1e9, 2), "aims": run.aims,
        "not_measured": run.not_measured, "peak_bytes": peak, "provenance": about,
    }))  # fmt: skip
    return int(bool((run.found.get("tests") or {}).get("exit_code")))


if __name__ == "__main__":
    sys.exit(main())
