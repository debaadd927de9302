"""How many threads: affinity, cores, quota and the user's word, read from files that a test can write."""

import os
import subprocess
import sys

import pytest
import torch

from paceline.errors import ConfigError
from paceline.system import threads
from paceline.system.threads import (
    Processors,
    asked_threads,
    count_cores,
    default_threads,
    others_running,
    set_waiting,
    use_threads,
    waiting,
)


@pytest.mark.parametrize(
    ("found", "number", "reason"),
    [
        (Processors(8, 8), 8, "8 cores"),
        (Processors(8, 4), 4, "8 logical CPUs are 4 physical cores"),
        (Processors(8, 8, quota=2.5), 2, "grants 2.5 CPUs"),
        (Processors(8, 4, quota=0.5), 1, "grants 0.5 CPUs"),
        (Processors(8, 4, quota=6.0), 4, "physical"),
        (Processors(8, 8, quota=2.0, asked=5), 5, "OMP_NUM_THREADS is 5"),
    ],
)
def test_the_smallest_limit_counts(found, number, reason):
    assert found.threads == number
    assert reason in found.reason


def test_hyper_threads_are_no_cores(tmp_path):
    for cpu in range(8):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert count_cores(set(range(8)), tmp_path) == 4
    assert count_cores({0, 4, 1}, tmp_path) == 2
    assert count_cores({0, 1, 2}, tmp_path / "nowhere") == 3


@pytest.mark.parametrize(
    ("value", "number"), [("3", 3), ("4,2", 4), (" 2 ", 2), ("0", None), ("many", None), ("", None), ("-1", None)]
)
def test_users_word(monkeypatch, value, number):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert asked_threads() == number
    if number is not None:
        assert default_threads() == number


def test_default_is_within_the_machine(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert 1 <= default_threads() <= (os.cpu_count() or 1)


@pytest.fixture
def four_cpus(monkeypatch):
    monkeypatch.setattr(threads, "processors", lambda: Processors(4, 2))
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("number", [0, -3, 5])
def test_impossible_numbers_are_refused(four_cpus, number):
    with pytest.raises(ConfigError, match="1 to 4") as caught:
        use_threads(number)
    assert "leave it out for 2" in str(caught.value)


def test_number_reaches_torch(four_cpus):
    assert use_threads(3) == 3 == torch.get_num_threads()


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 2), (1, 1)])
def test_default_cuts_and_never_raises(four_cpus, before, after):
    torch.set_num_threads(before)
    assert use_threads() == after == torch.get_num_threads()


@pytest.mark.parametrize(
    ("running", "name", "value"), [(1, "GOMP_SPINCOUNT", "10000"), (2, "OMP_WAIT_POLICY", "passive")]
)
def test_threads_sleep_where_others_run(monkeypatch, tmp_path, running, name, value):
    for one in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(one, raising=False)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text(f"cpu 1 2 3\nprocs_running {running}\nprocs_blocked 0\n")
    assert others_running(tmp_path, samples=2, pause=0) == running - 1
    assert others_running(tmp_path / "nowhere", samples=2, pause=0) == 0
    with monkeypatch.context() as patch:
        set_waiting(tmp_path)
        assert os.environ.pop(name) == value
        patch.setenv("GOMP_SPINCOUNT", "7")
        set_waiting(tmp_path)
        assert (os.environ["GOMP_SPINCOUNT"], os.environ.get("OMP_WAIT_POLICY")) == ("7", None)
        assert waiting() == "wait by GOMP_SPINCOUNT=7"


@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "5"}])
def test_commands_set_the_waiting_before_torch_is_loaded(given):
    """As a process: what torch's OpenMP finds in the environment when it is loaded."""
    code = (
        "import os, sys\nfrom paceline.cli import main\nassert 'torch' not in sys.modules\n"
        "try:\n    main(['--version'])\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules\nprint(*(k for k in os.environ if k.startswith(('OMP_WAIT', 'GOMP'))))"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_WAIT", "GOMP", "KMP"))}
    out = subprocess.check_output([sys.executable, "-c", code], env=clean | given, text=True)
    assert out.splitlines()[-1] in (given.keys() or {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"})
