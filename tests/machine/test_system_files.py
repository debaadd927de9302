"""Limits, flags and load, parsed from files that a test writes in the place of the system's."""

from pathlib import Path

import pytest

from paceline.system.cgroups import cpu_quota, memory_room
from paceline.system.hardware import Load, available_memory, cpu_flags, load_between


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2, V1 = "0::/a/b\n", "5:memory:/a\n4:cpu,cpuacct:/a\n0::/\n"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/b/cpu.max": "150000 100000"}, 1.5),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/unified/a/cpu.max": "50000 100000"}, 0.5),
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
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "250000",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000",
            },
            2.5,
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            },
            None,
        ),
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


def test_memory_within_the_containers_limit(tmp_path):
    write(tmp_path, {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 4000 kB\n"})
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
    one = {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "1500", "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "2"}
    assert available_memory(write(tmp_path, {"proc/self/cgroup": V1} | one)) == 1498
    write(tmp_path, {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(2**63 - 4096)})
    assert memory_room(tmp_path) is None


def test_memory_of_an_unknown_system(tmp_path):
    assert available_memory(tmp_path) is None


def test_flags_that_matter(tmp_path):
    write(tmp_path, {"proc/cpuinfo": "processor : 0\nflags\t\t: fpu avx2 avx512_bf16 sse2\n"})
    assert cpu_flags(tmp_path) == ("AVX2", "AVX-512-BF16")
    assert cpu_flags(write(tmp_path, {"proc/cpuinfo": "Features : asimddp bf16\n"})) == ("NEON-dot", "NEON-BF16")
    assert cpu_flags(tmp_path / "nowhere") == ()


def test_load_counts_others_and_what_is_stolen():
    idle = [[0] * 10, [0] * 10]
    # user nice system idle iowait irq softirq steal guest guest_nice; the guests' time is within the user's
    after = [[50, 0, 0, 40, 10, 0, 0, 0, 50, 0], [0, 0, 0, 90, 0, 0, 0, 10, 0, 0]]
    load = load_between(idle, after)
    assert load.busy_cores == pytest.approx(0.5)
    assert load.stolen == pytest.approx(0.05)
    assert load.disturbs


@pytest.mark.parametrize(
    ("load", "disturbs"),
    [(Load(0.1, 0.0, 5.0), False), (Load(0.3, 0.0, 0.0), True), (Load(0, 0.04, 0), True), (Load(None, None, 9), False)],
)
def test_what_disturbs(load, disturbs):
    assert load.disturbs is disturbs


def test_load_of_an_unknown_system():
    assert load_between([], []) == Load(None, None, None)
    assert load_between([[1] * 10], [[1] * 10]) == Load(None, None, None)
