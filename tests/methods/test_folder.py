"""What is saved comes back, whole and for the same target; nothing is overwritten and nothing half written."""

import json
from dataclasses import replace

import pytest
import torch
import yaml
from safetensors.torch import load_file

from paceline.errors import ConfigError, IncompatibleModels
from paceline.methods.heads import folder
from paceline.methods.heads.folder import METHODS, head_info, load_head, method_of, read_record, save_head
from paceline.system.provenance import sha256_of
from paceline.target import wrap_model
from tests.helpers import loaded
from tests.methods.common import IDS, new_head, saved
from tests.tiny import tiny_model


@pytest.mark.parametrize("method", METHODS)
def test_round_trip(tmp_path, method):
    head = new_head(method)
    place = save_head(tmp_path / "head", head, loaded(), {"steps": 3})
    assert sorted(path.name for path in place.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "training.json",
    ]
    again = load_head(place, loaded())
    assert type(again) is type(head)
    assert again.config == head.config
    assert method_of(again) == head_info(place).method == method
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert read_record(place) == {"steps": 3, "weights_sha256": sha256_of(place / "model.safetensors")}
    assert not again.training
    assert not any(parameter.requires_grad for parameter in again.parameters())


def test_weights_are_bfloat16_and_rows_of_the_target_are_an_index(tmp_path):
    head = new_head("eagle").attach(torch.randn(97, 32), torch.randn(97, 32))
    tensors = load_file(save_head(tmp_path / "head", head, loaded(), {}) / "model.safetensors")
    assert {tensor.dtype for name, tensor in tensors.items() if name != "draft_ids"} == {torch.bfloat16}
    assert torch.equal(tensors["draft_ids"], IDS)
    assert not any(
        97 in tensor.shape or len(IDS) in tensor.shape for name, tensor in tensors.items() if tensor.dim() > 1
    )


def test_it_comes_in_the_dtype_of_the_target(tmp_path):
    place = saved(tmp_path / "head", target=loaded("llama", torch.bfloat16))
    assert load_head(place, loaded("llama", torch.bfloat16)).fc.weight.dtype is torch.bfloat16
    assert load_head(place).fc.weight.dtype is torch.float32
    assert load_head(place, loaded("llama", torch.bfloat16)).draft_ids.dtype is torch.long


def test_reading_leaves_the_random_numbers_alone(tmp_path):
    place = saved(tmp_path / "head")
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    load_head(place)
    assert torch.equal(torch.rand(2), expected)


def test_nothing_is_overwritten(tmp_path):
    saved(tmp_path / "head")
    before = (tmp_path / "head" / "config.json").read_text()
    with pytest.raises(ConfigError, match="exists already"):
        saved(tmp_path / "head", "medusa")
    assert (tmp_path / "head" / "config.json").read_text() == before
    (tmp_path / "empty").mkdir()
    saved(tmp_path / "empty")


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(folder, "sha256_of", fail)
    with pytest.raises(OSError, match="disk full"):
        saved(tmp_path / "head")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_finite_are_refused(tmp_path):
    head = new_head("eagle3")
    head.fc.weight.data[0, 0] = float("nan")
    with pytest.raises(ConfigError, match=r"'fc\.weight' of this head is not finite"):
        save_head(tmp_path / "head", head, loaded(), {})
    assert list(tmp_path.iterdir()) == []


def test_other_modules_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no head that can be saved"):
        save_head(tmp_path / "head", torch.nn.Linear(2, 2), loaded(), {})


def test_another_target_is_refused(tmp_path):
    place = saved(tmp_path / "head")
    tuned = tiny_model("llama")
    tuned.model.layers[0].mlp.down_proj.weight.data *= 1.5
    other = wrap_model(tuned, name="fine-tuned")
    with pytest.raises(IncompatibleModels) as caught:
        load_head(place, other)
    for word in ("another model", "fine-tuned", "llama", other.fingerprint[:12], loaded().fingerprint[:12], "train"):
        assert word in str(caught.value)
    assert load_head(place, other, allow_other_target=True) is not None


def test_a_rounded_copy_of_the_target_is_told(tmp_path, caplog):
    place = saved(tmp_path / "head")
    copy = replace(loaded(), name="copy", fingerprint="0" * 64, is_rounded=True)
    assert load_head(place, copy) is not None
    assert "copy is a rounded copy of" in caplog.text
    for other in (
        replace(copy, is_rounded=False),
        replace(copy, sketch=wrap_model(tiny_model("llama", seed=1)).sketch),
    ):
        with pytest.raises(IncompatibleModels, match="another model"):
            load_head(place, other)


@pytest.mark.parametrize("size", [{"hidden_size": 64}, {"num_hidden_layers": 3}, {"vocab_size": 99}])
def test_another_size_is_refused_even_so(tmp_path, size):
    place = saved(tmp_path / "head")
    other = wrap_model(tiny_model("llama", **size), name="bigger")
    with pytest.raises(IncompatibleModels, match="does not fit bigger"):
        load_head(place, other, allow_other_target=True)


def test_the_card_says_what_one_must_know(tmp_path):
    provenance = {"paceline": "0.1.0", "command": ["paceline", "train", "eagle3"], "git_commit": None}
    result = {"mean_acceptance_length": 2.5, "per_position": [0.8, 0.5], "answers": [1, 2]}
    row = {"name": "built-in prompts", "params": {"temperature": 0.0}, "budget": {"depth": 5, "nodes": 24}}
    record = {
        "base_model": "some/model",
        "licence": "apache-2.0",
        "data": {"answers": 100, "prompts": ["a", "b"]},
        "provenance": provenance,
        "acceptance": [{**row, "result": result}],
        "limits": ["English only."],
    }
    place = save_head(tmp_path / "tiny-eagle3", new_head("eagle3"), loaded(), json.loads(json.dumps(record)))
    card = (place / "README.md").read_text()
    header = yaml.safe_load(card.split("---\n")[1])
    assert header["library_name"] == "paceline"
    assert (header["base_model"], header["license"]) == ("some/model", "apache-2.0")
    assert "eagle3" in header["tags"]
    for words in (loaded().fingerprint, "answers: 100", "paceline train eagle3", "English only.", "head:tiny-eagle3"):
        assert words in card
    assert "| built-in prompts (2 prompts) | 0 | 24 nodes, depth 5 | 2.50 | 0.80, 0.50 |" in card
    assert "None" not in card
    assert "## Acceptance" not in (saved(tmp_path / "x", "medusa") / "README.md").read_text()
