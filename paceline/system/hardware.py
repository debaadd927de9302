"""CPUs, memory and load of this machine, as far as this process may use them, and the best number of threads.

More threads than cores, or than a container's CPU limit, are slower; so are two threads on one hyper-threaded core,
since they share its bandwidth to memory, which limits decoding.
"""

import ctypes
import gc
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_ROOT = Path("/")  # of the file system; tests pass another
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_SHORT_SPIN = "10000"
_MANY = 0.25  # other threads that run
_FEW_NUMBERS = 1 << 21  # 40 rows of 49,152 logits
# Instruction sets for low-precision products, by the names that Linux has for them on x86 and on ARM, and macOS.
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
_MAC_FLAGS = {"FEAT_DotProd": "NEON-dot", "FEAT_BF16": "NEON-BF16", "FEAT_I8MM": "NEON-I8MM"}


@dataclass(frozen=True)
class Processors:
    """The CPUs that this process may use.

    cpus: logical CPUs. cores: full cores among them, see `count_cores`. quota: the CPU limit of its container, in CPUs;
    None without a limit. asked: OMP_NUM_THREADS, None where it is not set.
    """

    cpus: int
    cores: int
    quota: float | None = None
    asked: int | None = None

    @property
    def capacity(self) -> int:
        """Threads that can run in parallel without sharing a core or exceeding the CPU limit; at least 1."""
        granted = self.cpus if self.quota is None else int(self.quota)
        return max(1, min(self.cpus, self.cores, granted))

    @property
    def threads(self) -> int:
        """The number of threads to use: OMP_NUM_THREADS, else the capacity."""
        return self.capacity if self.asked is None else self.asked

    @property
    def reason(self) -> str:
        """The reason for that number, as text."""
        if self.asked is not None:
            return f"OMP_NUM_THREADS is {self.asked}"
        if self.quota is not None and int(self.quota) < min(self.cpus, self.cores):
            return f"the container grants {self.quota:g} CPUs"
        if self.cores < self.cpus:
            return f"{self.cpus} logical CPUs are {self.cores} full cores"
        return f"{self.cpus} cores may be used"


@dataclass(frozen=True)
class Load:
    """How busy the machine was while this process slept.

    busy_cores: cores used by other processes. stolen: share of the time that the hypervisor gave to other machines.
    average: the system's load average of one minute, this process included. None where unknown.
    """

    busy_cores: float | None
    stolen: float | None
    average: float | None

    @property
    def disturbs(self) -> bool:
        """Whether timings are unreliable: others use a quarter of a core, or 3% of the time is stolen."""
        return (self.busy_cores or 0) > 0.25 or (self.stolen or 0) > 0.03


def processors(root: Path = _ROOT) -> Processors:
    """The CPUs that this process may use now."""
    allowed = usable_cpus()
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # of nested levels the first
    number = int(asked) if asked.isdecimal() and int(asked) > 0 else None
    return Processors(len(allowed), count_cores(allowed, root), cpu_quota(root), number)


def usable_cpus() -> set[int]:
    """Logical CPUs that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def count_cores(cpus: set[int], root: Path = _ROOT) -> int:
    """Physical cores among these logical CPUs, of cores of several sizes the large ones; all where that is unknown.

    Large is what has half of the largest one's capacity, by Linux, or counts as a performance core, by macOS. All
    threads wait for the slowest one, and the large cores alone can use the memory's bandwidth.
    """
    if cores := _sysctl("hw.perflevel0.physicalcpu") or _sysctl("hw.physicalcpu"):
        return min(int(cores), len(cpus))
    folder = root / "sys/devices/system/cpu"
    sizes = {cpu: int(_read(folder / f"cpu{cpu}/cpu_capacity") or 0) for cpu in cpus}
    large = [cpu for cpu in cpus if 2 * sizes[cpu] >= max(sizes.values())]
    return len({_read(folder / f"cpu{cpu}/topology/thread_siblings_list") or f"cpu {cpu}" for cpu in large})


def cpu_quota(root: Path = _ROOT) -> float | None:
    """The CPU limit of the container, for example 1.5 CPUs; None without a limit."""
    quotas: list[float] = []
    for folder in _cgroups(root):
        with suppress(ValueError, ZeroDivisionError):  # "max", or no such file
            quota, period = (int(word) for word in _read(folder / "cpu.max").split())
            quotas.append(quota / period)
    return min(quotas, default=None)


def memory_room(root: Path = _ROOT) -> int | None:
    """Bytes that the container may still use, cached files included; None without a limit."""
    rooms: list[int] = []
    for folder in _cgroups(root):
        with suppress(ValueError):
            limit, used = (int(_read(folder / name)) for name in ("memory.max", "memory.current"))
            stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
            files = sum(int(stat.get(key, 0)) for key in ("inactive_file", "active_file"))
            rooms.append(max(0, limit - max(0, used - files)))
    return min(rooms, default=None)


def _cgroups(root: Path) -> Iterator[Path]:
    """Folders of this process's Linux control group (version 2) and of those above it, whose limits hold too."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            # In a container the path is often the host's, and only the top exists here: the container's own group.
            parts = [] if ".." in line.split("/") else line[3:].strip("/").split("/")
            yield from (root.joinpath("sys/fs/cgroup", *parts[:depth]) for depth in range(len(parts), -1, -1))


