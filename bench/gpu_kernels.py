"""What the kernels of a GPU are compiled to, for cards that need not be there.

    python -m bench.gpu_kernels                                         every model, format and card
    python -m bench.gpu_kernels --model llama-7b --rows 16 --card sm_90

Passes over the shapes of models, without numbers, tell Triton what they would launch; each of these kernels is
compiled. Printed: registers, bytes that spill, shared memory, the instructions of matrix products, and how many of its
loads do not wait (cp.async); launches and bytes of weights of a pass, and the least time that these take from memory.
The exit code is 1 where a kernel spills, waits for the operands of products, needs more shared memory than a card has,
uses wgmma, whose sums depend on the number of rows, or is compiled to other sums for other numbers of rows.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

if os.environ.get("TRITON_INTERPRET") == "1":
    sys.exit("Triton's interpreter compiles nothing: leave out TRITON_INTERPRET=1")

import torch
import triton
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Gemma4TextConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
)
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

from bench.gpu import SHAPE, SMALL
from bench.results import table
from paceline import kernels
from paceline.attention.kv_cache import SlotCache
from paceline.attention.masks import PassLayout
from paceline.core.tree import TokenTree
from paceline.hf.describe import Description
from paceline.kernels import gpu
from paceline.kernels.library import BlockFormat
from paceline.quant.blocks import BlockEmbedding, BlockLinear
from paceline.quant.linears import quantize_target
from paceline.target.native import NativeDecoder

MODELS: dict[str, Any] = {
    "llama-7b": LlamaConfig(**SHAPE),
    "qwen2.5-1.5b": Qwen2Config(
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "smollm2-135m": LlamaConfig(**SMALL),
    "qwen3.5-4b": Qwen3_5TextConfig(
        vocab_size=248320, hidden_size=2560, intermediate_size=9216, num_hidden_layers=32, num_attention_heads=16,
        num_key_value_heads=4, tie_word_embeddings=True,
    ),
    "falcon-h1-1.5b": FalconH1Config(
        vocab_size=65537, hidden_size=2048, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=8,
        num_key_value_heads=2, mamba_d_ssm=3072, mamba_n_heads=48, mamba_d_head=64, mamba_d_state=256,
    ),
    "gemma-4-e2b": Gemma4TextConfig(
        hidden_size=1536, intermediate_size=6144, num_hidden_layers=35, num_attention_heads=8, num_key_value_heads=1,
        num_kv_shared_layers=20, hidden_size_per_layer_input=256, use_double_wide_mlp=True,
    ),
}  # fmt: skip
BLOCKS = ("q8_0", "q4_0", "q5_0", "q4_k", "q5_k", "q6_k", "mxfp4")
WEIGHTS = ("bf16", "int8", "int4", "fp8", *BLOCKS)
CARDS = {"sm_80": 163, "sm_89": 99, "sm_90": 227}  # kilobytes of shared memory that a program may have
ROWS, CONTEXT = (1, 16, 64, 512), 512  # 512: a chunk of a prompt; the others are trees behind so many tokens
BANDWIDTH = 3.35e12  # bytes per second, of an H100's memory
META = torch.device("meta")


class NoDevice:
    """What Triton asks a device before it compiles; kernels are not launched."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Launch(NamedTuple):
    """A kernel and all that Triton compiles it for, except the card."""

    function: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.function.fn.__name__.removeprefix("_")

    @property
    def shape(self) -> str:
        """The constants that its author gave, flags by name if they are set, and how it is compiled."""
        given = {self.function.arg_names[at]: value for (at,), value in self.constants.items()}
        words = [
            name if value is True else f"{name} {value}"
            for name, value in given.items()
            if name.isupper() and value is not False
        ]
        return ", ".join([*words, f"{self.options['num_warps']} warps", f"{self.options['num_stages']} stages"])

    @property
    def key(self) -> str:
        return str((self.name, *self[1:]))


@dataclass
class Compiled:
    """What a launch became on a card. sums: the instructions of its products, and the layouts of its reductions."""

    kernel: str
    shape: str
    card: str
    registers: int
    spilled: int
    shared: int
    products: tuple[str, ...]
    asynchronous: int
    sums: tuple[str, ...]
    seconds: float
    used_by: list[str] = field(default_factory=list)

    @property
    def faults(self) -> Iterator[str]:
        most = CARDS[self.card] << 10
        if self.spilled:
            yield f"spills {self.spilled} bytes"
        if self.shared > most:
            yield f"needs {self.shared} bytes of shared memory, {self.card} has {most}"
        if any("wgmma" in one for one in self.products):
            yield "uses wgmma"
        if self.products and not self.asynchronous:
            yield "waits for its loads: there is no cp.async"


