"""Runs Python on an emulated ARM processor: `python -m tests.kernels.qemu -m pytest -n 0 tests/kernels/test_blocks.py`.

Debian's `qemu-user` emulates. The first run fetches an aarch64 Python from Debian's registry and its packages from
Python's, 250 MB, into the folder `aarch64` of the cache; nothing is installed on the system. The kernels are compiled
outside the emulation, by zig or by what CXX names. QEMU_CPU=neoverse-n1 emulates that processor; the default has every
instruction. Nothing is learned about time: it takes some fifty times as long, and a minute to import torch.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from filelock import FileLock

from paceline.kernels.build import cache_folder
from paceline.kernels.compiler import CompileError, Target, find_compiler

ROOT = Path(__file__).parents[2]
FOLDER = cache_folder("aarch64")
PYTHON = FOLDER / "usr/bin/python"
"""The emulated Python: a script, so that processes that it starts are emulated too."""
TORCH = "torch==2.10.0"  # later ones on PyPI are for CUDA
TESTED_BY = ("pytest", "pytest-timeout", "pytest-xdist", "beartype", "sympy", "networkx")  # the last two by torch


def environment() -> dict[str, str]:
    """What the emulated Python finds in its environment. Raises `CompileError` without a compiler for ARM."""
    words = " ".join(find_compiler(Target("aarch64", "linux")).command)
    return {**os.environ, "CXX": words, "PYTHONPATH": f"{ROOT}:{ROOT / 'models'}"}


def missing() -> str:
    """What must be installed first, in a line, or ""."""
    if not shutil.which("qemu-aarch64"):
        return "there is no qemu-aarch64: apt install qemu-user"
    try:
        environment()
    except CompileError as error:
        return str(error)
    return ""


def fetch() -> None:
    """Make `PYTHON`, unless it is there. Raises `CalledProcessError`, or `FileNotFoundError` for a missing program."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / ".lock"):
        if not PYTHON.exists():
            print(f"Fetching an aarch64 Python with torch into {FOLDER} (250 MB) ...", file=sys.stderr)
            _fetch_python()
            version = next(FOLDER.glob("usr/bin/python3.*")).name.removeprefix("python")
            _fetch_packages(version)
            run = f'exec qemu-aarch64 -L "{FOLDER}" -0 "$0" "{PYTHON}{version}" "$@"'
            PYTHON.write_text(f"#!/bin/sh\n{run}\n")
            PYTHON.chmod(0o755)


def _fetch_python() -> None:
    apt = FOLDER / "apt"  # in place of the system's own folders, which do not change
    for name in ("lists/partial", "archives/partial"):
        (apt / name).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()  # nothing is installed
    options = {"State": apt, "State::status": apt / "status", "Cache": apt}
    words = ["apt-get", "-qq", "-o", "APT::Architecture=arm64", "-o", "APT::Architectures=arm64"]
    words += ["-o", "APT::Sandbox::User=", "-o", "Debug::NoLocking=true"]
    words += [word for name, value in options.items() for word in ("-o", f"Dir::{name}={value}")]
    subprocess.run([*words, "update"], check=True)
    packages = ["python3", "libstdc++6", "libgomp1"]
    subprocess.run([*words, "install", "--download-only", "--yes", "--no-install-recommends", *packages], check=True)
    for package in apt.glob("archives/*.deb"):
        subprocess.run(["dpkg-deb", "--extract", package, FOLDER], check=True)
    shutil.rmtree(apt)


def _fetch_packages(version: str) -> None:
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    others = [need for need in needs if not need.startswith("torch")]
    words = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--only-binary=:all:"]
    words += ["--target", str(FOLDER / "usr/lib/python3/dist-packages"), "--python-version", version]
    for system in ("manylinux_2_28", "manylinux_2_17", "manylinux2014"):
        words += ["--platform", f"{system}_aarch64"]
    subprocess.run([*words, "--no-deps", TORCH], check=True)  # what else it names is chosen for this processor
    subprocess.run([*words, *others, *TESTED_BY], check=True)


if __name__ == "__main__":
    if why := missing():
        sys.exit(why)
    fetch()
    sys.exit(subprocess.run([PYTHON, *sys.argv[1:]], env=environment(), check=False).returncode)
