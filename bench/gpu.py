"""How near decoding on a GPU comes to what its memory allows, on a model of a Llama-7B's shape with random weights.

    python bench/gpu.py
    python bench/gpu.py --device cpu --tiny         the same code on a tiny model, where there is no GPU

Measures, after a text of --context tokens: the bandwidth of copies; a plain step and the part of the bandwidth that it
reaches; T(n) / T(1), the time of a pass over n nodes over that of one; the target in INT4 and FP8; and rounds of the
INT4 self-draft, with the time between a draft and its verification in which the device has nothing to do. A time is the
median of --repeat passes, each with the argmax read back to the host, as a greedy step does. Random weights say nothing
about acceptance. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline import LLM, Fixed, SamplingParams, SelfQuantized
from paceline.core.tree import TokenTree
from paceline.errors import PacelineError
from paceline.measure.machine import weight_bytes
from paceline.measure.record import measured_on
from paceline.quant.linears import Weights
from paceline.target import LoadedModel, ModelRunner, with_weights, wrap_model

NODES = (1, 2, 4, 8, 16, 32, 64)
GOALS = {"fraction": 0.8, "growth": 1.2}  # at least, at most
SHAPE = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
TINY = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


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


def copy_bandwidth(clock: Clock, size: int) -> float:
    """Bytes per second of a copy of `size` bytes, read and written bytes both counted; the best of ten."""
    source = torch.ones(size // 8, dtype=torch.int64, device=clock.device)
    target = torch.empty_like(source)
    return 2 * size / min(clock.median(lambda: target.copy_(source), 1) for _ in range(10))


def random_model(tiny: bool, device: torch.device, length: int) -> LoadedModel:
    """A Llama in bfloat16, made where it stays."""
    heads = 4 if tiny else 32
    config = LlamaConfig(
        **(TINY if tiny else SHAPE),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=length,
    )
    torch.manual_seed(0)
    with device:
        return wrap_model(
            LlamaForCausalLM._from_config(config, dtype=torch.bfloat16), name="llama-tiny" if tiny else "llama-7b-shape"
        )


def pass_seconds(loaded: LoadedModel, context: int, clock: Clock, repeats: int) -> dict[int, float]:
    """Median seconds of a pass by its nodes, after a text of `context` tokens."""
    runner = ModelRunner(loaded, 1, context + 2 * NODES[-1])
    tokens = [7 * i % loaded.vocab_size for i in range(context + NODES[-1])]
    slot = runner.admit(tokens[:context])
    runner.extend_cache(slot, tokens[:context])
    found = {}
    for nodes in NODES:
        chain = TokenTree.chain([tokens[-nodes:]], loaded.device)
        found[nodes] = clock.median(lambda c=chain: runner.forward([slot], c).argmax(-1).tolist(), repeats)
    return found


def rounds(loaded: LoadedModel, context: int, clock: Clock, tokens: int) -> dict[str, float]:
    """Milliseconds of a round of the INT4 self-draft, four tokens drafted, and of its parts.

    gap: between the end of the draft and the first work of its verification; the device waits as long for the host.
    """
    llm = LLM(loaded, drafter=SelfQuantized(), policy=Fixed(4), numerics="fast", max_num_seqs=1)
    propose, forward = llm.decoder.drafter.propose, llm.runner.forward
    drafted, begun, done = [], [], []

    def marked_propose(*args):
        draft = propose(*args)
        drafted.append(clock.mark())
        return draft

    def marked_forward(*args, **options):
        begun.append((drafted[-1] if drafted else clock.mark(), clock.mark()))  # no draft in the prompt's round
        out = forward(*args, **options)
        done.append(clock.mark())
        return out

    prompt, params = [3] * context, SamplingParams(max_tokens=tokens, ignore_eos=True)
    llm.generate(prompt, params)  # warms up
    llm.decoder.drafter.propose, llm.runner.forward = marked_propose, marked_forward
    for marks in (drafted, begun, done):
        marks.clear()
    timings = llm.generate(prompt, params)[0].metrics
    found = {
        "round": timings.decode / len(done),  # it ends with tokens on the host: nothing is left to wait for
        "draft": timings.draft / len(done),
        "gap": statistics.median(clock.between(*marks) for marks in begun),
        "verify": statistics.median(clock.between(mark, end) for (_, mark), end in zip(begun, done, strict=True)),
    }
    return {name: seconds * 1e3 for name, seconds in found.items()}


def row(name: str, loaded: LoadedModel, seconds: dict[int, float], bandwidth: float) -> dict[str, object]:
    """One line of the table."""
    return {
        "target": name,
        "weights_gb": round(weight_bytes(loaded) / 1e9, 3),
        "step_ms": round(seconds[1] * 1e3, 4),
        "fraction": round(weight_bytes(loaded) / bandwidth / seconds[1], 4),
        "growth": {n: round(seconds[n] / seconds[1], 3) for n in NODES},
    }


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, object]:
    """Everything, printed as it is found."""
    clock = Clock(device)
    bandwidth = copy_bandwidth(clock, 8 << 20 if options.tiny else 1 << 30)
    print(f"copies: {bandwidth / 1e9:.1f} GB/s")
    print(f"{'target':22}{'GB':>8}{'step ms':>10}{'of copies':>11}" + "".join(f"{f'T({n})':>8}" for n in NODES[1:]))
    context, repeats = options.context, options.repeat
    loaded = random_model(options.tiny, device, context + 1024)
    rows: list[dict[str, object]] = []

    def add(name: str, model: LoadedModel) -> None:
        rows.append(row(name, model, pass_seconds(model, context, clock, repeats), bandwidth))
        last = rows[-1]
        growth = "".join(f"{value:8.2f}" for n, value in last["growth"].items() if n > 1)  # type: ignore[attr-defined]
        print(f"{name:22}{last['weights_gb']:8.3f}{last['step_ms']:10.3f}{last['fraction']:11.2f}{growth}", flush=True)

    add("bf16", loaded)
    kinds: tuple[Weights, ...] = ("int4", "fp8")
    missing = {}
    for kind in kinds:
        try:
            add(kind, with_weights(loaded, kind)[0])
        except (PacelineError, RuntimeError, NotImplementedError) as error:
            missing[kind] = str(error).splitlines()[0]
            print(f"{kind:22}not measured: {missing[kind]}")
    spent = rounds(loaded, context, clock, options.tokens)
    print("a round of self-int4, ms: " + ", ".join(f"{name} {value:.3f}" for name, value in spent.items()))
    first = rows[0]
    if not options.tiny:
        print(f"bf16 step: {first['fraction']} of the copies' bandwidth, the goal is at least {GOALS['fraction']}")
        print(f"T(64) / T(1): {first['growth'][64]}, the goal is at most {GOALS['growth']}")  # type: ignore[index]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {
        "copy_gb_per_s": round(bandwidth / 1e9, 2),
        "context": context,
        "repeat": repeats,
        "rows": rows,
        "not_measured": missing,
        "round_ms": {name: round(value, 4) for name, value in spent.items()},
        "peak_bytes": peak,
        "provenance": measured_on(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Refuse what cannot run; measure the rest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers: shows that the code runs")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64, help="decoded for the times of a round")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "There is no CUDA device. To run the same code on a tiny model: python bench/gpu.py --device cpu --tiny"
        )
    if device.type != "cuda" and not options.tiny:
        sys.exit(f"A model of 7B on {device.type} shows nothing about a GPU. Add --tiny to see that the code runs.")
    print(json.dumps(measure(options, device)))


if __name__ == "__main__":
    main()
