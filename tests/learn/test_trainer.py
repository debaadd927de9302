"""The trainer: a first head from nothing, better ones after it, only while nothing else runs, and no process left."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.learn import trainer as module
from paceline.learn.folder import LearnFolder
from paceline.learn.learner import TrainerProcess
from paceline.learn.trainer import Gate, Trainer
from paceline.methods.heads.folder import load_head
from paceline.train.prepare import read_answers
from tests.helpers import loaded
from tests.learn.helpers import QUICK, answers, learning_llm, trainer, until


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """A folder that began with nothing, after its first round, and what the target says."""
    folder = tmp_path_factory.mktemp("learn")
    llm = learning_llm(folder)
    expected = answers(llm)
    assert not llm.decoder.drafter._heads
    until(lambda: llm.decoder.drafter.learner.recorder.answers == 16)
    assert trainer(folder).step() == folder / "heads" / "000001"
    until(lambda: llm.decoder.drafter.learner.offered)
    assert answers(llm) == expected
    assert llm.decoder.drafter.metrics()["learn_head"][1] == 1
    llm.decoder.drafter.close()
    return folder


def test_a_first_head_appears(learnt):
    head = load_head(learnt / "heads" / "000001", loaded())
    assert head.config.method == "eagle"
    assert not (learnt / "round").exists()
    if (maps := Path("/proc/self/maps")).exists():
        assert str(learnt / "answers-") not in maps.read_text(), "removed answers would stay on the disk"


def test_a_round_needs_new_answers_and_no_trial(learnt):
    one = trainer(learnt)
    one._seen = max(answer.index for part in LearnFolder(learnt).parts() for answer in read_answers(part))
    assert one.step() is None
    one._seen = -1
    (learnt / "heads" / "000002").symlink_to(learnt / "heads" / "000001")
    assert one.step() is None
    (learnt / "heads" / "000002").unlink()


def test_a_worse_head_is_not_offered(learnt, monkeypatch):
    monkeypatch.setattr(module, "estimate", lambda task: 99.0)
    assert trainer(learnt).step() is None
    assert len(LearnFolder(learnt).heads()) == 1


def test_torn_states_are_named_and_left_out(learnt, capsys):
    (part,) = LearnFolder(learnt).parts()
    answer = read_answers(part)[-1]
    assert module._is_whole(answer)
    file = part / answer.states
    whole = file.read_bytes()
    file.write_bytes(whole[:-7])
    assert not module._is_whole(answer)
    assert answer.states in capsys.readouterr().out
    one = trainer(learnt)
    one._seen = answer.index
    assert one.step() is None
    assert not capsys.readouterr().out, "once a round, or the log grows while nothing happens"
    file.write_bytes(whole)


def waits_while_requests_run(folder) -> bool:
    """Whether no step is made in front of a closed gate, and the round ends behind an open one."""
    gate, arrived, passed, done = Gate(), threading.Event(), threading.Event(), threading.Event()
    wait = gate.wait

    def watched(*_: object) -> None:
        arrived.set()
        wait()
        passed.set()

    gate.wait = watched
    one = Trainer(LearnFolder(folder), QUICK, gate)
    threading.Thread(target=lambda: (one.step(), done.set()), daemon=True).start()
    assert arrived.wait(60)
    has_waited = not passed.wait(0.5)
    gate.turn(is_open=True)
    assert done.wait(60)
    return has_waited


def test_steps_wait_while_requests_run(learnt, monkeypatch):
    monkeypatch.setattr(module, "save_trained", lambda *_: None)
    assert waits_while_requests_run(learnt)
    monkeypatch.setattr(Gate, "turn", lambda self, is_open: self._open.set())
    monkeypatch.setattr(Gate, "__init__", lambda self: setattr(self, "_open", threading.Event()) or self._open.set())
    assert not waits_while_requests_run(learnt)


def test_the_process_pauses_for_requests_and_ends_with_the_drafter(tmp_path):
    llm = learning_llm(tmp_path, trains=True)
    learner = llm.decoder.drafter.learner
    process = learner._trainer.process
    if (status := Path(f"/proc/{process.pid}/status")).exists():
        assert "Umask:\t0077" in status.read_text(), "others may read its heads"
    until(lambda: not learner._trainer.is_paused)
    paused = list[bool]()
    turn = learner._trainer.turn
    learner._trainer.turn = lambda is_paused: (paused.append(is_paused), turn(is_paused))
    answers(llm, prompts=[[5, 6, 7]])
    assert paused[0]
    llm.decoder.drafter.close()
    assert process.poll() is not None


def test_the_trainer_hears_of_a_request_last(tmp_path):
    """Where a request arrives while the other thread lets the trainer go on."""
    (tmp_path / "learn").mkdir()
    process, heard = TrainerProcess(LearnFolder(tmp_path / "learn"), QUICK), list[bytes]()
    requests = threading.Thread(target=process.turn, args=(True,))

    class Pipe:
        def write(self, said: bytes) -> None:
            if said == b"1":
                requests.start()
                requests.join(0.3)
            heard.append(said)

    pipe, process._pipe = process._pipe, Pipe()
    process.turn(is_paused=False)
    requests.join()
    process._pipe = pipe
    process.process.kill()
    process.end()
    assert heard == [b"1", b"0"]


def test_a_trainer_that_ends_ends_learning(tmp_path, caplog):
    llm = learning_llm(tmp_path, trains=True)
    expected, learner = answers(llm, prompts=[[5, 6, 7]]), llm.decoder.drafter.learner
    until(lambda: not learner._trainer.is_paused)  # so that the next request would pause it
    learner._trainer.process.kill()
    until(lambda: learner.has_failed)
    assert "the trainer has ended" in caplog.text
    assert answers(llm, prompts=[[5, 6, 7]]) == expected


SERVES = """
import sys
from pathlib import Path
from tests.learn.helpers import *
llm = learning_llm(Path(sys.argv[1]), trains=True)
print(llm.decoder.drafter.learner._trainer.process.pid, flush=True)
while True:
    answers(llm)
"""


@pytest.mark.more
def test_a_killed_server_leaves_whole_answers_and_no_process(tmp_path):
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'models'}"}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVES, str(tmp_path)], stdout=subprocess.PIPE, env=environment, cwd=root
    )
    pid = int(server.stdout.readline())
    until(lambda: sum(len(read_answers(part)) for part in LearnFolder(tmp_path).parts()) > 8)
    server.send_signal(signal.SIGKILL)
    server.wait()

    def is_gone() -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"

    until(is_gone)
    learning_llm(tmp_path).decoder.drafter.close()
    assert all(module._is_whole(answer) for part in LearnFolder(tmp_path).parts() for answer in read_answers(part))


def test_folder_of_another_kind(tmp_path):
    (tmp_path / "learn.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        learning_llm(tmp_path)
