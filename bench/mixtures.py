"""Mixtures of experts beside llama.cpp, on random weights at the shapes of real models with fewer layers.

    python -m bench.mixtures --peer llama.cpp=PYTHON [--shape qwen3-30b-a3b] [--layers 4] [--keep FOLDER]
    python -m bench.mixtures --quick                   one layer and two turns

Writes each model as a GGUF file, a tensor at a time, and prints plain decoding of both engines on it, in turns, and
what a pass over 1 to 16 rows takes, beside the distinct experts that it reads and the floor: the bytes of these experts
and of all other matrices over the bandwidth of the memory. Rows are random tokens, so their experts hardly coincide:
those of texts do better. The last line is JSON; --machine NAME keeps records in bench/results/.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from transformers import AutoConfig, AutoModelForCausalLM

from paceline import LLM, SamplingParams
from paceline.core.tree import TokenTree
from paceline.hf.checkpoint import on_meta
from paceline.hf.gguf.file import read_gguf
from paceline.hf.gguf.writer import FileTensor, layer_entries, tensors_of, token_entries, write_file
from paceline.hf.load import load_tokenizer
from paceline.measure.machine import read_bandwidth
from paceline.measure.record import measured_on, record_of
from paceline.target import ModelRunner
from paceline.zoo import resolve

from .peers import PeerOptions, open_peer

COMMAND = "python -m bench.mixtures --peer llama.cpp=PYTHON"
PASSES = ("rows", "pass, ms", "experts", "floor, ms")
SHOWN = (1, 2, 4, 8, 16)  # rows of passes in the record
SPEEDS = {"model": "", "ours": "tok/s", "llama.cpp": "tok/s", "ratio": "ratio", "least": "ratio", "most": "ratio"}
SPEEDS |= {f"{rows} rows": "ms" for rows in SHOWN}
RECORDS = Path(__file__).parent / "results"
ROWS, CONTEXT, TOKENS = (1, 2, 3, 4, 6, 8, 12, 16), 100, 48
TOKENIZER = "smollm2-135m"


@dataclass(frozen=True)
class Shape:
    """A model of transformers, without the count of its layers; weights: the mix that its files usually have."""

    architecture: str
    model_type: str
    weights: str
    config: dict[str, Any]


_SAME = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "eos_token_id": 0}
SHAPES = {
    "qwen3-30b-a3b": Shape(
        "qwen3moe", "qwen3_moe", "q4_k",
        {
            "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
            "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
            "norm_topk_prob": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "gpt-oss-20b": Shape(
        "gpt-oss", "gpt_oss", "mxfp4",
        {
            "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150_000.0},
        },
    ),
}  # fmt: skip
SPREAD = {"Q8_0": 74, "Q4_0": 4.6, "Q5_0": 9.2, "IQ4_NL": 70, "Q4_K": 220, "Q5_K": 450, "Q6_K": 1370}
"""The standard deviation of random codes, with their integer scales where there are some."""
ENDS = {"Q4_K": 7.5, "Q5_K": 15.5}
"""What the second scale of a block is of the first, so that weights are around zero."""


def random_bytes(tensor: FileTensor, chance: np.random.Generator) -> Any:
    """The bytes of a tensor with random weights of a deviation of 1 / sqrt(inputs). Norms are 1, other vectors 0."""
    shape, form = tuple(tensor.values.shape), tensor.kind.name
    size = shape[-1] ** -0.5
    if form in ("F32", "F16", "BF16"):
        values = torch.full(shape, float(tensor.name.endswith("norm.weight")))
        if len(shape) > 1 and not tensor.name.endswith("bias"):
            values.normal_(0, size)
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[form]
        return values.to(dtype).view(torch.uint8).numpy()
    per, num_bytes = GGML_QUANT_SIZES[tensor.kind]
    blocks = np.frombuffer(bytearray(chance.bytes(tensor.values.numel() // per * num_bytes)), np.uint8)
    blocks = blocks.reshape(-1, num_bytes)
    if form == "MXFP4":
        blocks[:, 0] = 128 + round(float(np.log2(size / 6)))
        return blocks
    at = 208 if form == "Q6_K" else 0
    scales = np.array([size / SPREAD[form] * end for end in (1, ENDS.get(form, 0)) if end], np.float16)
    blocks[:, at : at + 2 * len(scales)] = scales.view(np.uint8)
    return blocks


def write_model(path: Path, shape: Shape, weights: str, layers: int, vocabulary: int) -> None:
    """Write a random model, of which no more than a tensor is in memory."""
    tokenizer = load_tokenizer(resolve(TOKENIZER))
    config = AutoConfig.for_model(
        shape.model_type, num_hidden_layers=layers, vocab_size=max(vocabulary, len(tokenizer)), **_SAME, **shape.config
    )
    model: Any = on_meta(AutoModelForCausalLM.from_config, config, dtype=torch.bfloat16)
    tensors = list(tensors_of(shape.architecture, model, weights))
    metadata = {"general.name": path.stem, "general.quantization_version": 2}
    metadata |= layer_entries(shape.architecture, config) | token_entries(tokenizer, model)
    write_file(
        path, shape.architecture, metadata, tensors, lambda *_: None,
        partial(random_bytes, chance=np.random.default_rng(0)),
    )  # fmt: skip


def bytes_read(path: Path) -> tuple[int, int]:
    """Of what every pass reads, and of one expert of a layer: in the file; packed weights are as large."""
    tensors = [tensor for tensor in read_gguf(path).tensors if tensor.name != "token_embd.weight"]
    stacked = [tensor for tensor in tensors if "_exps." in tensor.name]
    of_experts, count = sum(tensor.num_bytes for tensor in stacked), stacked[0].shape[0]
    layers = len({tensor.name.split(".")[1] for tensor in stacked})
    return sum(tensor.num_bytes for tensor in tensors) - of_experts, of_experts // (count * layers)


def passes(llm: LLM, path: Path, repeats: int) -> list[list[Any]]:
    """Of passes by rows: median ms, mean distinct experts, and the floor in ms. Each repetition has other tokens."""
    runner, chance = ModelRunner(llm.loaded, 1, 1024), np.random.default_rng(1)
    slot, (dense, expert) = runner.cache.allocate(), bytes_read(path)
    bandwidth = max(read_bandwidth() for _ in range(3))
    runner.extend_cache(slot, chance.integers(3, 4096, CONTEXT).tolist())
    found = list[list[Any]]()
    for rows in ROWS:
        times, experts = list[float](), list[int]()
        for _ in range(repeats):
            tree = TokenTree.chain([chance.integers(3, 4096, rows).tolist()])
            with runner.tentative([slot]):
                begin = time.perf_counter()
                runner.forward([slot], tree)
                times.append(time.perf_counter() - begin)
            experts.append(cast("Any", llm.loaded.decoder).experts_read)
        read = statistics.mean(experts)
        floor = (dense + read * expert) / bandwidth
        found.append([rows, round(1e3 * statistics.median(times), 2), round(read, 1), round(1e3 * floor, 2)])
    return found


def decoding(llm: LLM, path: Path, peer: str | None, turns: int) -> list[list[Any]]:
    """Tokens per second of plain decoding, ours and llama.cpp's, in turns; and ours over llama.cpp's, of each pair."""
    chance, found = np.random.default_rng(2), list[list[Any]]()
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)

    def ours(ids: list[int]) -> float:
        answer = llm.generate([ids], params)[0].outputs[0]
        return answer.num_decoded / sum(one.seconds for one in answer.decoding)

    options = PeerOptions(threads=torch.get_num_threads())
    if peer is None:
        return [[turn, round(ours(chance.integers(3, 4096, 32).tolist()), 2), None, None] for turn in range(turns)]
    with open_peer(peer, str(path), options) as other:
        for turn in range(turns + 1):
            ids = chance.integers(3, 4096, 32).tolist()
            speeds = dict[str, float]()
            for side in ("ours", "theirs") if turn % 2 else ("theirs", "ours"):
                if side == "ours":
                    speeds[side] = ours(ids)
                else:
                    answer = other.run("plain", ids, TOKENS, 0.0)
                    speeds[side] = answer.num_tokens / answer.decode_s
            if turn:  # the first warms up
                ratio = speeds["ours"] / speeds["theirs"]
                found.append([turn, round(speeds["ours"], 2), round(speeds["theirs"], 2), round(ratio, 3)])
    return found


def main() -> None:
    """Write, time and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="default: all")
    parser.add_argument("--peer", help="llama.cpp=PYTHON")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--weights", help="default: what files of the model usually have")
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--keep", type=Path, help="a folder for the files, which are used again")
    parser.add_argument("--quick", action="store_true", help="one layer and two turns")
    parser.add_argument("--machine", help='keep records, whose tables call this machine so, such as "two Zen 3 cores"')
    given = parser.parse_args()
    layers, turns_wanted = (1, 2) if given.quick else (given.layers, given.turns)
    speeds, results = list[list[Any]](), dict[str, Any]()

    def show(title: str, columns: Iterable[str], rows: list[list[Any]]) -> None:
        print(title, "| " + " | ".join(columns) + " |", "|---" * len([*columns]) + "|", sep="\n")
        print(*("| " + " | ".join(map(str, row)) + " |" for row in rows), sep="\n", end="\n\n", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        for name in given.shape or SHAPES:
            shape = SHAPES[name]
            weights = given.weights or shape.weights
            path = (given.keep or Path(folder)) / f"{name}-{layers}-layers-{weights}.gguf"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_model(path, shape, weights, layers, given.vocabulary)
            llm = LLM(path, device="cpu")
            about = f"{name}, {layers} layers, {weights}, {path.stat().st_size / 1e9:.2f} GB"
            turns, timed = decoding(llm, path, given.peer, turns_wanted), passes(llm, path, 3 if given.quick else 15)
            show(f"A pass by its rows: {about}", PASSES, timed)
            results[name] = {"turns": turns, "passes": timed}
            speeds.append([about, *summary(turns), *(ms for rows, ms, *_ in timed if rows in SHOWN)])
            del llm
    title = (
        "Mixtures with random weights and few layers: plain decoding, medians of pairs in turns; passes by their rows"
    )
    show(title, SPEEDS, speeds)
    if given.machine:
        facts = {"title": title, "columns": SPEEDS, "rows": speeds, "model": "random weights"}
        record = record_of(measured_on(), given.machine, COMMAND, table="mixtures", **facts)
        print(record.save(RECORDS), file=sys.stderr)
    print(json.dumps({"layers": layers, "threads": torch.get_num_threads(), "shapes": results}))


def summary(turns: list[list[Any]]) -> list[Any]:
    """The medians of both engines and of the ratios of pairs, and the least and the largest of these."""
    ours, theirs, ratios = ([one for one in column if one is not None] for column in list(zip(*turns, strict=True))[1:])
    if not ratios:
        return [round(statistics.median(ours), 1), None, None, None, None]
    medians = [round(statistics.median(speeds), 1) for speeds in (ours, theirs)]
    return [*medians, round(statistics.median(ratios), 3), min(ratios), max(ratios)]


if __name__ == "__main__":
    main()
