"""SPACE by its stages: a full run up to its measurement, what it says of itself, and runs that may not be mixed."""

from pathlib import Path

import pytest
import torch

from paceline.errors import ConfigError, IncompatibleModels
from paceline.methods.heads.folder import head_info, load_head
from paceline.methods.space.adapter import SpaceConfig
from paceline.methods.space.recipe import SpaceLoss, SpaceRecipe, whole, with_factors
from paceline.target import load_model
from paceline.train.config import TrainConfig, read_config
from paceline.train.data import Answers
from paceline.train.models import linears_of
from paceline.train.stages import Stages
from tests.cli.helpers import answer, save
from tests.tiny import tiny_model
from tests.train.toy import check_resumed, finished, trained, write_answers, write_prompts

RUN = """
model: {base}/tiny
prompts: [{base}/prompts.jsonl]
out: {out}
dtype: float32
base_model: someone/tiny
prepare: {{max_tokens: 8, limit: 8, prompt_tokens: 9}}
head: {{num_masks: 2, rank: 2, transition_rank: 4}}
train: {{max_tokens: 96, epochs: 1, held_out: 0.3, loss: {{rows: 32, vocab_size: 64}}}}
eval: {{prompts: [{base}/prompts.jsonl], limit: 1, max_tokens: 4, temperatures: [0]}}
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("space")
    for name, model in (("tiny", "llama"), ("granite", "granite")):
        save(base / name, tiny_model(model))
    write_prompts(base)
    return base


def stages(base: Path, out: Path, *overrides: str) -> Stages:
    place = base / "run.yaml"
    place.write_text(RUN.format(base=base, out=out))
    return Stages("space", read_config(place, overrides))


@pytest.fixture(scope="module")
def full(base, tmp_path_factory):
    """A full run, trained; its card before it was measured."""
    out = tmp_path_factory.mktemp("full")
    run = stages(base, out, "head.mode=full")
    finished(run, "prepare", "train")
    return out, run, (out / "head" / "README.md").read_text()


def test_a_full_run_is_measured_against_the_model_it_made(base, full):
    out, run, card = full
    (measured,) = finished(run, "eval")
    assert measured.result["trials"][0]["result"]["mean_acceptance_length"] >= 1
    info = head_info(out / "head")
    assert info.target.fingerprint == load_model(str(out / "model"), "float32").fingerprint != run.target.fingerprint
    for text in (card, (out / "head" / "README.md").read_text()):
        assert "# tiny-tuned-space\n" in text
        assert "paceline generate model --chat 'Hello.' --drafter head:head\n" in text
        assert "a fine-tune of someone/tiny in the folder `model`" in text
    assert answer("check-draft", str(out / "head"), "--model", str(out / "model"), "--prompts",
                  str(base / "prompts.jsonl"), "--dtype", "float32", "--numerics", "fast")  # fmt: skip


def test_a_run_of_the_other_mode_is_refused(base, full):
    out, _, _ = full
    with pytest.raises(ConfigError, match=r"head.mode.*`train` and `model`"):
        finished(stages(base, out), "train")
    assert [event.was_there for event in finished(stages(base, out, "head.mode=full"), "train")] == [True]


def test_a_gated_run_beside_a_stale_model_is_measured_against_its_own_target(base, full, tmp_path):
    run = stages(base, tmp_path)
    finished(run, "prepare", "train")
    (tmp_path / "model").symlink_to(full[0] / "model")
    assert run._target_of(tmp_path / "head") is run.target
    (measured,) = finished(run, "eval")
    assert measured.result["trials"]
    (tmp_path / "head").rename(tmp_path / "old")
    with pytest.raises(ConfigError, match=r"head\.mode: 'full'"):  # the checkpoints are the gated run's
        finished(stages(base, tmp_path, "head.mode=full"), "train")
    with pytest.raises(ConfigError, match="start: '"):
        finished(stages(base, tmp_path, f"start={tmp_path / 'old'}"), "train")


def test_start(base, full, tmp_path):
    out, _, _ = full
    answers = f"answers=[{out / 'answers-0'}]"
    bare = f"start={out / 'head'}"
    assert load_head(out / "head").config.rank == 0
    (out / "answers-0" / "prepare.json").unlink(missing_ok=True)  # the model that wrote them is another
    for mode in ("head.mode=full", "head.lora=true"):
        run = stages(base, tmp_path / mode, f"model={out / 'model'}", answers, bare, mode)
        finished(run, "train")
        assert load_head(tmp_path / mode / "head").config.rank == (0 if mode == "head.mode=full" else 2)
    gated = f"start={tmp_path / 'head.lora=true' / 'head'}"
    model = f"model={out / 'model'}"
    with pytest.raises(ConfigError, match="cannot be used where every weight"):
        finished(stages(base, tmp_path / "a", model, answers, gated, "head={mode: full, lora: false}"), "train")
    with pytest.raises(ConfigError, match=r"head.num_masks: 3.*head.rank: 5"):
        finished(stages(base, tmp_path / "b", model, answers, gated, "head.num_masks=3", "head.rank=5"), "train")
    with pytest.raises(ConfigError, match="rank 0 train nothing"):
        finished(stages(base, tmp_path / "c", model, answers, "head.mode=full", "head.rank=0"), "train")


def test_a_transition_is_refused_at_once_where_logits_are_more_than_rows_times_states(base, tmp_path):
    model = f"model={base / 'granite'}"
    with pytest.raises(IncompatibleModels, match=r"logits_scaling.*head.transition_rank=0"):
        finished(stages(base, tmp_path, model), "prepare")
    assert not (tmp_path / "answers-0").exists()
    plainly = (model, "head.transition_rank=0", "train.loss.vocab_size=null")
    assert len(finished(stages(base, tmp_path, *plainly), "prepare", "train")) == 2


def small(gated: bool, lora: bool) -> SpaceRecipe:
    plain = tiny_model("llama").requires_grad_(False)
    linears, shapes = linears_of(plain, ())
    torch.manual_seed(1)
    config = SpaceConfig(32, 2, 97, 3, False, 4, linears, shapes, 4)
    ids = None if gated else torch.arange(0, 97, 2)
    return SpaceRecipe(
        (with_factors if lora else whole)(plain, config, None), gated, None, SpaceLoss("token", rows=32), ids
    )


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return Answers.read(write_answers(tmp_path_factory.mktemp("answers"), count=8))


CONFIG = TrainConfig(epochs=2, max_tokens=64, held_out=0.2, checkpoint_seconds=0.0, evaluate_every=3)


@pytest.mark.parametrize(("gated", "lora"), [(True, True), (False, True), (False, False)])
def test_resumed_run_has_the_same_bits(answers, tmp_path, gated, lora):
    check_resumed(lambda: small(gated, lora), answers, CONFIG, tmp_path)


def test_output_rows_are_compared_as_they_are_while_every_weight_is_trained(answers, tmp_path):
    made = small(gated=False, lora=False)
    trained(made, answers, CONFIG, tmp_path)
    head = made._plain.get_output_embeddings().weight
    assert not torch.equal(head, tiny_model("llama").get_output_embeddings().weight)
    assert torch.equal(made._rows(), head[::2])


def test_nothing_is_asked_of_linear_layers_without_factors():
    plain = tiny_model("gpt2").requires_grad_(False)
    made = with_factors(plain, SpaceConfig(32, 2, 97, 3), None)
    assert not len(made.adapter.layers)
    with pytest.raises(ConfigError, match="transition_rank"):
        SpaceConfig(32, 2, 97, 3, transition_rank=-1)
