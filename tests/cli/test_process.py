"""The command line as a process: Ctrl-C, a closed pipe, and what it does not load."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("is_heard")

ENDLESS = ("-p", "w5", "--max-tokens", "40000", "--ignore-eos", "--numerics", "fast")


def start(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "paceline", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


def test_ctrl_c_ends_a_stream_politely(model):
    process = start("generate", model, *ENDLESS)
    assert process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert errors.decode().strip() == "Stopped."


def test_a_closed_pipe_is_silent():
    process = start("models")
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=120) == 1
    assert errors == b""


def test_help_does_not_wait_for_torch():
    code = (
        "import sys; from paceline.cli import main\ntry: main(['--help'])\nexcept SystemExit as done: print(done.code)"
    )
    code += "\nprint({'torch', 'transformers'} & set(sys.modules))"
    out = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert "speculative" in out
    assert out.splitlines()[-2:] == ["0", "set()"]


INTERRUPTED = """
import os, signal, sys, time

class Presses:
    def find_spec(self, name, path=None, target=None):
        if name == {moment!r}:
            sys.meta_path.remove(self)
            {press}

def press():
    os.kill(os.getpid(), signal.SIGINT)

class Dropped:
    def __del__(self):
        press()

def drop():
    Dropped()
    time.sleep(600)

def swallow():
    try:
        press()
    except KeyboardInterrupt:
        raise ImportError("what a library makes of it") from None

sys.meta_path.insert(0, Presses())
from paceline.cli import main
main({arguments!r})
"""


@pytest.mark.parametrize(
    ("moment", "press", "json"),
    [
        ("paceline.system.hardware", "press()", False),  # nothing is imported yet
        ("paceline.zoo", "press()", True),  # within the command
        *(
            pytest.param(*one, False, marks=pytest.mark.more)
            for one in [
                ("typer", "press()"),
                ("paceline.cli.show", "swallow()"),
                ("paceline.zoo", "swallow()"),
                ("paceline.zoo", "drop()"),
            ]
        ),
    ],
)
def test_ctrl_c_at_any_moment(moment, press, json):
    options = ["models", "--json"] if json else ["models"]
    code = INTERRUPTED.format(moment=moment, press=press, arguments=options)
    done = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (130, "Stopped.\n")
    if json:
        assert error_of(done.stdout)["type"] == "KeyboardInterrupt"


def error_of(out: str) -> dict:
    """The error that is the one line of --json."""
    (line,) = out.splitlines()
    told = json.loads(line)
    assert told.keys() == {"error"}
    assert told["error"].keys() == {"type", "message", "got", "expected", "fix"}
    return told["error"]


SCREENS = """
paceline models --json >&- 2>&- <&-; echo $? >> {log}
paceline models >&-; echo $? >> {log}
paceline show {absent} --json 2>&-; echo $? >> {log}
PYTHONIOENCODING=latin-1 paceline models | grep -c smollm2-135m >> {log}
PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 LC_ALL=C paceline show {absent} --json >> {log}
paceline models --json > /dev/full; echo $? >> {log}
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_closed_streams_and_other_encodings(tmp_path):
    """One after the other, since each has to be a process."""
    log = tmp_path / "log"
    script = SCREENS.format(log=log, absent="'/nowhere/\u20ac'").replace("paceline ", f"{sys.executable} -m paceline ")
    told = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300)
    lines = log.read_text().splitlines()
    assert lines[:3] == ["0", "0", "1"], told.stderr
    assert error_of(told.stdout)["got"] == "/nowhere/\u20ac"
    assert int(lines[3]) >= 1
    assert error_of(lines[4])["got"].startswith("/nowhere/")
    assert lines[5:] == ["1"]
    assert "Traceback" not in told.stderr
    assert "Unexpected" not in told.stderr
