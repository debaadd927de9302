"""Threads, cores, limits, memory and load: from files that a test writes in place of the system's, and from psutil."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from paceline.errors import ConfigError
from paceline.system import hardware
from paceline.system.hardware import (
    Load,
    Processors,
    available_memory,
    count_cores,
    cpu_flags,
    cpu_name,
    cpu_quota,
    load_between,
    memory_room,
    others_running,
    processors,
    set_waiting,
    use_threads,
    waiting,
)


@pytest.mark.parametrize(
    ("found", "number", "reason"),
    [
        (Processors(8, 8), 8, "8 cores"),
        (Processors(8, 4), 4, "8 logical CPUs are 4 full cores"),
        (Processors(8, 8, quota=2.5), 2, "grants 2.5 CPUs"),
        (Processors(8, 4, quota=0.5), 1, "grants 0.5 CPUs"),
        (Processors(8, 4, quota=6.0), 4, "full cores"),
        (Processors(8, 8, quota=2.0, asked=5), 5, "OMP_NUM_THREADS is 5"),
    ],
)
def test_the_smallest_limit_counts(found, number, reason):
    assert found.threads == number
    assert reason in found.reason


def test_hyper_threads_are_no_cores(tmp_path):
    for cpu in range(8):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert count_cores(set(range(8)), tmp_path) == 4
    assert count_cores({0, 4, 1}, tmp_path) == 2
    assert count_cores({0, 1, 2}, tmp_path / "nowhere") == 3


@pytest.mark.parametrize(
    ("capacities", "cores"),
    [
        ("397 397 397 397 1024 1024 1024 1024", 4),  # RK3588
        ("250 250 250 250 790 790 790 1024", 4),  # a telephone's, of three sizes
        ("1024 1024", 2),
        ("400 400", 2),  # the process may only use small ones
    ],
)
def test_small_cores_are_not_counted(tmp_path, capacities, cores):
    for cpu, capacity in enumerate(capacities.split()):
        write(tmp_path, {f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity": f"{capacity}\n"})
    assert count_cores(set(range(len(capacities.split()))), tmp_path) == cores


M2 = {
    "hw.perflevel0.physicalcpu": "4",
    "hw.physicalcpu": "8",
    "machdep.cpu.brand_string": "Apple M2",
    "hw.optional.arm.FEAT_DotProd": "1",
    "hw.optional.arm.FEAT_BF16": "1",
    "hw.optional.arm.FEAT_I8MM": "1",
}


def test_what_macos_tells(tmp_path, monkeypatch):
    """By a `sysctl` of a test; there are no files to read."""
    values = "".join(f"{name}) echo {value};;\n" for name, value in M2.items())
    (tmp_path / "sysctl").write_text(f"#!/bin/sh\ncase $2 in\n{values}*) echo unknown oid >&2; exit 1;;\nesac\n")
    (tmp_path / "sysctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(hardware, "sys", SimpleNamespace(platform="darwin"))
    nowhere = tmp_path / "nowhere"
    assert count_cores(set(range(8)), nowhere) == 4
    assert (cpu_name(nowhere), cpu_flags(nowhere)) == ("Apple M2", ("NEON-dot", "NEON-BF16", "NEON-I8MM"))
    (tmp_path / "sysctl").write_text("#!/bin/sh\n[ $2 = hw.physicalcpu ] && echo 2\n")  # Intel's have one kind of core
    assert (count_cores(set(range(4)), nowhere), cpu_flags(nowhere)) == (2, ())


@pytest.mark.parametrize(
    ("value", "number"), [("3", 3), ("4,2", 4), (" 2 ", 2), ("0", None), ("many", None), ("", None), ("-1", None)]
)
def test_users_word(monkeypatch, value, number):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert processors().asked == number
    if number is not None:
        assert processors().threads == number


@pytest.fixture
def four_cpus(monkeypatch):
    monkeypatch.setattr(hardware, "processors", lambda: Processors(4, 2))
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("number", [0, -3, 5])
def test_impossible_numbers_are_refused(four_cpus, number):
    with pytest.raises(ConfigError, match="1 to 4") as caught:
        use_threads(number)
    assert "leave it out for 2" in str(caught.value)


def test_number_reaches_torch(four_cpus):
    assert use_threads(3) == 3 == torch.get_num_threads()


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 2), (1, 1)])
def test_default_cuts_and_never_raises(four_cpus, before, after):
    torch.set_num_threads(before)
    assert use_threads() == after == torch.get_num_threads()


@pytest.mark.parametrize(
    ("running", "name", "value"), [(1, "GOMP_SPINCOUNT", "10000"), (2, "OMP_WAIT_POLICY", "passive")]
)
def test_threads_sleep_where_others_run(monkeypatch, tmp_path, running, name, value):
    for one in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(one, raising=False)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text(f"cpu 1 2 3\nprocs_running {running}\nprocs_blocked 0\n")
    assert others_running(tmp_path, samples=2, pause=0) == running - 1
    assert others_running(tmp_path / "nowhere", samples=2, pause=0) == 0
    with monkeypatch.context() as patch:
        set_waiting(tmp_path)
        assert os.environ.pop(name) == value
        patch.setenv("GOMP_SPINCOUNT", "7")
        set_waiting(tmp_path)
        assert (os.environ["GOMP_SPINCOUNT"], os.environ.get("OMP_WAIT_POLICY")) == ("7", None)
        assert waiting() == "wait by GOMP_SPINCOUNT=7"


COMMAND = """
from paceline.cli import main
assert "torch" not in sys.modules
try:
    main(["--version"])
