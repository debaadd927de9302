"""Measures how fast this machine runs a model, and what limits it; prints nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from .. import kernels
from ..attention.kv_cache import round_up
from ..hf.load import chosen_device
from ..kernels.packing import OUTPUTS_PER_BLOCK
from ..llm import LLM
from ..methods.eagle.module import mtp_files
from ..methods.lookahead import LookaheadSpec
from ..methods.recycling import SUCCESSORS
from ..quant.int4 import fits_int4
from ..quant.packed import PackedLinear, device_of, has_kernels
from ..system.files import Progress, silent
from ..system.hardware import Load, Processors, available_memory, cpu_flags, processors, waiting, watch_load
from .formats import HeldWeights, held_weights, unpacked_formats
from .machine import PassCosts, about_drafts, ms, read_bandwidth, weight_bytes
from .record import measured_on

ROWS = (1, 2, 4, 8, 16, 32)
_CONTEXT = 512  # committed tokens before the measured passes
_TURNS = 4  # each gives a median of three passes; the best of them counts, as it does for the bandwidth
_GROUP_SIZE = 32  # of the INT4 self-draft, by default


@dataclass(frozen=True)
class MachineReport:
    """The hardware, the part that may be used, and how busy it is. In bytes and bytes per second.

    waiting: how threads wait for each other, as text. kernels: which ones are used, and why, as text.
    """

    provenance: Mapping[str, object]
    cpu_flags: tuple[str, ...]
    processors: Processors
    threads: int
    waiting: str
    load: Load
    available_bytes: int | None
    bandwidth: float
    kernels: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a model in bytes, with a full cache of `slots` sequences of `length` tokens.

    draft: the INT4 copy of the self-draft, 0 if none is planned for. available: before the model was loaded.
    """

    weights: int
    kv_per_token: int
    slots: int
    length: int
    draft: int
    available: int | None

    @property
    def kv_cache(self) -> int:
        return self.kv_per_token * self.slots * round_up(self.length)

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.draft

    @property
    def fits(self) -> bool | None:
        """Whether the plan fits; None where the available memory is unknown."""
        return None if self.available is None else self.total <= self.available


@dataclass(frozen=True)
class DrafterMemory:
    """The most memory of a drafter without weights: `each` bytes for each of `count` items, named by `of`."""

    drafter: str
    of: str
    each: int
    count: int

    @property
    def total(self) -> int:
        return self.each * self.count


@dataclass(frozen=True)
class ModelReport:
    """The measurements of one model. native: its passes run in our kernels.

    images: how it reads them, "generic" for a family without a row in `hf.vision`; None: it does not.
    unpacked: see `unpacked_formats`. mtp: the MTP modules in its files, as text.
    """

    model: str
    dtype: str
    device: str
    numerics: str
    row_multiple: int
    native: bool
    attends_trees: bool
    images: Literal["known", "generic"] | None
    context: int
    memory: MemoryPlan
    drafters: tuple[DrafterMemory, ...]
    costs: PassCosts
    formats: list[HeldWeights]
    unpacked: dict[str, str]
    mtp: str = ""


def examine_machine(device: torch.device | str | None = None) -> MachineReport:
    """Describe the machine and measure its memory bandwidth; takes about a second.

    device: None takes CUDA where there is one. Raises `ConfigError` for a device that does not exist. The load is
    measured first, while this process sleeps; then the kernels are compiled if necessary.
    """
    place = chosen_device(device)
    load = watch_load()
    return MachineReport(
        provenance=measured_on(),
        cpu_flags=cpu_flags(),
        processors=processors(),
        threads=torch.get_num_threads(),
        waiting=waiting(),
        load=load,
        available_bytes=torch.cuda.mem_get_info(place)[0] if place.type == "cuda" else available_memory(),
        bandwidth=read_bandwidth(place),
        kernels=kernels.name_of(place),
    )


def examine_model(
    llm: LLM,
    machine: MachineReport,
    slots: int = 8,
    with_draft: bool = True,
    progress: Progress = silent,
    path: str = "",
) -> ModelReport:
    """Measure the passes of a loaded model while it does not decode.

    machine: examined before the model was loaded. slots: sequences to plan memory for. The bandwidth is measured again
    after the passes, and the higher value counts, since machines drift. path: of the model, if it is a file.
    """
    runner, loaded = llm.runner, llm.loaded
    context, seconds = _measure_passes(llm, progress)
    draft = int4_bytes(loaded.model) if with_draft else 0
    memory = memory_plan(llm, slots, draft, machine.available_bytes)
    bandwidth = max(machine.bandwidth, read_bandwidth(loaded.device))
    return ModelReport(
        model=loaded.name,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        numerics=llm.numerics,
        row_multiple=runner.settings.row_multiple,
        native=loaded.is_native,
        attends_trees=loaded.attends_trees,
        images=None if loaded.vision is None else "generic" if loaded.vision.family.is_generic else "known",
        context=context,
        memory=memory,
        drafters=drafter_memory(loaded.vocab_size, slots, runner.max_length),
        costs=PassCosts(weight_bytes(loaded), bandwidth, seconds),
        formats=held_weights(loaded),
        unpacked=unpacked_formats(llm, path),
        mtp=str(mtp_files(loaded) or ""),
    )


