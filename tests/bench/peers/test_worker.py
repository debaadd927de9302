"""The worker process: its answers, its deaths, and its sleep."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bench.peers import PeerFailed, PeerOptions
from bench.peers import worker as worker_module
from bench.peers.isolated import IsolatedPeer, PeerKind
from paceline.errors import ConfigError

from . import fake_worker as fake

SCRIPT = Path(fake.__file__)
KIND = PeerKind("fake", SCRIPT, "fake-package", lambda path: path.exists(), "a file", "write one")
linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


MANY = replace(KIND, process_each=True)


def peer(folder, how="fine", kind=KIND, python=sys.executable, seconds=30.0) -> IsolatedPeer:
    (folder / "model").write_text(how)
    return IsolatedPeer(kind, python, str(folder / "model"), PeerOptions(threads=1), seconds)


def ask(opened, what, mode="plain"):
    return opened.run(mode, [what, 5], 8, 0.0)


def stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_gone(pid: int, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if stat(pid)[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_answers(tmp_path):
    with peer(tmp_path) as opened:
        assert opened.modes == ("plain", "lookup")
        assert opened.describe()["version"] == "1.0"
        assert opened.describe()["executable"] == sys.executable
        answer = ask(opened, fake.ANSWER, "lookup")
        assert (answer.text, answer.token_ids, answer.num_tokens, answer.num_passes) == ("lookup", [0, 5], 1, None)
        assert ask(opened, fake.PRINT).text == "plain", "what a peer prints does not reach the pipe"
        assert ask(opened, fake.ANSWER).text == "plain"
        assert opened.logprobs([7]).tolist() == [-7, -1.5]
        with pytest.raises(ConfigError, match="no such mode"):
            ask(opened, fake.ANSWER, "draft")
    opened.close()
    with pytest.raises(ConfigError, match="started"):
        ask(opened, fake.ANSWER)


def test_a_prompt_larger_than_any_pipe(tmp_path):
    many = [fake.ANSWER, *range(200_000)]
    with peer(tmp_path) as opened:
        assert opened.run("plain", many, 8, 0.0).token_ids == many


def test_modes_of_their_own_processes(tmp_path):
    with peer(tmp_path, kind=MANY) as opened:
        first, second = (ask(opened, fake.PID, mode).text for mode in ("plain", "lookup"))
        assert first != second
        assert ask(opened, fake.PID, "lookup").text == second
    assert is_gone(int(first))
    assert is_gone(int(second))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", ["is not installed", "no_such_module_of_a_peer", "-m pip install fake-package", sys.executable]),
        ("unreadable", ["could not load", "the weights make no sense", "Fix:"]),
        ("die", ["did not start", "out of memory, goodbye", "exit status 7"]),
    ],
)
def test_failing_starts(tmp_path, how, words):
    opened = peer(tmp_path, how)
    with pytest.raises(ConfigError) as caught:
        opened.start()
    assert all(word in str(caught.value) for word in ["fake", *words]), caught.value
    assert opened._workers == {}


def test_hanging_start(tmp_path):
    with pytest.raises(ConfigError, match="nothing after 1 s"):
        peer(tmp_path, "hang", seconds=1).start()


@pytest.mark.parametrize("python", ["/no/such/python", __file__])
def test_no_interpreter(tmp_path, python):
    with pytest.raises(ConfigError, match="cannot be run") as caught:
        peer(tmp_path, python=python).start()
    assert f"got: {python}".lower() in str(caught.value).lower()


def test_an_error_leaves_the_worker_usable(tmp_path):
    with peer(tmp_path) as opened:
        with pytest.raises(PeerFailed, match="too long for me"):
            ask(opened, fake.RAISE)
        assert ask(opened, fake.ANSWER).num_tokens == 1


def test_death_in_an_answer(tmp_path):
    with peer(tmp_path) as opened:
        with pytest.raises(PeerFailed, match="segmentation fault, more or less") as caught:
            ask(opened, fake.DIE)
        assert "exit status 9" in str(caught.value)
        with pytest.raises(PeerFailed, match="closed"):
            ask(opened, fake.ANSWER)


def test_killed_between_answers(tmp_path):
    with peer(tmp_path) as opened:
        os.kill(int(ask(opened, fake.PID).text), signal.SIGKILL)
        with pytest.raises(PeerFailed, match="SIGKILL"):
            ask(opened, fake.ANSWER)


@linux
def test_hanging_answer(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.peers.isolated._patience", lambda _: 0.5)
    with peer(tmp_path) as opened:
        pid = int(ask(opened, fake.PID).text)
        with pytest.raises(PeerFailed, match="in time"):
            ask(opened, fake.HANG)
        assert is_gone(pid), "a hanging worker is killed at once"


def burns_between_answers(opened) -> bool:
    """Whether a worker with a spinning thread uses the processor while nobody asks it, instead of being stopped."""
    ask(opened, fake.SPIN)
    pid = int(ask(opened, fake.PID).text)
    before = int(stat(pid)[11])
    while (now := stat(pid))[0] != "T":
        if int(now[11]) - before > 20:  # ticks of 10 ms; a signal takes a moment to stop every thread
            return True
        time.sleep(0.01)
    return False


@linux
def test_sleeps_between_answers(tmp_path):
    with peer(tmp_path) as opened:
        assert not burns_between_answers(opened)
        assert ask(opened, fake.ANSWER).num_tokens == 1, "and wakes up again"


@linux
def test_a_worker_that_is_not_stopped_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_module.WorkerProcess, "_signal", lambda self, number: None)
    with peer(tmp_path) as opened:
        assert burns_between_answers(opened)


@linux
@pytest.mark.parametrize("stop_first", [True, False], ids=["closed", "forgotten"])
def test_nothing_is_left(tmp_path, stop_first):
    opened = peer(tmp_path)
    opened.start()
    pids = [int(ask(opened, what).text) for what in (fake.PID, fake.CHILD)]
    if stop_first:
        opened.close()
    else:
        del opened
    assert all(is_gone(pid) for pid in pids)


@linux
def test_dies_with_a_parent_that_was_killed(tmp_path):
    """A worker that is stopped, or about to be, cannot see its input end: the kernel has to kill it."""
    program = (
        "import sys, time\n"
        "from bench.peers.worker import WorkerProcess\n"
        "from pathlib import Path\n"
        f"w = WorkerProcess('fake', sys.executable, Path({str(SCRIPT)!r}), {{'threads': 1, 'model': ''}})\n"
        "w.start(30)\n"
        "print(w.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert is_gone(worker)