def in_blocks(name: str, weight: torch.Tensor) -> Any:
    """Weights [out, in] in a format of llama.cpp's files, or in Q8_0 where it does not divide the inputs."""
    outs, ins = weight.shape
    form = BlockFormat[name.upper()]
    form = form if ins % form.inputs == 0 else BlockFormat.Q8_0
    each, size = GGML_QUANT_SIZES[GGMLQuantizationType[form.name]]
    zeros = torch.zeros(1, ins // each * size, dtype=torch.uint8)
    row = gpu.Blocks.of(form, (1, ins), lambda _: zeros, zeros.device)
    empty = (torch.empty(outs, *part.shape[1:], dtype=part.dtype, device=META) for part in (row.data, row.scales))
    return gpu.Blocks(form, (outs, ins), *empty)


def decoder_of(name: str, weights: str) -> tuple[NativeDecoder, Description]:
    """A model whose tensors have shapes and no numbers."""
    config = MODELS[name]
    with META:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for module in model.modules():
        for buffer in ("layer_scalar", "embed_scale"):  # numbers that are read to describe the model
            if isinstance(getattr(module, buffer, None), torch.Tensor):
                setattr(module, buffer, torch.ones(()))
    with patch.object(kernels, "kernels_for", lambda device: gpu):
        if weights in BLOCKS:
            table = in_blocks(weights, model.get_input_embeddings().weight)
            model.set_input_embeddings(BlockEmbedding(table, model.dtype))
            for path, layer in [*model.named_modules()]:
                if isinstance(layer, nn.Linear):
                    model.set_submodule(path, BlockLinear(in_blocks(weights, layer.weight), layer.bias, model.dtype))
        elif weights != "bf16":
            with META:
                quantize_target(model, weights)  # type: ignore[arg-type]
        rotary = type(model.base_model.rotary_emb)
        model.base_model.rotary_emb = rotary(config)  # its frequencies are read to describe the model
        described = Description(model)
    return NativeDecoder(model, described), described


def launches(decoder: NativeDecoder, layers: int, rows: int) -> list[Launch]:
    """What a pass launches, in order. rows: of a tree, or from 512 on of a chunk of a prompt."""
    found: list[Launch] = []

    def record(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        options = {name: compile[name] for name in ("num_warps", "num_stages", "num_ctas", "enable_fp_fusion")}
        found.append(
            Launch(fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0], options)
        )
        return True  # neither compile nor launch it

    cache, is_prompt = SlotCache(1, 2 * CONTEXT, layers), rows >= CONTEXT
    if decoder.recurrent:
        cache.hold_states(decoder.recurrent, torch.float32, META)
    cache.begin([0], rows)
    start, head_rows = (0, 0) if is_prompt else (CONTEXT, None)
    tree = None if is_prompt else TokenTree.chain([[0] * rows])
    layout = PassLayout([start], rows, tree, slots=[0], max_length=2 * CONTEXT, head_rows=head_rows, device=META)
    ids = torch.zeros(1, rows, dtype=torch.long) if is_prompt else None
    driver.set_active(NoDevice())
    with patch.object(knobs.runtime, "jit_cache_hook", record):
        decoder.logits(ids, layout, cache, None)
    return found


def compiled(launch: Launch, card: str) -> Compiled:
    """Compile a kernel, and read what it became."""
    begin = time.perf_counter()
    source = ASTSource(launch.function, launch.signature, launch.constants, launch.attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", int(card[3:]), 32), options=launch.options)
    seconds = time.perf_counter() - begin
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    sizes = {name: int(size) for name, size in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    ptx, layouts = kernel.asm["ptx"], kernel.asm["ttgir"]
    products = sorted(set(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync\.\S*", ptx)))
    named = dict(re.findall(r"^(#\w+) = (.*)$", layouts, re.MULTILINE))
    reduced = re.findall(r'"tt\.reduce".*?\}\) : \((.*?)\) ->', layouts, re.DOTALL)
    reductions = [re.sub(r"#\w+", lambda name: named.get(name[0], name[0]), one) for one in reduced]
    return Compiled(
        launch.name, launch.shape, card, sizes["REG"], sizes["STACK"] + sizes["LOCAL"], kernel.metadata.shared,
        tuple(products), ptx.count("cp.async.c"), (*products, *reductions), round(seconds, 2),
    )  # fmt: skip


def weight_bytes(described: Description) -> int:
    """Bytes of the matrices that a pass reads."""
    matrices = [described.model.head, described.model.ple_project]
    for layer in described.model.layers:
        matrices += [
            layer.q,
            layer.k,
            layer.v,
            layer.o,
            layer.gate,
            layer.up,
            layer.down,
            layer.ple_gate,
            layer.ple_out,
        ]
        matrices += [*layer.recurrent.inputs, layer.recurrent.out] if layer.recurrent else []
    return sum(part.nbytes for one in matrices for part in (one.data, one.scales) if part is not None)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is asked for: passes, compiled kernels, and faults."""
    known: dict[tuple[str, str], Compiled] = {}
    passes, faults = list[dict[str, Any]](), list[str]()
    for name in options.model:
        for weights in options.weights:
            decoder, described = decoder_of(name, weights)
            size = weight_bytes(described)
            found = {rows: launches(decoder, described.num_layers, rows) for rows in options.rows}
            passes += [
                {"model": name, "weights": weights, "rows": rows, "launches": len(every), "bytes": size,
                 "floor_ms": round(1e3 * size / BANDWIDTH, 3)}
                for rows, every in found.items()
            ]  # fmt: skip
            for card in options.card:
                made: dict[int, list[Compiled]] = {}
                for rows, every in found.items():
                    every = [one for one in every if not options.kernel or one.name in options.kernel]
                    for one in every:
                        if (card, one.key) not in known:
                            known[card, one.key] = compiled(one, card)
                    made[rows] = [known[card, one.key] for one in every]
                    for one in {id(one): one for one in made[rows]}.values():
                        one.used_by.append(f"{name} {weights} {rows}")
                faults += differences(made, f"{name} in {weights}")
    faults[:0] = [f"{one.kernel} ({one.shape}) on {one.card} {fault}" for one in known.values() for fault in one.faults]
    return {"triton": triton.__version__, "passes": passes, "kernels": [*known.values()], "faults": faults}


def kinds(made: list[Compiled]) -> list[Compiled]:
    """The kernels of a pass; one of those that follow one another and sum alike, since a state may be walked in two."""
    return [next(same) for _, same in groupby(made, lambda one: (one.kernel, one.sums))]


def differences(made: dict[int, list[Compiled]], model: str) -> list[str]:
    """Where passes over different numbers of rows sum in different ways: their kernels are compared one by one."""
    found = dict[str, None]()
    for rows, every in made.items():
        first = min(made)
        for one, other in zip(kinds(made[first]), kinds(every), strict=False):  # a chunk of a prompt has no head
            if (one.kernel, one.sums) != (other.kernel, other.sums):
                found[
                    f"{model}, {one.card}: {first} and {rows} rows differ: {one.kernel} ({one.shape}) has {one.sums}, "
                    f"{other.kernel} ({other.shape}) has {other.sums}"
                ] = None
    return [*found]


def shown(found: dict[str, Any]) -> str:
    """Both tables in Markdown, and the faults."""
    rows = [
        [one["model"], one["weights"], str(one["rows"]), str(one["launches"]), f"{one['bytes'] / 1e9:.2f}",
         f"{one['floor_ms']:.2f}"]
        for one in found["passes"]
    ]  # fmt: skip
    head = "model", "weights", "rows", "launches", "weights, GB", f"at {BANDWIDTH / 1e12} TB/s, ms"
    lines = [*table(head, rows), ""]
    by_shape: dict[tuple[str, ...], dict[str, Compiled]] = {}
    for one in found["kernels"]:
        products = ", ".join(re.sub(r"(aligned|row|col)\.", "", kind) for kind in one.products)
        by_shape.setdefault((one.kernel, one.shape, products), {})[one.card] = one
    each = lambda many, name: ", ".join(str(getattr(one, name)) for one in many.values())  # noqa: E731
    rows = [
        [kernel, shape, each(many, "registers"), each(many, "spilled"), each(many, "shared"), products,
         each(many, "asynchronous"), f"{max(one.seconds for one in many.values()):.1f}"]
        for (kernel, shape, products), many in by_shape.items()
    ]  # fmt: skip
    cards = ", ".join(dict.fromkeys(one.card for one in found["kernels"]))
    head = "kernel", "shape", f"registers ({cards})", "spilled", "shared, bytes", "products", "cp.async", "compiled, s"
    told = found["faults"] or [f"No faults, by Triton {found['triton']}."]
    return "\n".join([*lines, *table(head, rows), "", *told])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print tables or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen: dict[str, Sequence[Any]] = {"model": [*MODELS], "weights": WEIGHTS, "rows": ROWS, "card": [*CARDS]}
    for name, choices in chosen.items():
        parser.add_argument(f"--{name}", nargs="+", choices=choices, default=choices, type=type(choices[0]))
    parser.add_argument("--kernel", nargs="+", help="these alone, such as multiply")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, patch.object(knobs.cache, "dir", folder):
        found = measure(options)
    print(json.dumps(found, default=vars) if options.json else shown(found))
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
