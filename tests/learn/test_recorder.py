"""What is recorded: whole answers with the target's states, as `prepare` writes them, bounded, nothing private."""

import errno
import os
import shutil
from dataclasses import replace

import pytest
import torch

from paceline import Coupled, SamplingParams
from paceline.core.request import SamplingParams as Params
from paceline.errors import ConfigError
from paceline.learn import learner
from paceline.learn.drafter import Learned
from paceline.learn.folder import LearnFolder, recent
from paceline.system.files import folder_bytes
from paceline.train.config import PrepareSection
from paceline.train.data import Answers
from paceline.train.prepare import TrainPrompt, prepare, read_answers, read_record
from tests.helpers import NO_EOS, loaded, runner
from tests.learn.helpers import GREEDY, PROMPTS, QUICK, SAMPLED, answers, head_spec, learning_llm, until
from tests.methods.common import saved


def recorded(llm, count: int) -> list:
    """The answers in its folder, once there are so many."""
    drafter = llm.decoder.drafter
    until(lambda: drafter.learner.recorder.answers >= count)
    drafter.close()
    return [answer for part in drafter._folder.parts() for answer in read_answers(part)]


def test_a_part_is_a_folder_of_prepare(tmp_path):
    """The same lines and the bits of the same states as `prepare` writes of these prompts."""
    llm = learning_llm(tmp_path / "learn")
    said = answers(llm, prompts=PROMPTS[:4])
    assert sorted(list(a.answer_ids) for a in recorded(llm, 4)) == sorted(said)
    (part,) = LearnFolder(tmp_path / "learn").parts()
    config = PrepareSection(max_tokens=24, temperatures=(0.0,))
    prompts = [TrainPrompt("", ids) for ids in PROMPTS[:4]]
    for _ in prepare(runner(loaded()), prompts, NO_EOS, config, tmp_path / "prepared", (2,)):
        pass
    ours, theirs = (Answers.read(folder).batch(range(4), (2,), 64) for folder in (part, tmp_path / "prepared"))
    assert torch.equal(ours.token_ids, theirs.token_ids)
    assert torch.equal(ours.is_answer, theirs.is_answer)
    assert torch.equal(ours.states[2], theirs.states[2])
    assert read_record(part)["fingerprint"] == loaded().fingerprint


def test_long_prompts_are_cut(tmp_path):
    llm = learning_llm(tmp_path, settings=replace(QUICK, prompt_tokens=3))
    answers(llm, prompts=PROMPTS[:1])
    (answer,) = recorded(llm, 1)
    assert list(answer.prompt_ids) == PROMPTS[0][-3:]
    assert Answers([answer]).batch([0], (2,), 64).states[2].shape[1] == 3 + 24


def test_the_folder_is_bounded(tmp_path):
    """The oldest parts go, and the newest answers stay."""
    llm = learning_llm(tmp_path, settings=replace(QUICK, max_bytes=20_000))
    answers(llm)
    kept = recorded(llm, 16)
    parts = LearnFolder(tmp_path).parts()
    assert sum(folder_bytes(part) for part in parts) <= 20_000
    assert len(parts) > 3
    assert [answer.index for answer in kept] == [*range(16 - len(kept), 16)]
    newest = recent(LearnFolder(tmp_path), 24 * 3)
    assert [answer.index for answer in newest] == [15, 14, 13]


def test_others_read_no_answers(tmp_path):
    """Also in a folder that they may read."""
    tmp_path.chmod(0o755)
    llm = learning_llm(tmp_path)
    answers(llm, prompts=PROMPTS[:1])
    recorded(llm, 1)
    (part,) = LearnFolder(tmp_path).parts()
    assert part.stat().st_mode & 0o077 == 0


def test_what_is_deleted_stays_deleted(tmp_path):
    """Answers while the server runs, and the whole folder, which ends learning."""
    llm = learning_llm(tmp_path / "learn")
    learner, folder = llm.decoder.drafter.learner, LearnFolder(tmp_path / "learn")
    for count in (1, 2):
        answers(llm, prompts=PROMPTS[:1])
        until(lambda: learner.recorder.answers == count)  # noqa: B023
        (part,) = folder.parts()
        assert read_record(part), "a folder that `prepare` knows"
        assert [answer.index for answer in read_answers(part)] == [count - 1]
        shutil.rmtree(part)
    shutil.rmtree(folder.path)
    expected = answers(llm, prompts=PROMPTS[:1])
    until(lambda: learner.has_failed)
    assert not folder.path.exists()
    assert answers(llm, prompts=PROMPTS[:1]) == expected


