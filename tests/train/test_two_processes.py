"""Two processes train as one does with twice the batches a step, and go on where they were."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.train.config import read_config
from paceline.train.stages import Stages
from tests.cli.helpers import save
from tests.tiny import tiny_model
from tests.train.toy import write_prompts

pytestmark = pytest.mark.more  # each run starts two processes
RUN = """
model: {base}/model
prompts: [{base}/prompts.jsonl]
out: {base}/answers
dtype: float32
prepare: {{max_tokens: 8, limit: 40, prompt_tokens: 9}}
head: {{draft_vocab_size: 64}}
train: {{max_tokens: 48, epochs: 2, held_out: 0.2, log_every: 1, checkpoint_seconds: 0, loss: {{steps: 2}}}}
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("run")
    save(base / "model", tiny_model("llama"))
    write_prompts(base, 40)
    (base / "run.yaml").write_text(RUN.format(base=base))
    list(Stages("eagle3", read_config(base / "run.yaml")).run("prepare"))
    return base


def changes(base: Path, out: str, *more: str) -> tuple[str, ...]:
    return f"out={base / out}", f"answers=[{base / 'answers' / 'answers-0'}]", *more


def in_two_processes(base: Path, out: str, *more: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "paceline",
               "train", "eagle3", "train", "--config", str(base / "run.yaml"), *changes(base, out, *more)]  # fmt: skip
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


@pytest.fixture(scope="module")
def together(base) -> Path:
    """What two processes made. Its last checkpoint but one lies between two lines of the log."""
    in_two_processes(base, "two", "train.log_every=4")
    return base / "two"


def losses(folder: Path) -> list[tuple[str, int, float]]:
    lines = map(json.loads, (folder / "train" / "log.jsonl").read_text().splitlines())
    return [(line["event"], line["step"], line["loss"]) for line in lines if "loss" in line]


def test_two_processes_train_as_one_with_as_many_batches_a_step(base, together):
    for out, *more in (["one", "train.accumulate=2"], ["halved"]):
        config = read_config(base / "run.yaml", changes(base, out, "train.log_every=4", *more))
        list(Stages("eagle3", config).run("train"))
    alone, in_two = losses(base / "one"), losses(together)
    assert [entry[:2] for entry in alone] == [entry[:2] for entry in in_two]
    assert len(alone) > 3
    assert [loss for *_, loss in in_two] == pytest.approx([loss for *_, loss in alone], rel=1e-5)
    assert len(losses(base / "halved")) > len(alone), "the mutant: as many batches a step as one process takes"


def test_they_go_on_with_the_same_bits(base, together):
    place, logged = together / "head", losses(together)
    weights = load_file(place / "model.safetensors")
    for file in place.iterdir():
        file.unlink()
    place.rmdir()
    *_, before, last = sorted((together / "train").glob("checkpoint-*.pt"))
    last.unlink()
    in_two_processes(base, "two", "train.log_every=4")
    assert last.exists(), f"it went on from {before.name}"
    assert losses(together) == logged
    again = load_file(place / "model.safetensors")
    assert all(torch.equal(again[name], weights[name]) for name in weights)
