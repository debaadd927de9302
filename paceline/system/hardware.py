"""What this computer is and how busy it is: read from the system, nothing measured that takes time."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from .cgroups import memory_room

_ROOT = Path("/")
# What the kernels of low-precision products ask for, by the names of Linux on x86 and on ARM.
_FLAGS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx_vnni": "AVX-VNNI",
    "avx512_vnni": "AVX-512-VNNI",
    "avx512_bf16": "AVX-512-BF16",
    "avx512_fp16": "AVX-512-FP16",
    "amx_bf16": "AMX-BF16",
    "amx_int8": "AMX-INT8",
    "asimddp": "NEON-dot",
    "bf16": "NEON-BF16",
    "i8mm": "NEON-I8MM",
    "sve": "SVE",
}


@dataclass(frozen=True)
class Load:
    """How busy the machine was while this process slept.

    busy_cores: cores' worth of work of others. stolen: share of the time that a hypervisor gave to other machines.
    average: the system's load of the last minute, this process included. None where the system does not say.
    """

    busy_cores: float | None
    stolen: float | None
    average: float | None

    @property
    def disturbs(self) -> bool:
        """True where timings would say little: a quarter of a core is taken, or 3% of the time is stolen."""
        return (self.busy_cores or 0) > 0.25 or (self.stolen or 0) > 0.03


def cpu_flags(root: Path = _ROOT) -> tuple[str, ...]:
    """Instruction sets of the CPU that decide how fast low-precision products are, by their usual names."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            words = set(value.split())
            return tuple(name for flag, name in _FLAGS.items() if flag in words)
    return ()


def available_memory(root: Path = _ROOT) -> int | None:
    """Bytes that can be taken without swapping and within the container's limit; None where nothing says."""
    known: list[int] = []
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            known.append(int(line.split()[1]) * 1024)
    room = memory_room(root)
    return min([*known, room] if room is not None else known, default=None)


def watch_load(seconds: float = 0.3, root: Path = _ROOT) -> Load:
    """Sleep for a moment and see what others do with the CPUs meanwhile."""
    before = _ticks(root)
    time.sleep(seconds)
    average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return load_between(before, _ticks(root), average)


def load_between(before: list[list[int]], after: list[list[int]], average: float | None = None) -> Load:
    """The load between two readings of the counters: for each CPU its ticks in user, nice, system, idle and so on."""
    if not before or len(before) != len(after):
        return Load(None, None, average)
    spent = [[b - a for a, b in zip(*cpus, strict=True)] for cpus in zip(before, after, strict=True)]
    total = sum(sum(cpu[:8]) for cpu in spent)
    if total <= 0:
        return Load(None, None, average)
    idle = sum(cpu[3] + cpu[4] for cpu in spent)  # waiting for a disk is idle too
    stolen = sum(cpu[7] for cpu in spent)
    return Load(len(spent) * (total - idle - stolen) / total, stolen / total, average)


def _ticks(root: Path) -> list[list[int]]:
    """Counters of every CPU; the guests' time, which follows, is part of the user's."""
    lines = [line.split() for line in _read(root / "proc/stat").splitlines()]
    cpus = [words for words in lines if words and words[0].startswith("cpu") and words[0] != "cpu"]
    return [[int(word) for word in words[1:]] for words in cpus if len(words) > 8]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # not Linux
