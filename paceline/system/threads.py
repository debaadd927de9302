"""How many CPU threads to use, and how they wait for each other.

More threads than cores, or than a container grants, are slower than fewer; so are two on one hyper-threaded core, which
share the one path to memory that decoding is bound by.

The commands call `set_waiting` and `use_threads`. A program that uses Paceline as a library decides for itself; on a
shared machine it should say so before anything imports torch:

    from paceline.system.threads import set_waiting
    set_waiting()
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from .cgroups import cpu_quota

_ROOT = Path("/")
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_SHORT_SPIN = "10000"
_MANY = 0.25


@dataclass(frozen=True)
class Processors:
    """What this process may compute with.

    cpus: logical CPUs it may run on. cores: physical cores among them. quota: CPUs' worth of time that its container
    grants, None without a limit. asked: OMP_NUM_THREADS, None where it is not set.
    """

    cpus: int
    cores: int
    quota: float | None = None
    asked: int | None = None

    @property
    def capacity(self) -> int:
        """Threads that can run side by side without sharing a core or waiting for their share of time; at least 1."""
        granted = self.cpus if self.quota is None else int(self.quota)
        return max(1, min(self.cpus, self.cores, granted))

    @property
    def threads(self) -> int:
        """The number to take: what the user asked for, else the capacity."""
        return self.capacity if self.asked is None else self.asked

    @property
    def reason(self) -> str:
        """Why that many, in a few words."""
        if self.asked is not None:
            return f"OMP_NUM_THREADS is {self.asked}"
        if self.quota is not None and int(self.quota) < min(self.cpus, self.cores):
            return f"the container grants {self.quota:g} CPUs"
        if self.cores < self.cpus:
            return f"{self.cpus} logical CPUs are {self.cores} physical cores"
        return f"{self.cpus} cores may be used"


def processors(root: Path = _ROOT) -> Processors:
    """What this process may compute with, read anew; `root` is the root of the file system."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    return Processors(len(allowed), count_cores(allowed, root), cpu_quota(root), asked_threads())


def count_cores(cpus: set[int], root: Path = _ROOT) -> int:
    """Physical cores among these logical CPUs; as many as CPUs where the system does not tell them apart."""
    cores: set[str] = set()
    for cpu in cpus:
        siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            cores.add(siblings.read_text(encoding="ascii").strip())
        except OSError:
            cores.add(f"cpu {cpu}")
    return len(cores)


def asked_threads() -> int | None:
    """OMP_NUM_THREADS, of a list of nested levels the first; None where it is not set or no number."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def default_threads() -> int:
    """The number of threads that suits this process: see `Processors.threads`."""
    return processors().threads


def set_waiting(root: Path = _ROOT) -> None:
    """Choose how threads wait for each other; call it before torch is imported, which reads it once.

    GNU OpenMP spins for milliseconds at the end of every parallel loop. Where another program needs that core, the
    thread waited for does not run meanwhile, and a pass takes ten times as long and more. Sleeping at once avoids
    that, and costs some 20 microseconds a loop, half the time of a small layer. So: sleep where others run now, else
    spin for some 150 microseconds, which bridges the loops of most passes. What the user has set stays.
    """
    if any(name in os.environ for name in _WAITING):
        return
    if others_running(root) > _MANY:
        os.environ["OMP_WAIT_POLICY"] = "passive"
    else:
        os.environ["GOMP_SPINCOUNT"] = _SHORT_SPIN


def others_running(root: Path = _ROOT, samples: int = 10, pause: float = 0.003) -> float:
    """Mean number of other threads of the machine that run or want to; 0 where the system does not say."""
    seen: list[int] = []
    for _ in range(samples):
        time.sleep(pause)
        try:
            lines = (root / "proc/stat").read_text(encoding="ascii").splitlines()
        except OSError:
            return 0.0
        seen += [int(line.split()[1]) - 1 for line in lines if line.startswith("procs_running ")]  # one is ourselves
    return sum(seen) / len(seen) if seen else 0.0


def waiting() -> str:
    """How threads wait for each other, as far as the environment tells."""
    told = [f"{name}={os.environ[name]}" for name in _WAITING if name in os.environ]
    return f"wait by {', '.join(told)}" if told else "wait as OpenMP chooses, which spins first"


def use_threads(number: int | None = None) -> int:
    """Let torch compute with this many threads; returns how many.

    None keeps torch's own number, cut down to `default_threads()`: what someone set lower stays. Raises `ConfigError`
    for less than one, and for more than the CPUs that this process may run on.
    """
    import torch  # here, so that `set_waiting` can come first

    found = processors()
    if number is not None and not 1 <= number <= found.cpus:
        raise ConfigError(
            "this number of threads cannot be used",
            got=number,
            expected=f"1 to {found.cpus}, the CPUs that this process may run on",
            fix=f"leave it out for {found.threads}",
        )
    threads = min(torch.get_num_threads(), found.threads) if number is None else number
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    return threads
