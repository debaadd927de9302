"""What a head should draft: the first measurement of a published one is kept, and far less is warned about."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from paceline.measure.expected import FAR, is_far_below
from paceline.measure.trials import AcceptanceCounts, AnswerCounts, TrialCheck
from paceline.methods.eagle.head import EagleConfig, EagleHead
from paceline.methods.heads.exchange import export_head
from paceline.methods.heads.folder import save_head
from paceline.target import load_model
from tests.cli.helpers import answer, paceline, refusal, save
from tests.helpers import VOCAB
from tests.tiny import tiny_model

IDS, LAYERS = (0, 2, 3), 5


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    """It often repeats its last token. Only its third layer changes anything: states 0 to 2 are the same."""
    model = tiny_model("llama", num_hidden_layers=LAYERS, tie_word_embeddings=True)
    for index, layer in enumerate(model.model.layers):
        for parameter in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            torch.nn.init.normal_(parameter, std=0.1 if index == 2 else 0.0)
    return save(tmp_path_factory.mktemp("target"), model)


@pytest.fixture(scope="module")
def exported(target, tmp_path_factory) -> Path:
    """A head that says what the target says, if the first two states that it reads are the same."""
    place, loaded = tmp_path_factory.mktemp("heads"), load_model(target)
    head = EagleHead(EagleConfig(32, IDS, VOCAB, VOCAB, 48, 4, 2, 8, 3, 32))
    for name, parameter in head.named_parameters():
        torch.nn.init.constant_(parameter, float(name.endswith("norm.weight")))
    with torch.no_grad():
        head.fc.weight.copy_(torch.cat([-64 * torch.eye(32), 64 * torch.eye(32), torch.eye(32)], 1))
    save_head(place / "ours", head, loaded, {})
    return export_head(place / "ours", "vllm", place / "theirs", loaded).folder


@pytest.fixture
def head(exported, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return shutil.copytree(exported, tmp_path / "theirs")


def shift(head: Path, by: int) -> None:
    """The mutant: config.json names the layers before or after."""
    config = json.loads((head / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [state + by for state in IDS]
    (head / "config.json").write_text(json.dumps(config))


def test_a_head_with_shifted_layer_ids_is_warned_about(head, target):
    assert "--model" in refusal("check-draft", str(head))
    first = answer("check-draft", str(head), "--model", target)["first"]["result"]["mean_acceptance_length"]
    assert first > 2
    again = answer("check-draft", str(head), "--model", target)
    assert again["trials"][0]["identical"]
    assert again["warnings"] == []
    assert f"drafts {first:.2f} tokens a pass, {first:.2f} in its record" in _doctor(head, target)
    shift(head, 1)
    told = answer("check-draft", str(head), "--model", target, code=1)
    assert told["trials"][0]["measured"]["mean_acceptance_length"] < 1 + FAR * (first - 1)
    assert "far below" in told["warnings"][0]
    assert "off by one: from states [0, 2, 3] in place of [1, 3, 4]" in told["warnings"][-1]
    assert "off by one" in paceline("check-draft", str(head), "--model", target).stdout.replace("\n", " ")
    assert "off by one: from states [0, 2, 3]" in _doctor(head, target)


def _doctor(head: Path, target: str) -> str:
    findings = answer("doctor", target, "--head", str(head), "--max-model-len", "256")["findings"]
    return " ".join(findings)


def test_the_first_measurement_of_doctor_is_kept(head, target):
    assert "this is kept" in _doctor(head, target)
    assert "in its record" in _doctor(head, target)


def test_another_tokenizer_is_named(head, target, tmp_path):
    answer("check-draft", str(head), "--model", target)
    (file,) = (tmp_path / "cache" / "acceptance").iterdir()
    trial = json.loads(file.read_text())
    trial["setting"]["greeting as tokens"] = "0" * 12
    for one in trial["result"]["answers"]:
        one["rounds"] = max(1, one["rounds"] // 4)
        one["accepted"] = [min(count, one["rounds"]) for count in one["accepted"]]
    counts = AcceptanceCounts(tuple(AnswerCounts(**one) for one in trial["result"]["answers"]))
    file.write_text(json.dumps(trial | {"result": counts.as_dict()}))
    told = answer("check-draft", str(head), "--model", target, code=1)
    assert any("chat template is another" in line for line in told["warnings"])


@pytest.mark.parametrize(("rounds", "is_far"), [(10, False), (11, False), (13, True), (20, True)])
def test_far_is_less_than_seven_tenths_of_the_drafts(rounds, is_far):
    recorded, measured = (AcceptanceCounts((AnswerCounts(20, count, ()),)) for count in (10, rounds))
    assert is_far_below(TrialCheck(None, measured, recorded, [], [])) is is_far