def keeps_private_answers_out(folder) -> bool:
    llm, private = learning_llm(folder), replace(GREEDY, extra_args={"store": False})
    answers(llm, [private if row % 2 else GREEDY for row in range(4)], PROMPTS[:4])
    said = sorted(list(answer.prompt_ids) for answer in recorded(llm, 2))
    return said == sorted(PROMPTS[:4:2])


def test_private_answers_are_never_recorded(tmp_path, monkeypatch):
    assert keeps_private_answers_out(tmp_path / "a")
    with pytest.raises(ConfigError, match="true or false"):
        SamplingParams(extra_args={"store": "no"})
    monkeypatch.setattr(Params, "is_private", False)
    assert not keeps_private_answers_out(tmp_path / "mutant")


def test_answers_that_end_in_an_error_are_not_recorded(tmp_path):
    def fails(ids, scores):
        if ids.shape[1] > len(PROMPTS[0]) + 3:
            raise ValueError("no more")
        return scores

    llm = learning_llm(tmp_path)
    params = [replace(GREEDY, logits_processors=(fails,)), GREEDY]
    broken, _ = llm.generate([PROMPTS[0], PROMPTS[1]], params, return_exceptions=True)
    assert isinstance(broken, Exception)
    assert [list(a.prompt_ids) for a in recorded(llm, 1)] == [PROMPTS[1]]


def test_one_process_a_folder(tmp_path):
    first = learning_llm(tmp_path)
    with pytest.raises(ConfigError, match=r"another run is writing.*end the other server"):
        learning_llm(tmp_path)
    first.decoder.drafter.close()
    learning_llm(tmp_path).decoder.drafter.close()


def test_folders_of_others_are_refused(tmp_path):
    learning_llm(tmp_path / "learn", head_spec(saved(tmp_path / "one", "eagle"))).decoder.drafter.close()
    with pytest.raises(ConfigError, match=r"other settings.*method: 'eagle3'.*method: 'eagle'"):
        learning_llm(tmp_path / "learn", head_spec(saved(tmp_path / "two", "eagle3"), "eagle3"))
    with pytest.raises(ConfigError, match=r"other settings.*start"):
        learning_llm(tmp_path / "learn")
    learning_llm(tmp_path / "new").decoder.drafter.close()
    with pytest.raises(ConfigError, match=r"other settings.*fingerprint"):
        Learned(None, tmp_path / "new", trains=False).bind(runner(loaded(seed=1)), Coupled())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    with pytest.raises(ConfigError, match=r"not a folder of a drafter that learns.*thesis"):
        learning_llm(tmp_path / "mine")


def test_what_a_kill_leaves_is_no_harm(tmp_path):
    """A line that was cut, half a file of states, half a head, a part without answers: whole answers are read alone."""
    llm = learning_llm(tmp_path)
    answers(llm, prompts=PROMPTS[:4])
    whole = recorded(llm, 4)
    (part,) = LearnFolder(tmp_path).parts()
    with (part / "answers.jsonl").open("a") as file:
        file.write('{"index": 4, "sour')
    (part / ".states-000004.safetensors.77.part").write_bytes(b"half")
    (tmp_path / "heads" / ".000001-abc").mkdir(parents=True)
    (tmp_path / "answers-000002").mkdir()
    again = learning_llm(tmp_path)
    answers(again, prompts=PROMPTS[4:5])
    now = recorded(again, 1)
    assert now[:4] == whole
    assert [answer.index for answer in now] == [0, 1, 2, 3, 4]
    assert not [*tmp_path.rglob(".*.part"), *tmp_path.glob("heads/.*")]


def test_a_full_disk_ends_learning_and_nothing_else(tmp_path, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    llm = learning_llm(tmp_path)
    expected = answers(llm, SAMPLED, PROMPTS[:3])
    until(lambda: llm.decoder.drafter.learner.recorder.answers == 3)
    monkeypatch.setattr("paceline.learn.folder.append_answers", full)
    for _ in range(2):
        assert answers(llm, SAMPLED, PROMPTS[:3]) == expected
        until(lambda: llm.decoder.drafter.learner.has_failed)
    (warning,) = [record.message for record in caplog.records if "learning has stopped" in record.message]
    assert "No space left" in warning
    assert llm.decoder.drafter.metrics()["learn_stopped"][1] == 1
    learning_llm(tmp_path).decoder.drafter.close()  # the folder is free


def test_a_slow_disk_costs_answers_and_no_time(tmp_path, monkeypatch):
    monkeypatch.setattr(learner, "_WAITING", 2)
    llm = learning_llm(tmp_path)
    kept = llm.decoder.drafter.learner
    with monkeypatch.context() as slow:
        slow.setattr(kept.recorder, "write", lambda answer: until(lambda: kept.dropped > 0))
        answers(llm)
    assert kept.dropped > 0
    kept.close()