except SystemExit:
    pass
assert "torch" not in sys.modules
"""


@pytest.mark.diagonal
@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "5"}])
@pytest.mark.parametrize("use", [COMMAND, "from paceline import PacelineError"], ids=["command", "library"])
def test_the_waiting_is_set_before_torch_is_loaded(given, use):
    """As a process: what torch's OpenMP finds in the environment when it is loaded."""
    code = f"import os, sys\n{use}\nprint(*(k for k in os.environ if k.startswith(('OMP_WAIT', 'GOMP'))))"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_WAIT", "GOMP", "KMP"))}
    out = subprocess.check_output([sys.executable, "-c", code], env=clean | given, text=True)
    assert out.splitlines()[-1] in (given.keys() or {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"})


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "0::/a/b\n"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/b/cpu.max": "150000 100000"}, 1.5),
        # the group above is narrower
        (
            {
                "proc/self/cgroup": V2,
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000",
                "sys/fs/cgroup/a/cpu.max": "200000 100000",
            },
            2.0,
        ),
        # a container that sees only its own group, at the top, though its path is the host's
        ({"proc/self/cgroup": "0::/docker/1234", "sys/fs/cgroup/cpu.max": "300000 100000"}, 3.0),
        ({"proc/self/cgroup": "0::/../outside", "sys/fs/cgroup/cpu.max": "300000 100000"}, 3.0),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/b/cpu.max": "nonsense"}, None),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/b/cpu.max": "100000 0"}, None),
    ],
)
def test_cpu_quota(tmp_path, files, quota):
    assert cpu_quota(write(tmp_path, files)) == quota


def test_another_groups_limit_is_not_ours(tmp_path):
    """Mutant of the walk: reading every group of the machine would find this one."""
    files = {"proc/self/cgroup": V2, "sys/fs/cgroup/c/cpu.max": "100000 100000"}
    assert cpu_quota(write(tmp_path, files)) is None


def test_memory_within_the_containers_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=4000 * 1024))
    assert memory_room(tmp_path) is None
    assert available_memory(tmp_path) == 4000 * 1024
    write(
        tmp_path, {"proc/self/cgroup": V2, "sys/fs/cgroup/a/memory.max": "max", "sys/fs/cgroup/a/memory.current": "7"}
    )
    assert memory_room(tmp_path) is None
    write(tmp_path, {"sys/fs/cgroup/a/memory.max": "3000000", "sys/fs/cgroup/a/memory.current": "1000000"})
    assert available_memory(tmp_path) == 2_000_000
    write(tmp_path, {"sys/fs/cgroup/a/memory.stat": "anon 600000\ninactive_file 300000\nactive_file 100000\n"})
    assert available_memory(tmp_path) == 2_400_000


def test_flags_that_matter(tmp_path):
    write(tmp_path, {"proc/cpuinfo": "processor : 0\nflags\t\t: fpu avx2 avx512_bf16 sse2\n"})
    assert cpu_flags(tmp_path) == ("AVX2", "AVX-512-BF16")
    assert cpu_flags(write(tmp_path, {"proc/cpuinfo": "Features : asimddp bf16\n"})) == ("NEON-dot", "NEON-BF16")
    assert cpu_flags(tmp_path / "nowhere") == ()


def test_the_name_of_a_processor(tmp_path):
    write(tmp_path, {"proc/cpuinfo": "processor : 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"})
    assert cpu_name(tmp_path) == "ARM 0x41 0xd0c"
    write(tmp_path, {"sys/firmware/devicetree/base/model": "Raspberry Pi 5 Model B Rev 1.0\0"})
    assert cpu_name(tmp_path) == "Raspberry Pi 5 Model B Rev 1.0"
    write(tmp_path, {"proc/cpuinfo": "model name\t: AMD EPYC\n"})
    assert cpu_name(tmp_path) == "AMD EPYC"


def test_load_counts_others_and_what_is_stolen():
    """Two CPUs over one second each; the guests' time is within the user's."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "guest_nice")
    before = dict.fromkeys(names, 1.0)
    spent = {"user": 0.5, "idle": 1.3, "iowait": 0.1, "steal": 0.1, "guest": 0.5}
    load = load_between(before, {name: 1.0 + spent.get(name, 0.0) for name in names}, cpus=2)
    assert load.busy_cores == pytest.approx(0.5)
    assert load.stolen == pytest.approx(0.05)
    assert load.disturbs
    assert load_between(before, before, cpus=2).busy_cores is None
    on_a_mac = {"user": 1.0, "nice": 0.0, "system": 1.0, "idle": 2.0}
    assert load_between(dict.fromkeys(on_a_mac, 0.0), on_a_mac, cpus=2).busy_cores == 1.0


@pytest.mark.parametrize(
    ("load", "disturbs"),
    [(Load(0.1, 0.0, 5.0), False), (Load(0.3, 0.0, 0.0), True), (Load(0, 0.04, 0), True), (Load(None, None, 9), False)],
)
def test_what_disturbs(load, disturbs):
    assert load.disturbs is disturbs


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.skipif(getattr(ctypes.CDLL(None), "malloc_trim", None) is None, reason="the C library cannot")
def test_freed_memory_goes_back_to_the_system():
    def resident_mb() -> float:
        return psutil.Process().memory_info().rss / 1e6

    chunks = [b"x" * 100_000 for _ in range(2000)]
    kept = chunks.pop()  # malloc gives memory back by itself only from the end
    del chunks
    before = resident_mb()
    hardware.return_free_memory()
    assert resident_mb() < before - 100
    assert kept
