"""The command line as a process: Ctrl-C, a closed pipe, and how soon it answers."""

import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")

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


def test_a_closed_pipe_is_silent(model):
    process = start("generate", model, *ENDLESS)
    assert process.stdout.read(20)
    process.stdout.close()
    errors = process.stderr.read()
    process.wait(timeout=120)
    assert errors == b""


def test_help_answers_at_once():
    begin = time.perf_counter()
    process = start("--help")
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert b"speculative" in out
    assert time.perf_counter() - begin < 5  # half a second on an idle machine
    loaded = "import sys, paceline.cli; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", loaded]).split() == [b"False", b"False"]
