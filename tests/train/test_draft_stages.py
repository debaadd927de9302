"""QAT and distillation by their stages and commands: what is written drafts, is measured, and fits its target alone."""

import pytest
import torch
from safetensors.torch import load_file

from paceline import LLM, SelfQuantized
from paceline.config import parse
from paceline.errors import ConfigError, IncompatibleModels
from paceline.methods.draft_model.recipe import DistillLoss, DistillRecipe, fewer_layers
from paceline.methods.heads.folder import head_info, load_head, read_record
from paceline.methods.self_int4.recipe import QatLoss, QatRecipe, QatShape, faked
from paceline.train.config import TrainConfig, read_config
from paceline.train.data import Answers
from paceline.train.stages import Stages
from tests.cli.helpers import answer, paceline, refusal, save
from tests.tiny import tiny_model
from tests.train.toy import check_resumed, finished, write_answers, write_prompts

RUN = """
model: {base}/tiny
prompts: [{base}/prompts.jsonl]
out: {out}
dtype: float32
prepare: {{max_tokens: 8, limit: 8, prompt_tokens: 9}}
train: {{max_tokens: 96, epochs: 1, held_out: 0.3, loss: {{window: 3}}}}
eval: {{prompts: [{base}/prompts.jsonl], limit: 1, max_tokens: 4, temperatures: [0]}}
"""
METHODS = {"qat": "head.bits=3", "distill": "head.num_layers=1"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("drafts")
    for name, seed in (("tiny", 0), ("other", 1)):
        save(base / name, tiny_model("llama", seed=seed))
    write_prompts(base)
    return base


@pytest.fixture(scope="module", params=METHODS)
def made(base, tmp_path_factory, request):
    """A run of each method, from its prompts to its measurement."""
    out = tmp_path_factory.mktemp(request.param)
    (base / "run.yaml").write_text(RUN.format(base=base, out=out))
    run = Stages(request.param, read_config(base / "run.yaml", [METHODS[request.param]]))
    return request.param, out, run, finished(run, "prepare", "train", "eval")


def test_a_run_writes_a_draft_with_its_measurement(base, made):
    method, out, _run, done = made
    assert [one.path.name for one in done] == ["answers-0", "draft", "eval.json"]
    record = read_record(out / "draft")
    assert 0 < record["training"]["held-out 1 - TV"] <= 1
    assert 0 <= record["training"]["held-out greedy agreement with the target"] <= 1
    assert record["acceptance"][0]["result"]["mean_acceptance_length"] >= 1
    card = (out / "draft" / "README.md").read_text()
    assert ("--drafter self-int4:" if method == "qat" else "--drafter model:draft") in card
    assert "mean acceptance length" in card
    assert str(base) not in card


def test_it_drafts_as_recorded(base, made):
    _, out, _, _ = made
    got = answer("check-draft", str(out / "draft"), "--model", str(base / "tiny"), "--prompts",
                  str(base / "prompts.jsonl"), "--dtype", "float32")  # fmt: skip
    assert got["passed"]
    assert got["trials"][0]["identical"]


def test_it_is_used_by_its_short_name(base, made):
    method, out, _, _ = made
    kind = "self-int4" if method == "qat" else "model"
    common = ("generate", str(base / "tiny"), "--prompt", "w5 w9 w5 w9", "--max-tokens", "12", "--dtype", "float32")
    plain = answer(*common, "--drafter", "none")
    drafted = answer(*common, "--drafter", f"{kind}:{out / 'draft'}")
    assert drafted["text"] == plain["text"]


def test_weights_fit_their_own_target_alone(base, made):
    method, out, _, _ = made
    if method != "qat":
        return
    with pytest.raises(IncompatibleModels, match="trained for another model"):
        LLM(str(base / "other"), dtype="float32", drafter=SelfQuantized(weights=out / "draft"))
    info = head_info(out / "draft")
    assert (info.method, info.config.bits, info.config.group_size) == ("self_int4", 3, 32)
    config = parse(f"self-int4:{out / 'draft'}")
    assert parse(f"head:{out / 'draft'}") == config == parse(config.as_dict())
    assert config.models == ()
    assert config.name == f"self-int4:{out / 'draft'}"
    with pytest.raises(ConfigError, match="group_size"):
        parse({"method": "self_int4", "model": str(out / "draft"), "group_size": 64})
    draft = load_head(out / "draft")
    codes = [b for name, b in draft.state_dict().items() if name.endswith("planes")]
    assert sum(b.nbytes for b in codes) == sum(o * i for o, i in info.config.shapes) * 2 * 3 // 8
    assert all(t.dtype in (torch.uint8, torch.int16) for t in load_file(out / "draft" / "model.safetensors").values())


def test_prepared_answers_take_the_place_of_the_first_stage(base, made, tmp_path):
    method, out, _, _ = made
    got = answer("train", method, "--target", str(base / "tiny"), "--prepared", str(out / "answers-0"), "--out",
                  str(tmp_path / "run"), METHODS[method], "dtype=float32", "train.epochs=1", "train.max_tokens=96",
                  "eval.limit=1", "eval.max_tokens=2", "eval.temperatures=[0]")  # fmt: skip
    assert set(got) == {"method", "out", "train", "eval"}
    assert (tmp_path / "run" / "draft" / "config.json").exists()
    assert "self-int4:" in paceline("train", "--help").stdout
    other = refusal("train", method, "train", "--target", str(base / "other"), "--prepared", str(out / "answers-0"),
                    "--out", str(tmp_path / "second"))  # fmt: skip
    assert "written by another model" in other


def test_a_finished_draft_is_done_for_the_same_run_alone(base, made, tmp_path):
    """Not for other settings, another target under whatever name, or other answers."""
    method, out, _, _ = made
    (tmp_path / "run.yaml").write_text(RUN.format(base=base, out=out))
    other = tmp_path / "tiny"
    save(other, tiny_model("llama", seed=1))

    def again(*changes: str):
        config = read_config(tmp_path / "run.yaml", [METHODS[method], *changes])
        return [event.was_there for event in finished(Stages(method, config), "train")]

    assert again() == again("eval.limit=2") == again("train.log_every=3", "train.checkpoint_seconds=1") == [True]
    assert again(f"answers=[{out / 'answers-0'}]") == [True]
    for change, named in {
        "train.epochs=2": r"train\.epochs", f"model={other}": "model", f"answers=[{tmp_path}]": "answers",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=rf"other settings(.|\n)*Got: {named}(.|\n)*another out"):
            again(change)


def test_what_a_method_does_not_know_is_refused(base, made):
    method, out, _, _ = made
    for key in ("head.rank=3", "train.loss.rows=1", "head.start=none", "start=somewhere"):
        run = Stages(method, read_config(base / "run.yaml", [key, f"out={out / 'refused'}",
                                                             f"answers=[{out / 'answers-0'}]"]))  # fmt: skip
        with pytest.raises(ConfigError):
            list(run.run("train"))


CONFIG = TrainConfig(epochs=2, max_tokens=64, held_out=0.2, checkpoint_seconds=0.0, evaluate_every=3)


def small(method: str) -> QatRecipe | DistillRecipe:
    plain = tiny_model("llama").requires_grad_(False)
    if method == "qat":
        return QatRecipe(plain, *faked(plain, QatShape(bits=2)), QatLoss())
    draft = fewer_layers(plain, 1, "first").requires_grad_(True)
    return DistillRecipe(plain, draft, DistillLoss(on_policy=0.5, rounds=2))


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_was_stopped_ends_with_the_same_bits(method, tmp_path):
    answers = Answers.read(write_answers(tmp_path / "answers", count=8, layers=()))
    check_resumed(lambda: small(method), answers, CONFIG, tmp_path)