def memory_plan(llm: LLM, slots: int = 1, draft: int = 0, available: int | None = None) -> MemoryPlan:
    """The memory of a loaded model; see `MemoryPlan`."""
    cache = llm.runner.cache
    if not cache.keys:
        llm.runner.pass_seconds(1)  # the size of a column is known from the first pass on
    per_token = sum(t.nbytes // (t.shape[0] * t.shape[2]) for t in (*cache.keys, *cache.values))
    return MemoryPlan(held_bytes(llm.loaded.model), per_token, slots, llm.runner.max_length, draft, available)


def doctor_report(machine: MachineReport, model: ModelReport | None = None) -> list[str]:
    """What limits this machine, in sentences."""
    lines, load, capacity = list[str](), machine.load, replace(machine.processors, asked=None)
    if load.disturbs:
        lines.append(
            f"The machine is busy: others use {load.busy_cores or 0:.1f} cores, and {load.stolen or 0:.0%} of the time "
            "is stolen. Timings taken now are unreliable; run this again when it is idle."
        )
    if machine.threads > capacity.threads:
        lines.append(
            f"{machine.threads} threads are in use where {capacity.reason}: "
            f"--threads {capacity.threads} is likely faster."
        )
    if machine.threads < capacity.threads:
        lines.append(f"{machine.threads} of {capacity.threads} possible threads are in use.")
    if model is None:
        return lines
    memory, costs = model.memory, model.costs
    step, most, least = costs.seconds[1], max(costs.seconds), costs.least_acceptance(8)
    if memory.available is not None and not memory.fits:
        lines.append(
            f"The plan needs {memory.total / 1e9:.1f} GB where {memory.available / 1e9:.1f} GB are available. The "
            f"cache of {memory.slots} x {memory.length} tokens is {memory.kv_cache / 1e9:.1f} GB of it; it grows only "
            "as texts do, and a smaller max_model_len or max_num_seqs bounds it."
        )
    copies = "cannot pay here, even if all are accepted" if least is None else f"pays from {least:.0%} acceptance on"
    return [
        *lines,
        *(f"{form} of the file {why}." for form, why in model.unpacked.items()),
        *([f"The checkpoint has {model.mtp}: --drafter mtp."] if model.mtp else []),
        f"A plain step takes {ms(step)}, {1 / step:.1f} tokens/s; reading the weights once takes {ms(costs.floor)} of "
        f"it ({costs.floor_fraction:.0%}), so no engine can pass {1 / costs.floor:.0f} tokens/s with these weights.",
        f"Up to {costs.flat_rows} rows a pass takes about as long as for one; {most} rows take "
        f"{costs.seconds[most] / step:.2f} times as long.",
        about_drafts(costs),
        f"Copying 8 tokens from the prompt {copies}.",
    ]


def drafter_memory(vocab_size: int, slots: int, length: int) -> tuple[DrafterMemory, ...]:
    """Bounds for `slots` texts of `length` tokens, with the default options of every drafter.

    The memory of a text is freed when its request ends; all requests of a tenant, here one, share the matrix of
    recycling. A corpus of suffix is memory-mapped and does not count.
    """
    pool = LookaheadSpec()
    return (
        DrafterMemory("lookup", "token of a text", 400, slots * length),
        DrafterMemory("suffix", "token of a text", 768, slots * length),
        DrafterMemory("recycling", "token of the vocabulary", 4 * SUCCESSORS, vocab_size),
        DrafterMemory("lookahead", "n-gram", 400 + 40 * pool.ngram, slots * pool.pool_size),
    )


def held_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, counting shared ones once."""
    return sum({id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}.values())


def int4_bytes(model: nn.Module) -> int:
    """The most bytes of an INT4 copy of the linear layers: half a byte per weight, 4 for every 32, and padding."""
    total = 0
    for module in model.modules():
        if isinstance(module, nn.Linear | PackedLinear) and fits_int4(module, _GROUP_SIZE):
            outs, ins = module.out_features, module.in_features
            native = has_kernels(device_of(module))
            weights = (outs + -outs % OUTPUTS_PER_BLOCK) * ins if native else outs * (ins + -ins % 64)
            total += weights // 2 + 4 * (weights // _GROUP_SIZE)
    return total


def _measure_passes(llm: LLM, progress: Progress) -> tuple[int, dict[int, float]]:
    """Tokens committed before the passes, and seconds by rows; leaves the cache as it was."""
    runner = llm.runner
    context = min(_CONTEXT, runner.max_length // 2)
    rows = [count for count in ROWS if context + count <= runner.max_length]
    slot = runner.admit([0])
    try:
        progress("reading a prompt", 0, 1)
        runner.extend_cache(slot, [i % runner.vocab_size for i in range(context)])
        progress("reading a prompt", 1, 1)
        times: dict[int, list[float]] = {count: [] for count in rows}
        # In turn, so that a machine that slows down meanwhile slows all of them.
        for turn in range(_TURNS):
            for done, count in enumerate(rows):
                progress("timing passes", turn * len(rows) + done, _TURNS * len(rows))
                times[count].append(runner.pass_seconds(count))
        progress("timing passes", 1, 1)
    finally:
        runner.cache.release(slot)
    return context, {count: min(each) for count, each in times.items()}
