"""Configurations: few keys are needed, and none is misread in silence."""

import pytest

from paceline.errors import ConfigError
from paceline.train.config import read_config
from paceline.train.estimate import Cost, accepted_length

NEEDED = ("model=m", "out=o", "prompts=[a.jsonl]")


def test_three_keys_are_enough(tmp_path):
    (tmp_path / "run.yaml").write_text("model: smollm2-135m\nprompts: [a.jsonl]\nout: runs/x\n")
    run = read_config(tmp_path / "run.yaml")
    assert (run.model, run.prompts, run.out) == ("smollm2-135m", ("a.jsonl",), "runs/x")
    assert (run.train.lr, run.train.epochs, run.train.clip) == (6e-4, 5, 0.5)
    assert run == read_config(None, ("model=smollm2-135m", "prompts=a.jsonl", "out=runs/x"))


def test_overrides():
    run = read_config(
        None,
        (*NEEDED, "train.lr=1e-3", "train.limit=7", "prepare.mix.gsm8k=0.5", "head.steps=3", "train.loss.name=kl",
         "prepare.temperatures=[0, 0.7]", "prepare.part=[1,2]", "train.limit=null", "dtype=float32"),
    )  # fmt: skip
    assert run.train.lr == 1e-3
    assert run.train.limit is None
    assert run.prepare.mix == {"gsm8k": 0.5}
    assert run.prepare.temperatures == (0.0, 0.7)
    assert run.prepare.part == (1, 2)
    assert run.head == {"steps": 3}
    assert run.train.loss == {"name": "kl"}
    assert run.dtype == "float32"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.learning=1", r"unknown key 'train.learning'"),
        ("train.epoch=3", r"did you mean 'train.epochs'"),
        ("modl=x", r"did you mean 'model'"),
        ("prepare.state=x", r"did you mean 'prepare.states'"),
        ("train.epochs=2.5", r"train.epochs.*2.5.*whole number"),
        ("train.epochs=true", r"train.epochs.*whole number"),
        ("train.lr=fast", r"train.lr.*a number"),
        ("train.lr=-1", r"train.lr.*above 0"),
        ("train.held_out=1", r"train.held_out.*below 1"),
        ("train.fractions=[0.5, 2]", r"train.fractions"),
        ("prepare.states=disk", r"one of store, online"),
        ("prepare.mix=3", r"prepare.mix.*a mapping"),
        ("prepare=3", r"prepare.*a mapping"),
        ("model.x=3", r"goes below 'model'"),
        ("train.lr", r"cannot be read.*key=value"),
        ("train.lr=[", r"not YAML"),
        ("prompts=[3]", r"prompts.*text"),
    ],
)
def test_mistakes_are_told(override, told):
    with pytest.raises(ConfigError, match=told):
        read_config(None, (*NEEDED, override))


def test_missing_key_and_file(tmp_path):
    with pytest.raises(ConfigError, match="no 'out'"):
        read_config(None, ("model=m",))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="not a YAML mapping"):
        read_config(tmp_path / "list.yaml")


def test_accepted_length():
    """1 + a1 + a1 a2 + ..., which is the mean of a run of successes plus one."""
    assert accepted_length([]) == 1
    assert accepted_length([0.5, 0.5]) == 1.75
    assert accepted_length([0.0, 1.0]) == 1
    assert accepted_length([1.0] * 5) == 6


def test_cost_is_told_in_words():
    cost = Cost(columns=2_000_000, flops=2e6 * 150e6, flops_per_s=50e9)
    assert cost.seconds == 6000
    assert str(cost) == "2.00 M tokens x 150.0 MFLOP at 50.0 GFLOP/s: about 1 h 40 min"
