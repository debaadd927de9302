"""The README is executed: every command and every code block, with the real default model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import PacelineError
from paceline.zoo import pull

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", README, re.S)
COMMANDS = [line.split("#")[0].strip() for kind, block in BLOCKS if kind == "bash" for line in block.splitlines()]
CODE = [block for kind, block in BLOCKS if kind == "python"]


@pytest.fixture(scope="module", autouse=True)
def default_model():
    try:
        return pull("smollm2-135m")
    except PacelineError as error:
        pytest.skip(f"the default model cannot be fetched: {error}")


def run(*command: str) -> str:
    """Run as a user would, with this environment's programs first in the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout + done.stderr


def test_readme_is_short():
    assert README.count("\n") <= 120


def test_readme_names_the_two_commands():
    assert "make demo" in COMMANDS
    assert "make test" in COMMANDS


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A fresh folder in place of /tmp, so that what an earlier run left there does not matter."""
    return tmp_path_factory.mktemp("readme")


SHORTER = {
    "make demo": f"VENV={sys.prefix} -o {sys.prefix}/.ready ARGS='--num-prompts 1 --max-tokens 16'",
    "paceline check": "--num-prompts 1 --max-tokens 12 --no-law-test",
    "paceline bench": "--num-prompts 1 --max-tokens 12",
    "paceline generate": "--max-tokens 12",
}
"""Options that tests add, the last of each counts. Nothing is installed (-o); the law test has tests of its own."""


@pytest.mark.parametrize("command", [c for c in COMMANDS if c and c != "make test"])  # which is what runs now
def test_readme_command(command, scratch):
    more = [options for start, options in SHORTER.items() if command.startswith(start)]
    text = run("bash", "-c", " ".join([command.replace("/tmp/", f"{scratch}/"), *more]))
    assert "Traceback" not in text
    assert "torchao" not in text, "other libraries warn on the screen"
    if command == "make demo":
        assert "identical" in text.lower()


@pytest.mark.parametrize("code", CODE)
def test_readme_code(code):
    assert "Traceback" not in run(sys.executable, "-c", code.replace("max_tokens=64", "max_tokens=16"))


def test_readme_links_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
