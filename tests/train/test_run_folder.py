"""A run's folder: one process at a time, and what a crash or a full disk left is reported, with what to remove."""

import json
import multiprocessing
import os
import shutil
import signal

import pytest
import torch

from paceline.errors import ConfigError
from paceline.train.config import read_config
from paceline.train.run_folder import only_run
from paceline.train.stages import Stages
from tests.cli.helpers import refusal, save
from tests.tiny import tiny_model
from tests.train.toy import with_one_engine

SETTINGS = """
dtype: float32
prepare: {max_tokens: 4}
train: {max_tokens: 64, epochs: 2, held_out: 0.3, checkpoint_seconds: 0}
eval: {limit: 1, max_tokens: 2, temperatures: [0]}
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("folders")
    save(base / "model", tiny_model("llama"))
    rows = [{"prompt": f"w{5 + i} w{7 + i}"} for i in range(8)]
    (base / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (base / "run.yaml").write_text(f"model: {base / 'model'}\nprompts: {base / 'prompts.jsonl'}{SETTINGS}")
    return base


def stages(base, out, *more):
    return with_one_engine(Stages("eagle", read_config(base / "run.yaml", [f"out={out}", *more])))


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """A finished run."""
    run = stages(base, tmp_path_factory.mktemp("whole"))
    for stage in ("prepare", "train", "eval"):
        list(run.run(stage))
    return run.out


@pytest.fixture
def copied(whole, tmp_path):
    """A copy of it, which began with the answers in it."""
    out = shutil.copytree(whole, tmp_path / "copy")
    (out / "train" / "data.json").write_text(json.dumps({str(out / "answers-0"): 8}))
    return out


@pytest.mark.parametrize("stage", ["prepare", "train", "eval"])
def test_a_second_run_in_the_same_folder_is_refused_at_once(stage, base, copied):
    with only_run(copied, "answers-0" if stage == "prepare" else "train"):
        with pytest.raises(ConfigError, match=r"another run is writing to.*another --out"):
            list(stages(base, copied).run(stage))
        assert "another run is writing" in refusal(
            "train", "eagle", stage, "--config", str(base / "run.yaml"), f"out={copied}"
        )
    assert list(stages(base, copied).run(stage))
    assert not list(copied.glob(".*.lock"))


def test_two_parts_are_written_side_by_side(base, tmp_path):
    first = stages(base, tmp_path, "prepare.part=[0,2]").run("prepare")
    next(first)
    list(stages(base, tmp_path, "prepare.part=[1,2]").run("prepare"))
    with pytest.raises(ConfigError, match="another run is writing"):
        list(stages(base, tmp_path, "prepare.part=[0,2]").run("prepare"))
    list(first)
    lines = [line for part in range(2) for line in (tmp_path / f"answers-{part}" / "answers.jsonl").open()]
    assert len(lines) == len(set(lines)) == 8


def _hold(folder, held):
    with only_run(folder, "train"):
        held.set()
        signal.pause()


def test_a_killed_process_holds_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    held = context.Event()
    process = context.Process(target=_hold, args=(tmp_path, held))
    process.start()
    assert held.wait(30)
    with pytest.raises(ConfigError, match="another run is writing"), only_run(tmp_path, "train"):
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with only_run(tmp_path, "train"):
        pass


def test_of_several_processes_the_first_holds_it(tmp_path, monkeypatch):
    with only_run(tmp_path, "train"):
        monkeypatch.setenv("RANK", "1")
        with only_run(tmp_path, "train"):
            pass


DAMAGED = [  # file, the stage that reads it
    ("answers-0/prepare.json", "prepare"),
    ("answers-0/prepare.json", "train"),
    ("answers-0/answers.jsonl", "prepare"),
    ("answers-0/answers.jsonl", "train"),
    ("answers-0/states-000000.safetensors", "train"),
    ("train/data.json", "train"),
    ("train/log.jsonl", "train"),
    ("train/checkpoint-00000002.pt", "train"),
]
BROKEN = {
    "empty": b"",
    "half": b'{"index": 1, "eve\n',
    "list": b"[]\n",
    "other keys": b'{"a": 1}\n',
    "deep": b"[" * 1000 + b"]" * 1000 + b"\n",
    "digits": b"1" * 5000 + b"\n",
    "bytes": b"\xff\xfe\n",
}
HARMLESS = {  # read as a record that says nothing
    ("answers-0/prepare.json", "train", "other keys"),
    ("answers-0/answers.jsonl", "prepare", "empty"),
    ("train/log.jsonl", "train", "empty"),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize(("file", "stage"), DAMAGED)
def test_what_is_damaged_is_reported_with_what_to_do(file, stage, broken, base, copied):
    shutil.rmtree(copied / "head")
    if "states" in file:
        for checkpoint in (copied / "train").glob("*.pt"):
            checkpoint.unlink()
    (copied / file).write_bytes(BROKEN[broken])
    run = stages(base, copied)
    if (file, stage, broken) in HARMLESS:
        list(run.run(stage))
        return
    with pytest.raises(ConfigError) as caught:
        list(run.run(stage))
    assert caught.value.fix


@pytest.mark.diagonal
@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize(("file", "stage"), [("training.json", "train"), ("config.json", "eval")])
def test_a_damaged_head_is_reported_with_what_to_remove(file, stage, broken, base, copied):
    (copied / "head" / file).write_bytes(BROKEN[broken])
    with pytest.raises(ConfigError, match="remove"):
        list(stages(base, copied).run(stage))


@pytest.mark.parametrize("key", ["identity", "trained", "optimizer", "random", "step", "window"])
def test_a_checkpoint_of_other_keys_is_reported(key, base, copied):
    shutil.rmtree(copied / "head")
    path = max((copied / "train").glob("checkpoint-*.pt"))
    state = torch.load(path, weights_only=True)
    for wrong in ({**state, key: "x"}, {name: value for name, value in state.items() if name != key}):
        torch.save(wrong, path)
        with pytest.raises(ConfigError, match="delete"):
            list(stages(base, copied).run("train"))


def test_a_token_that_the_target_does_not_have_is_told(base, copied):
    for name in ("head", "train"):
        shutil.rmtree(copied / name)
    path = copied / "answers-0" / "answers.jsonl"
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(first), "answer_ids": [10**9]}), *others]) + "\n")
    with pytest.raises(ConfigError, match=r"does not have.*1000000000"):
        list(stages(base, copied).run("train"))
    assert not (copied / "train").exists()


@pytest.mark.parametrize("stage", ["prepare", "train"])
def test_a_full_disk_leaves_no_half_file_and_the_run_goes_on(stage, base, whole, tmp_path, monkeypatch):
    if stage == "train":
        shutil.copytree(whole / "answers-0", tmp_path / "answers-0")
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            list(stages(base, tmp_path).run(stage))
    assert not [path for path in tmp_path.rglob("*.json") if not path.stat().st_size]
    assert list(stages(base, tmp_path).run(stage))
