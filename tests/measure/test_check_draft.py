"""`paceline check-draft` on a tiny target, and the packaged heads: names, listing, the default of the demo."""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.config import parse
from paceline.core.interfaces import DraftBudget
from paceline.errors import ConfigError
from paceline.measure.trials import run_trial
from paceline.methods.heads.folder import save_head
from paceline.methods.parallel.drafter import Medusa
from paceline.zoo import packaged
from tests.cli.helpers import answer, paceline, refusal, save
from tests.methods.common import edit, even_tempered_target, fresh_medusa, saved

BUDGET, TEXTS = DraftBudget(3, 6), ["w5 w9", "w31 w7 w8", "w44"]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return save(tmp_path_factory.mktemp("target"), even_tempered_target())


@pytest.fixture(scope="module")
def original(target, tmp_path_factory):
    """A head with its record, as training leaves it."""
    llm = LLM(target, drafter=Medusa(fresh_medusa(), ngrams=False), numerics="fast")
    params = SamplingParams(max_tokens=16, seed=0, ignore_eos=True)
    trial = run_trial(llm, params, BUDGET, {"top_k": 10}, name="three", source="texts", texts=TEXTS)
    record = {"acceptance": [trial.as_dict()], "licence": "MIT"}
    return save_head(tmp_path_factory.mktemp("artefacts") / "tiny-medusa", fresh_medusa(), llm.loaded, record)


@pytest.fixture
def head(original, tmp_path):
    return shutil.copytree(original, tmp_path / "artefacts" / "tiny-medusa")


def test_it_drafts_as_recorded(head, target):
    told = answer("check-draft", str(head), "--model", target)
    assert told["passed"]
    assert told["trials"][0]["identical"]
    assert told["trials"][0]["measured"]["mean_acceptance_length"] > 1.3
    result = paceline("check-draft", str(head), "--model", target, "--num-prompts", "2")
    assert result.exit_code == 0
    assert "exactly as recorded" in result.stdout


def test_worse_weights_fail(head, target, tmp_path):
    worse = fresh_medusa()
    for parameter in worse.blocks.parameters():
        torch.nn.init.normal_(parameter, std=2.0)
    record = json.loads((head / "training.json").read_text())
    other = save_head(tmp_path / "worse", worse, LLM(target).loaded, record)
    told = answer("check-draft", str(other), "--model", target, code=1)
    assert not told["passed"]
    assert "does not draft as recorded" in paceline("check-draft", str(other), "--model", target).stdout


def test_what_check_draft_refuses(head, target):
    assert "--model" in refusal("check-draft", str(head))  # the target's name is a temporary folder's
    data = bytearray((head / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (head / "model.safetensors").write_bytes(data)
    assert "is not the file that training.json is about" in refusal("check-draft", str(head), "--model", target)
    edit(head / "training.json", lambda record: record.pop("acceptance"))
    (head / "model.safetensors").write_bytes(data)
    assert "not the file" in refusal("check-draft", str(head), "--model", target)


def test_a_head_without_a_record(tmp_path, target):
    place = saved(tmp_path / "bare")
    assert "records no acceptance" in refusal("check-draft", str(place), "--model", target)


def test_packaged_heads(head, monkeypatch):
    _install(monkeypatch, head.parent, demo="lookup+head:tiny-medusa")
    found = packaged.packaged_heads()
    assert [(one.name, one.method, one.is_default) for one in found] == [("tiny-medusa", "medusa", True)]
    assert packaged.head_folder("tiny-medusa") == head
    assert packaged.head_method(head) == "medusa"
    assert packaged.heads_for(found[0].fingerprint) == found
    assert packaged.heads_for("0" * 64) == []
    run = head.parent / "run"
    run.mkdir()
    head.rename(run / "head")
    assert packaged.head_folder(str(run)) == packaged.head_folder(run) == run / "head", "a run has its head in it"
    (run / "head").rename(head)
    with pytest.raises(ConfigError, match="did you mean 'tiny-medusa'"):
        packaged.head_folder("tiny-medussa")
    _install(monkeypatch, head.parent)
    assert not packaged.heads_for(found[0].fingerprint)[0].is_default
    (head / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="'tiny-medusa' is damaged"):
        packaged.packaged_heads()


def test_where_no_models_are_installed_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(packaged, "distributions", list)
    with pytest.raises(ConfigError, match="pip install paceline-zoo"):
        packaged.head_folder("smollm2-135m-eagle3")
    assert packaged.packaged_heads() == []


def test_models_come_from_the_entry_points_of_other_distributions(tmp_path, monkeypatch, caplog):
    place = tmp_path / "site" / "others.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1\n")
    (place / "entry_points.txt").write_text("[paceline.models]\nothers = others_models\n")
    (tmp_path / "site" / "others_models.py").write_text(f"FOLDER = {str(tmp_path)!r}\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert tmp_path in packaged.model_folders()
    (tmp_path / "site" / "others_models.py").unlink()
    monkeypatch.delitem(sys.modules, "others_models")
    assert tmp_path not in packaged.model_folders()
    assert "'others_models' cannot be found" in caplog.text


def test_the_demo_takes_the_head_of_this_very_model(head, target, tmp_path, monkeypatch):
    _install(monkeypatch, head.parent, demo="lookup+head:tiny-medusa")
    short = ("--num-prompts", "1", "--max-tokens", "4", "--max-model-len", "2000", "--numerics", "fast")
    assert answer("demo", target, *short)["drafter"] == "lookup+head:tiny-medusa"
    assert answer("demo", target, *short, "--drafter", "lookup")["drafter"] == "lookup"
    other = save(tmp_path / "other", even_tempered_target(seed=1))
    assert answer("demo", other, *short)["drafter"] == "lookup"
    assert [entry["name"] for entry in answer("models")["heads"]] == ["tiny-medusa"]
    assert "head:tiny-medusa" in paceline("models").stdout


def test_names_are_understood_wherever_a_drafter_is_named(head, monkeypatch):
    _install(monkeypatch, head.parent)
    config = parse("head:tiny-medusa")
    assert (config.method, config.drafter.model, config.name) == ("medusa", "tiny-medusa", "head:tiny-medusa")
    assert isinstance(config.build()[0], Medusa)
    assert parse(f"head:{head}").method == "medusa"


def _install(monkeypatch, artefacts, demo: str | None = None) -> None:
    defaults = {} if demo is None else {"tiny-medusa": demo}
    monkeypatch.setattr(packaged, "distributions", lambda: [SimpleNamespace(FOLDER=artefacts, DEFAULTS=defaults)])
