"""What a container grants of the machine: Linux control groups, version 1 and 2, read as files.

A process belongs to a group, and the limits of every group above it hold too. `root` is the root of the file system,
so that tests can bring their own.
"""

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_NO_LIMIT = 1 << 60  # version 1 writes an absurd number where nothing is limited


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPUs' worth of time that this process may use, for example 1.5; None where nothing limits it."""
    limits = [_share(*_words(folder / "cpu.max")) for folder in _groups(root, None)]
    limits += [
        _share(*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us"))
        for folder in _groups(root, "cpu")
    ]
    return min((limit for limit in limits if limit is not None), default=None)


def memory_room(root: Path = _ROOT) -> int | None:
    """Bytes that this process's groups may still take; None where nothing limits them.

    What the groups hold of files counts as room: the system drops it before it refuses memory.
    """
    rooms = [_room(folder, "memory.max", "memory.current") for folder in _groups(root, None)]
    rooms += [_room(folder, "memory.limit_in_bytes", "memory.usage_in_bytes") for folder in _groups(root, "memory")]
    return min((room for room in rooms if room is not None), default=None)


def _groups(root: Path, controller: str | None) -> Iterator[Path]:
    """Folders of this process's group and of those above it; `controller` None asks for version 2."""
    mounts = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller is None and controllers == "":
            tops = [mounts, mounts / "unified"]
        elif controller is not None and controller in controllers.split(","):
            tops = [mounts / controller, mounts / controllers]
        else:
            continue
        parts = [part for part in path.split("/") if part]
        if ".." in parts:  # a group outside what this container sees
            parts = []
        for top in dict.fromkeys(tops):
            # In a container the path is often the host's, and only the top exists here: the container's own group.
            yield from (top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def _share(quota: str = "max", period: str = "100000") -> float | None:
    """CPUs from microseconds per period; "max" and -1 mean no limit."""
    try:
        return int(quota) / int(period) if int(quota) > 0 else None
    except (ValueError, ZeroDivisionError):
        return None


def _room(folder: Path, limit: str, usage: str) -> int | None:
    try:
        most, used = int(_words(folder / limit)[0]), int(_words(folder / usage)[0])
    except (ValueError, IndexError):
        return None
    stat = {key: value for key, _, value in (line.partition(" ") for line in _lines(folder / "memory.stat"))}
    # Version 1 has the sums with the groups below under names of their own.
    files = sum(int(stat.get(f"total_{key}", stat.get(key, "0"))) for key in ("inactive_file", "active_file"))
    return max(0, most - max(0, used - files)) if most < _NO_LIMIT else None


def _words(path: Path) -> list[str]:
    lines = _lines(path)
    return lines[0].split() if lines else []


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
