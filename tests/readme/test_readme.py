"""The README is executed: every command and every code block, with the real default model."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import paceline
from tests.real_models import default_model

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", README, re.S)
COMMANDS = [line.split("#")[0].strip() for kind, block in BLOCKS if kind == "bash" for line in block.splitlines()]
CODE = [block for kind, block in BLOCKS if kind == "python"]


@pytest.fixture(scope="module")
def model():
    return default_model()


def test_readme_is_short():
    assert README.count("\n") <= 120


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A fresh folder in place of /tmp, so that what an earlier run left there does not matter."""
    return tmp_path_factory.mktemp("readme")


SHORTER = {
    "make demo": f"VENV={sys.prefix} -o {sys.prefix}/.ready ARGS='--num-prompts 1 --max-tokens 16'",
    "paceline check": "--num-prompts 1 --max-tokens 12 --no-distribution-test",
    "paceline bench": "--num-prompts 1 --max-tokens 12",
    "paceline generate": "--max-tokens 12",
}
"""Options that tests add; the last of each counts. Nothing is installed (-o), and other tests test the distribution."""


def shortened(command: str) -> str:
    return " ".join([command, *(options for start, options in SHORTER.items() if command.startswith(start))])


@pytest.mark.more
def test_make_demo(model):
    """As a user would, with this environment's programs first in the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", shortened("make demo")],
        cwd=ROOT, env={**os.environ, "PATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert "identical" in done.stdout.lower()
    assert "Traceback" not in done.stdout
    assert "torchao" not in done.stdout, "other libraries warn on the screen"


def is_more(command: str) -> bool:
    return not command.startswith("paceline generate")


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=pytest.mark.more if is_more(c) else ()) for c in COMMANDS if c.startswith("paceline ")],
)
def test_readme_command(command, scratch, model):
    """In this process, which has imported torch already."""
    done = paceline(*shlex.split(shortened(command.replace("/tmp/", f"{scratch}/")))[1:])
    assert done.exit_code == 0, done.output
    assert "Traceback" not in done.output


def test_every_command_is_run():
    """`make test` is what runs now."""
    others = {command for command in COMMANDS if command and not command.startswith("paceline ")}
    assert others == {"make demo", "make test"}


@pytest.mark.parametrize("code", CODE)
def test_readme_code(code, model):
    names = {}
    exec(code, names)
    assert "Black Sea" in names["result"].text, "an answer that shows what the model can do"


def test_readme_links_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