def cpu_name(root: Path = _ROOT) -> str | None:
    """The processor's name. On ARM Linux has none: the board's name, or the numbers of the maker and the part."""
    if name := _cpu_info("model name", root) or _sysctl("machdep.cpu.brand_string"):
        return name
    if board := _read(root / "sys/firmware/devicetree/base/model").strip("\0"):
        return board
    maker, part = (_cpu_info(f"CPU {key}", root) for key in ("implementer", "part"))
    return f"ARM {maker} {part}" if part else platform.processor() or platform.machine() or None


def cpu_flags(root: Path = _ROOT) -> tuple[str, ...]:
    """Instruction sets of the CPU that decide how fast low-precision products are, by their usual names."""
    words = (_cpu_info("flags", root) or _cpu_info("Features", root)).split()
    on_a_mac = (name for flag, name in _MAC_FLAGS.items() if _sysctl(f"hw.optional.arm.{flag}") == "1")
    return (*(name for flag, name in _FLAGS.items() if flag in words), *on_a_mac)


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that can be allocated without swapping and within the container's limit."""
    import psutil

    available, room = psutil.virtual_memory().available, memory_room(root)
    return available if room is None else min(available, room)


def free_memory(device: "torch.device") -> int:
    """Bytes that are free on a device: a GPU's own, else `available_memory`."""
    import torch

    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


def watch_load() -> Load:
    """Sleep for a moment and measure the CPU usage of other processes."""
    import psutil

    before = psutil.cpu_times()
    time.sleep(0.3)
    return load_between(before._asdict(), psutil.cpu_times()._asdict(), psutil.cpu_count() or 1)


def load_between(before: dict[str, float], after: dict[str, float], cpus: int) -> Load:
    """The load between two readings of psutil's `cpu_times`, in seconds summed over the CPUs."""
    spent = {key: after[key] - before[key] for key in before if not key.startswith("guest")}  # which is within "user"
    total, average = sum(spent.values()), os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    if total <= 0:
        return Load(None, None, average)
    stolen = spent.get("steal", 0.0)
    idle = spent["idle"] + spent.get("iowait", 0.0)
    return Load(cpus * (total - idle - stolen) / total, stolen / total, average)


def set_waiting(root: Path = _ROOT) -> None:
    """Choose how threads wait for each other; call it before torch is imported, which reads it once.

    GNU OpenMP spins for milliseconds at the end of every parallel loop. Where another program needs that core, a pass
    takes ten times as long and more. Sleeping at once costs some 20 microseconds per loop, half the time of a small
    layer. So threads sleep where others run now, and else spin for some 150 microseconds. Settings of the user stay.
    """
    if any(name in os.environ for name in _WAITING):
        return
    if others_running(root) > _MANY:
        os.environ["OMP_WAIT_POLICY"] = "passive"
    else:
        os.environ["GOMP_SPINCOUNT"] = _SHORT_SPIN


def others_running(root: Path = _ROOT, samples: int = 10, pause: float = 0.003) -> float:
    """Mean number of other runnable threads of the machine; 0 where unknown."""
    seen: list[int] = []
    for _ in range(samples):
        time.sleep(pause)
        lines = _read(root / "proc/stat").splitlines()
        seen += [int(line.split()[1]) - 1 for line in lines if line.startswith("procs_running ")]  # one is ourselves
    return sum(seen) / len(seen) if seen else 0.0


def waiting() -> str:
    """How threads wait for each other by the environment, as text."""
    settings = ", ".join(f"{name}={os.environ[name]}" for name in _WAITING if name in os.environ)
    return f"wait by {settings}" if settings else "wait as OpenMP chooses, which spins first"


def use_threads(number: int | None = None) -> int:
    """Set torch's number of threads; returns it.

    None keeps torch's own number, limited to `Processors.threads`. Raises
    `ConfigError` for less than one, and for more than the CPUs that this process may run on.
    """
    import torch  # here, so that `set_waiting` can come first

    processor = processors()
    if number is not None and not 1 <= number <= processor.cpus:
        raise ConfigError(
            "this number of threads cannot be used",
            got=number,
            expected=f"1 to {processor.cpus}, the CPUs that this process may run on",
            fix=f"leave it out for {processor.threads}",
        )
    threads = min(torch.get_num_threads(), processor.threads) if number is None else number
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    return threads


@contextmanager
def one_thread(numbers: "Tensor") -> Iterator[None]:
    """Use one thread if the tensor is small and on the CPU, where synchronising threads takes longer than it saves."""
    import torch

    threads = torch.get_num_threads()
    if threads == 1 or numbers.device.type != "cpu" or numbers.numel() > _FEW_NUMBERS:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection in the body: it would look again and again at what imports define, a fifth of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def return_free_memory() -> None:
    """Return freed memory to the system, where the C library supports it (glibc).

    Loading and quantising free buffers that malloc would otherwise keep: up to twice the weights of a small model.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _cpu_info(key: str, root: Path) -> str:
    """The first value of a key of /proc/cpuinfo; "" where there is none."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _sysctl(name: str) -> str:
    """What macOS knows by this name; "" where it does not, and elsewhere."""
    if sys.platform != "darwin":
        return ""
    return subprocess.run(["sysctl", "-n", name], capture_output=True, encoding="utf-8", check=False).stdout.strip()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""  # not Linux


def median_seconds(once: Callable[[], object]) -> float:
    """Median seconds of three calls after a warm-up call. `once` must wait for the device."""
    import torch

    times: list[float] = []
    with torch.inference_mode():
        for _ in range(4):
            begin = time.perf_counter()
            once()
            times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])
