"""The oldest and the newest versions of what Paceline needs."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.net
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("which", ["oldest", "newest"])
def test_versions(which, tmp_path):
    """With the torch that is installed: another may bring gigabytes. `.ci/versions` alone takes the right one."""
    installed = f"torch=={torch.__version__.partition('+')[0]}"
    environment = {"TORCH": installed, **os.environ, "VENV": str(tmp_path / "venv")}
    environment.pop("PYTHONPATH", None)
    script = REPOSITORY / ".ci" / "versions"
    subprocess.run(["bash", str(script), which, "tests/llm", "tests/config"], env=environment, check=True)


def test_unknown_word():
    done = subprocess.run(["bash", str(REPOSITORY / ".ci" / "versions"), "old"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "oldest or newest" in done.stderr
