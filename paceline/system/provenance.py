"""The provenance of results and files: the code, the machine and the command."""

import hashlib
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import psutil

from .hardware import cpu_name, usable_cpus


def provenance() -> dict[str, object]:
    """Describe the code, the machine and the command line of this process, for JSON.

    Units: memory in bytes, time in UTC as ISO 8601. Unknown values are None; nothing raises.
    """
    import torch

    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no") if commit else None
    return {
        "paceline": _version("paceline"),
        "git_commit": commit,
        "git_dirty": None if changes is None else bool(changes),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "cpu": cpu_name(),
        "cores": len(usable_cpus()),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "os": platform.platform(),
        "command": list(sys.argv),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def sha256_of(path: Path | str) -> str:
    """Hash a file by blocks, in hexadecimal, whatever its size. Raises OSError when it cannot be read."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_prompts(prompts: list[str]) -> str:
    """Hash a list of prompts, in hexadecimal; order and boundaries count, so ["ab", "c"] differs from ["a", "bc"]."""
    digest = hashlib.sha256()
    for prompt in prompts:
        data = prompt.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """The output of a git command in the checkout of this file; None outside one."""
    root = Path(__file__).resolve().parents[2]
    # Installed in an environment inside another project's checkout, git would answer with that project's commit.
    if not (root / ".git").exists():
        return None
    try:
        answer = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, encoding="utf-8", timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
