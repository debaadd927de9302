"""What a benchmark says of itself: which checkpoints it was of, whatever their names."""

import pytest

from paceline import LLM
from paceline.eval.about import draft_fingerprints, trained_hash
from paceline.runner import load_model
from paceline.spec_config import parse
from paceline.zoo.packaged import head_folder
from tests.tiny import tiny_model
from tests.unit.cli_helpers import save


@pytest.mark.usefixtures("unchecked_types")
def test_every_draft_is_named_by_its_weights(tmp_path):
    for name, seed in (("target", 0), ("draft", 1)):
        save(tmp_path / name, tiny_model("llama", seed=seed))
    draft = str(tmp_path / "draft")
    both = {"method": "choose", "drafters": [{"method": "ngram"}, {"method": "draft_model", "model": draft}]}
    configs = [parse(f"model:{draft}"), parse(both), parse("lookup")]
    target = load_model(str(tmp_path / "target"), "float32")
    llms = [LLM(target, drafter=config.build()[0], numerics="fast") for config in configs]
    known = load_model(draft).fingerprint
    assert draft_fingerprints(llms, configs) == {f"model:{draft}": known}
    assert draft_fingerprints(llms[1:], configs[1:]) == {f"model:{draft}": known}
    assert draft_fingerprints(llms[2:], configs[2:]) == {}
    assert known != target.fingerprint


def test_heads_are_named_by_their_files(tmp_path):
    name = "smollm2-135m-medusa"
    own = trained_hash(parse(f"head:{name}"))
    other = tmp_path / "head"
    other.mkdir()
    for file in head_folder(name).iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    assert own is not None
    assert trained_hash(parse(f"head:{other}")) == own
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (other / "model.safetensors").write_bytes(bytes(data))
    assert trained_hash(parse(f"head:{other}")) != own
    assert trained_hash(parse("self-int4")) is None
