"""A whole run on a tiny model, from prompts to a measured head, by the command line; and what each stage refuses."""

import json
from dataclasses import replace

import pytest
import torch

from paceline.errors import ConfigError, IncompatibleModels
from paceline.methods.heads.folder import load_head, save_head
from paceline.methods.heads.info import head_info, read_record
from paceline.target import wrap_model
from paceline.train.artefact import without_folders
from paceline.train.config import read_config
from paceline.train.data import Answers
from paceline.train.log import Started
from paceline.train.stages import Done, Preparing, Stages
from tests.cli.helpers import answer, paceline, refusal, save
from tests.methods.heads import random_head
from tests.tiny import tiny_model
from tests.train.toy import finished

RUN = """
model: {model}
prompts: [{prompts}]
out: {out}
dtype: float32
prepare: {{max_tokens: 8, limit: 20, prompt_tokens: 9}}
head: {{draft_vocab_size: 64}}
train: {{max_tokens: 96, epochs: 2, held_out: 0.3}}
eval: {{prompts: [{prompts}], limit: 2, max_tokens: 6, temperatures: [0]}}
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("run")
    save(base / "model", tiny_model("llama"))
    lengths = [2 + i % 7 for i in range(18)] + [30, 30]
    prompts = [" ".join(f"w{5 + (7 * i + 3 * j) % 90}" for j in range(n)) for i, n in enumerate(lengths)]
    (base / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p, "source": "s"}) + "\n" for p in prompts))
    return base


def config_of(base, out, **changes):
    text = RUN.format(model=base / "model", prompts=base / "prompts.jsonl", out=out)
    (base / "run.yaml").write_text(text)
    return base / "run.yaml"


def test_whole_run(base, tmp_path):
    got = answer("train", "eagle3", "--config", str(config_of(base, tmp_path)))
    assert got["prepare"]["answers"] == 18
    assert got["prepare"]["skipped"] == 2, "too long"
    assert len(Answers.read(tmp_path / "answers-0")) == 18
    training = len(Answers.read(tmp_path / "answers-0").split(0.3)[0])
    assert head_info(tmp_path / "head").method == "eagle3"
    record = read_record(tmp_path / "head")
    assert record["data"]["answers"] == training
    assert record["acceptance"][0]["result"]["mean_acceptance_length"] >= 1
    assert str(base) not in json.dumps({**record, "provenance": None}), "no paths of this machine"
    assert "acceptance length" in (tmp_path / "head" / "README.md").read_text()
    assert json.loads((tmp_path / "eval.json").read_text())[0]["result"]["answers"]
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    checked = answer("check-draft", str(tmp_path / "head"), "--model", str(base / "model"), "--prompts",
                     str(base / "prompts.jsonl"), "--dtype", "float32", "--numerics", "fast")  # fmt: skip
    assert checked


@pytest.mark.parametrize("method", ["eagle", "medusa", "blockwise", "mtp", "dflash", "dspark"])
def test_every_method(base, tmp_path, method):
    stages = Stages(method, read_config(config_of(base, tmp_path), ("prepare.states=online", "prepare.limit=8")))
    names = ["prepare", "train", "eval"]
    assert [event.stage for event in finished(stages, *names)] == names
    assert head_info(tmp_path / "head").method == method
    assert not Answers.read(tmp_path / "answers-0").has_states


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_another_draft_vocabulary_for_a_head_that_is_there(base, tmp_path, method):
    first = read_config(config_of(base, tmp_path / "first"), ("prepare.limit=8", "train.prompts=true"))
    finished(Stages(method, first), "prepare", "train")
    old = tmp_path / "first" / "head"
    more = f"start={old}", f"answers=[{tmp_path / 'first' / 'answers-0'}]", "train.lr=1e-12"
    for shape, size in (({}, 64), ({"draft_vocab_size": 20}, 20)):
        out = tmp_path / str(size)
        list(Stages(method, replace(read_config(config_of(base, out), more), head=shape)).run("train"))
        heads = [load_head(str(folder), wrap_model(tiny_model("llama"))) for folder in (old, out / "head")]
        assert len(heads[1].draft_ids) == size
        weights = [{k: v for k, v in head.state_dict().items() if k != "draft_ids"} for head in heads]
        assert all(torch.allclose(weights[0][key], weights[1][key], atol=1e-2) for key in weights[0])


def test_a_peagle_head_begins_as_an_eagle3_head(base, tmp_path):
    """Its masks begin as the mean of the states, and learn."""
    first = read_config(config_of(base, tmp_path / "first"), ("prepare.limit=8",))
    finished(Stages("eagle3", first), "prepare", "train")
    old = tmp_path / "first" / "head"
    answers = f"answers=[{tmp_path / 'first' / 'answers-0'}]"
    for lr, learnt in (("1e-12", False), ("1e-2", True)):
        more = f"start={old}", answers, f"train.lr={lr}", "head.num_speculative_tokens=3"
        stages = Stages("peagle", read_config(config_of(base, tmp_path / lr), more))
        list(stages.run("train"))
        head, before = (
            load_head(str(folder), wrap_model(tiny_model("llama"))) for folder in (tmp_path / lr / "head", old)
        )
        assert (head.config.method, head.config.num_speculative_tokens) == ("peagle", 3)
        assert torch.allclose(head.fc.weight, before.fc.weight, atol=1e-2) != learnt
        assert bool(head.mask_hidden.any())
    assert any(isinstance(event, Done) for event in stages.run("eval"))
    with pytest.raises(ConfigError, match="eagle3"):
        Stages(
            "eagle3", read_config(config_of(base, tmp_path / "x"), (f"start={tmp_path / lr / 'head'}", answers))
        ).check()


def test_a_jetspec_head_begins_as_a_dflash_head(base, tmp_path):
    """It drafts with the same weights before it learns, in blocks of another size."""
    first = read_config(config_of(base, tmp_path / "first"), ("prepare.limit=8", "head.block_size=4"))
    finished(Stages("dflash", first), "prepare", "train")
    old = tmp_path / "first" / "head"
    for lr, learnt in (("1e-12", False), ("1e-2", True)):
        more = f"start={old}", f"answers=[{tmp_path / 'first' / 'answers-0'}]", f"train.lr={lr}", "head.block_size=6"
        stages = Stages("jetspec", read_config(config_of(base, tmp_path / lr), more))
        list(stages.run("train"))
        head, before = (
            load_head(str(folder), wrap_model(tiny_model("llama"))) for folder in (tmp_path / lr / "head", old)
        )
        assert head.config == replace(before.config, causal=True, block_size=6)
        assert torch.allclose(head.fc.weight, before.fc.weight, atol=1e-2) != learnt
    assert any(isinstance(event, Done) for event in stages.run("eval"))


def test_a_head_of_another_target_may_be_the_start(base, tmp_path):
    """If its sizes are the same."""
    for name, changes in (("same", {"seed": 1}), ("wider", {"hidden_size": 64})):
        target = wrap_model(tiny_model("llama", **changes), name=name)
        save_head(tmp_path / name, random_head(target, 3), target, {})
    start = f"start={tmp_path / 'same'}", "prepare.limit=8", "head.draft_vocab_size=60"
    stages = Stages("eagle3", read_config(config_of(base, tmp_path / "out"), start))
    list(stages.run("prepare"))
    list(stages.run("train"))
    assert head_info(tmp_path / "out" / "head").target.fingerprint == stages.llm.loaded.fingerprint
    for method, changes, named in (
        ("medusa", start[1:], "method: 'medusa', start: None"), ("eagle3", start[1:], "start: None"),
    ):  # fmt: skip
        other = Stages(method, read_config(config_of(base, tmp_path / "out"), changes))
        with pytest.raises(ConfigError, match=rf"other settings\. Got: {named}\. Expected: "):
            list(other.run("train"))
    wider = read_config(config_of(base, tmp_path / "refused"), (f"start={tmp_path / 'wider'}",))
    with pytest.raises(IncompatibleModels, match="hidden size 64"):
        list(Stages("eagle3", wider).run("prepare"))


@pytest.mark.parametrize(
    ("word", "kept"),
    [
        ("/usr/bin/paceline", "paceline"),
        ("start=/tmp/runs/head", "start=head"),
        ("prompts=[/a/b.jsonl, /c/d.jsonl,e/f.jsonl]", "prompts=[b.jsonl, d.jsonl,e/f.jsonl]"),
        ("model=org/name", "model=org/name"),
        ("train.lr=1e-3", "train.lr=1e-3"),
    ],
)
def test_a_record_names_no_folders_of_this_machine(word, kept):
    assert without_folders(word) == kept


def test_few_answers_are_warned_of_before_they_are_written(base, tmp_path, monkeypatch):
    config = str(config_of(base, tmp_path))
    told = paceline("train", "medusa", "prepare", "--config", config).stderr
    assert told.count("Few answers: 18 prompts, whose answers have at most 144 tokens.") == 1
    found = Answers.read(tmp_path / "answers-0").split(0.3)[0]
    told = paceline("train", "medusa", "train", "--config", config).stderr
    assert f"Few answers: {len(found)} answers with {found.num_tokens} tokens. Below 100,000" in told
    monkeypatch.setattr("paceline.train.data.FEW_TOKENS", found.num_tokens)
    out = tmp_path / "more"
    more = paceline(
        "train", "medusa", "train", "--config", config, "--prepared", str(tmp_path / "answers-0"), "-o", str(out)
    )
    assert "Few answers" not in more.stderr


def test_stages_go_on_where_they_were(base, tmp_path, monkeypatch):
    run = read_config(config_of(base, tmp_path), ("train.checkpoint_seconds=0",))
    stages = Stages("eagle", run)
    for event in stages.run("prepare"):
        assert isinstance(event, Preparing | Done)
    for event in stages.run("train"):
        if getattr(event, "step", 0) == 2:
            break
    whole = (tmp_path / "answers-0" / "answers.jsonl").read_text()
    (tmp_path / "answers-0" / "answers.jsonl").write_text(whole + whole.splitlines()[0] + "\n")  # written meanwhile
    started = [event for event in stages.run("train") if isinstance(event, Started)]
    assert started[0].resumed
    assert [event.was_there for event in finished(stages, "train")] == [True]
    measured = list(stages.run("eval"))
    monkeypatch.setattr("paceline.train.measure.run_trial", None)  # nothing is measured twice
    assert list(stages.run("eval")) == measured


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("head.seed=1", r"head\.seed: 1"),
        ("head.num_heads=2", r"head\.num_heads: 2"),
        ("train.loss.decay=0.5", r"train\.loss\.decay: 0\.5"),
    ],
)
def test_a_run_that_was_stopped_goes_on_with_its_own_settings_alone(base, tmp_path, change, named):
    """A setting that it has by default may be written down meanwhile."""
    config = config_of(base, tmp_path)
    stages = Stages("medusa", read_config(config, ("train.checkpoint_seconds=0",)))
    finished(stages, "prepare")
    for event in stages.run("train"):
        if getattr(event, "step", 0) == 1:
            break
    other = Stages("medusa", read_config(config, (change,)))
    with pytest.raises(ConfigError, match=rf"other settings\. Got: {named}.* Expected: "):
        finished(other, "train")
    same = Stages("medusa", read_config(config, ("head.num_heads=4", "train.loss.name=ce")))
    assert next(event for event in same.run("train") if isinstance(event, Started)).resumed


def test_what_is_refused(base, tmp_path):
    config = str(config_of(base, tmp_path))
    assert "no answers" in refusal("train", "eagle", "train", "--config", config)
    assert "no head" in refusal("train", "eagle", "eval", "--config", config)
    assert "head: unknown key 'size'" in refusal("train", "eagle3", "prepare", "--config", config, "head.size=3")
    assert "prepare.part" in refusal("train", "eagle", "prepare", "--config", config, "prepare.part=[2,2]")
    assert "did you mean 'epochs'" in refusal("train", "eagle", "--config", config, "train.epoch=3")
    assert "is not a stage" in refusal("train", "eagle", "predict", "--config", config, code=2)
    (tmp_path / "bad.jsonl").write_text('{"words": "x"}\n')
    assert "no prompt" in refusal("train", "eagle", "prepare", "--config", config, f"prompts={tmp_path / 'bad.jsonl'}")


def test_a_dspark_head_begins_as_a_dflash_head(base, tmp_path):
    """Until the Markov head has learnt, it drafts the same; `frozen` keeps the block as it was."""
    shape = {"block_size": 4, "markov_rank": 8}
    first = read_config(config_of(base, tmp_path / "first"), ("prepare.limit=8", "head.block_size=4"))
    finished(Stages("dflash", first), "prepare", "train")
    old = tmp_path / "first" / "head"
    more = f"start={old}", f"answers=[{tmp_path / 'first' / 'answers-0'}]", "train.lr=1e-2", "train.loss.frozen=true"
    list(Stages("dspark", replace(read_config(config_of(base, tmp_path / "new"), more), head=shape)).run("train"))
    before, head = (
        load_head(str(folder), wrap_model(tiny_model("llama"))) for folder in (old, tmp_path / "new" / "head")
    )
    assert (head.config.method, head.config.block_size) == ("dspark", 4)
    assert torch.equal(head.fc.weight, before.fc.weight)
    assert bool(head.markov_head.markov_w2.weight.any())
    (tables,) = [head.attach(*[wrap_model(tiny_model("llama")).embeddings] * 2).folded()]
    stored = save_head(tmp_path / "tables", tables, wrap_model(tiny_model("llama")), {})
    for start, message in ((f"start={stored}", "does not learn further"), ("train.epochs=1", "fresh block")):
        no = read_config(config_of(base, tmp_path / "no"), (start, *more[1:]))
        with pytest.raises(ConfigError, match=message):
            list(Stages("dspark", replace(no, head=shape)).run("train"))
