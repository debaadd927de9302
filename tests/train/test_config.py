"""Configurations: few keys are needed, and none is misread in silence."""

import os

import pytest

from paceline.errors import ConfigError
from paceline.train.config import PrepareSection, TrainConfig, read_config
from paceline.train.log import accepted_length

NEEDED = ("model=m", "out=o", "prompts=[a.jsonl]")


def test_three_keys_are_enough(tmp_path):
    (tmp_path / "run.yaml").write_text("model: smollm2-135m\nprompts: [a.jsonl]\nout: runs/x\n")
    run = read_config(tmp_path / "run.yaml")
    assert (run.model, run.prompts, run.out) == ("smollm2-135m", (str(tmp_path / "a.jsonl"),), "runs/x")
    assert (run.train.lr, run.train.epochs, run.train.clip) == (6e-4, 5, 0.5)
    assert run == read_config(None, ("model=smollm2-135m", f"prompts={tmp_path}/a.jsonl", "out=runs/x"))


def test_prompts_lie_beside_the_file_that_names_them(tmp_path):
    (tmp_path / "run.yaml").write_text("model: m\nprompts: a.jsonl\nout: o\neval: {prompts: [b.jsonl, /c.jsonl]}\n")
    run = read_config(tmp_path / "run.yaml", ("prompts=d.jsonl",))
    assert (run.prompts, run.eval.prompts) == (("d.jsonl",), (str(tmp_path / "b.jsonl"), "/c.jsonl"))
    assert read_config(tmp_path / "run.yaml").prompts == (str(tmp_path / "a.jsonl"),)


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
    ("override", "got"),
    [
        ("train.learning=1", r"unknown key 'train.learning'"),
        ("train.epoch=3", r"did you mean 'epochs'"),
        ("modl=x", r"did you mean 'model'"),
        ("prepare.state=x", r"did you mean 'states'"),
        ("train.epochs=2.5", r"train.epochs.*2.5.*integer"),
        ("train.epochs=true", r"train.epochs.*integer"),
        ("train.lr=fast", r"train.lr.*a valid number"),
        ("train.lr=-1", r"train.lr.*greater than 0"),
        ("train.held_out=1", r"train.held_out.*less than 1"),
        ("prepare.states=disk", r"'store' or 'online'"),
        ("prepare.mix=3", r"prepare.mix.*an object"),
        ("prepare=3", r"prepare .*an object"),
        ("model.x=3", r"goes below 'model'"),
        ("train.lr", r"cannot be read.*key=value"),
        ("train.lr=[", r"not YAML"),
        ("prompts=[3]", r"prompts.0.*string"),
        ('prompts="\\0"', r"prompts.0"),
        ('out="\\ud800"', r"surrogate|hex escape"),
        ("out=", r"out.*None.*string"),
        ("train.seed=9223372036854775808", r"train.seed.*less than"),
        ("prepare.seed=-1", r"prepare.seed"),
        ("train.limit=-1", r"train.limit.*-1"),
        ("train.limit=0", r"train.limit"),
        ("train.checkpoint_seconds=.nan", r"train.checkpoint_seconds.*finite"),
        ("train.lr=1e999", r"train.lr.*finite"),
        ("train.evaluate_every=0", r"train.evaluate_every"),
        ("prepare.limit=-1", r"prepare.limit"),
        ("prepare.max_tokens=99999999999", r"prepare.max_tokens"),
        ("prepare.temperatures=[]", r"prepare.temperatures"),
        ("prepare.mix={a: 0}", r"prepare.mix.*greater than 0"),
        ("prepare.part=[3,2]", r"prepare.part.*0 <= i < n"),
        ("eval.limit=-1", r"eval.limit"),
        ("eval.temperatures=[]", r"eval.temperatures"),
        ("eval.depth=0", r"eval.depth"),
        ("eval.drafter={model: x}", r"eval.drafter.*model"),
        ("out=2020-01-01", r"'out' is not YAML.*timestamp.*quotes"),
        ("out=!!binary aGk=", r"not YAML.*binary"),
        ("head={a: 1, a: 2}", r"not YAML.*twice"),
        ("head=&a [1, *a]", r"not YAML.*alias"),
        ("head=" + "[" * 2000 + "]" * 2000, r"not YAML.*levels"),
        ("train.seed=" + "1" * 5000, r"not YAML.*digits"),
        ("out=\udcff", r"not YAML"),
    ],
)
def test_mistakes_are_reported(override, got):
    with pytest.raises(ConfigError, match=got):
        read_config(None, (*NEEDED, override))


def test_missing_key_and_file(tmp_path):
    with pytest.raises(ConfigError, match="no 'out'"):
        read_config(None, ("model=m",))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="not a YAML mapping"):
        read_config(tmp_path / "list.yaml")


def test_yaml_that_explodes_is_one_error(tmp_path):
    """Nine levels of nine aliases each mean 400 million values."""
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    (tmp_path / "run.yaml").write_text("\n".join(["a0: &a0 x", *levels]))
    with pytest.raises(ConfigError, match="alias"):
        read_config(tmp_path / "run.yaml")


@pytest.mark.parametrize("name", ["/dev/zero", "fifo"])
@pytest.mark.timeout(20)
def test_a_configuration_that_never_ends_is_refused(name, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="regular file"):
        read_config(tmp_path / name)


@pytest.mark.parametrize(("kind", "wrong"), [(PrepareSection, {"limit": 0}), (TrainConfig, {"lr": "1"})])
def test_sections_are_checked_in_python_too(kind, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        kind(**wrong)


def test_accepted_length():
    """1 + a1 + a1 a2 + ..., which is the mean of a run of successes plus one."""
    assert accepted_length([]) == 1
    assert accepted_length([0.5, 0.5]) == 1.75
    assert accepted_length([0.0, 1.0]) == 1
    assert accepted_length([1.0] * 5) == 6
