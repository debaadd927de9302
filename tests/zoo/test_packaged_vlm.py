"""A packaged vision-language model is pulled with its base, checked by its hashes, and merged exactly."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from paceline_zoo.vlm import merge_vlm, read_vlm
from safetensors.torch import load_file, save_file

from paceline.errors import ConfigError
from paceline.hf.fingerprint import fingerprint
from paceline.system.provenance import sha256_of
from paceline.zoo import ZOO, installed, packaged, pull, registry, verify
from paceline.zoo.packaged import packaged_heads, packaged_models
from paceline.zoo.registry import Zoo
from tests.zoo.helpers import HIDDEN, LAYERS, tiny_llama

SCALE = 2.0


def write_packaged(folder: Path, layers=tuple(range(LAYERS)), vision: str | None = None, trained_on: str = "") -> Path:
    """One low-rank pair in each layer's o_proj, and a vision tower of one number."""
    (folder / "model").mkdir(parents=True)
    torch.manual_seed(len(layers))
    lora = {}
    for i in range(len(layers)):
        lora[f"layers.{i}.self_attn.o_proj.lora_A"] = torch.randn(2, HIDDEN).half()
        lora[f"layers.{i}.self_attn.o_proj.lora_B"] = torch.randn(HIDDEN, 2).half()
    save_file(lora, folder / "lora.safetensors")
    if vision is None:
        save_file({"vision_tower.one": torch.ones(1).half()}, folder / "vision.safetensors")
    config = {"model_type": "llava", "text_config": {}, "vision_config": {}}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    (folder / "model" / "chat_template.jinja").write_text("images")
    file = vision or "vision.safetensors"
    about = {
        "paceline_vlm": 1, "description": "for tests", "licence": "Apache-2.0", "base": "tiny",
        "base_fingerprint": trained_on, "layers": list(layers),
        "vision": {"file": file, "sha256": sha256_of(folder / file)},
        "adapters": [{"file": "lora.safetensors", "sha256": sha256_of(folder / "lora.safetensors"), "scale": SCALE,
                      "layers": list(range(len(layers)))}],
        "dtype": "float32", "parameters": 1000,
        "model": {path.name: sha256_of(path) for path in (folder / "model").iterdir()},
    }  # fmt: skip
    (folder / "vlm.json").write_text(json.dumps(about))
    return folder


@pytest.fixture(scope="module")
def trained_on():
    """Fingerprint of the base, as everything else computes it: of the model, not of its files."""
    return fingerprint(tiny_llama())


@pytest.fixture
def models(world, tmp_path, trained_on, monkeypatch):
    write_packaged(tmp_path / "artefacts" / "tiny-vlm", trained_on=trained_on)
    write_packaged(
        tmp_path / "artefacts" / "tiny-vlm-small", (1,), "../tiny-vlm/vision.safetensors", trained_on=trained_on
    )
    found = {"tiny": world.model} | {path.name: read_vlm(path) for path in (tmp_path / "artefacts").iterdir()}
    monkeypatch.setattr(registry, "ZOO", found)
    return found


@pytest.fixture
def pulled(world, models):
    return lambda name, **more: pull(name, world.cache, **more)


def test_pulling_merges_with_the_base_and_pulls_that_once(world, pulled, models):
    folder, small = pulled("tiny-vlm"), pulled("tiny-vlm-small")
    assert world.downloads == ["tiny"]
    assert world.left == ["tiny", "tiny-vlm", "tiny-vlm-small"]
    assert verify(folder, hashes=True).source_sha256 == models["tiny-vlm"].sha256
    base, merged = load_file(world.cache / "models/tiny/model.safetensors"), load_file(folder / "model.safetensors")
    lora = load_file(models["tiny-vlm"].folder / "lora.safetensors")
    for i in range(LAYERS):
        name = f"model.layers.{i}.self_attn.o_proj.weight"
        a, b = (lora[f"layers.{i}.self_attn.o_proj.lora_{x}"].float() for x in "AB")
        assert torch.equal(merged[f"language_model.{name}"], base[name].float() + SCALE * (b @ a))
        other = name.replace("o_proj", "q_proj")
        assert torch.equal(merged[f"language_model.{other}"], base[other].float())
    assert merged.keys() == {f"language_model.{name}" for name in base} | {"vision_tower.one"}
    assert (folder / "chat_template.jinja").read_text() == "images"
    assert "chat_template" not in json.loads((folder / "tokenizer_config.json").read_text())
    assert json.loads((folder / "config.json").read_text())["text_config"]["dtype"] == "float32"

    one = load_file(small / "model.safetensors")
    kept = {name for name in one if ".layers." in name}
    assert {name.split(".")[3] for name in kept} == {"0"}
    norm = "model.layers.{}.input_layernorm.weight"
    assert torch.equal(one[f"language_model.{norm.format(0)}"], base[norm.format(1)].float())
    assert torch.equal(one["vision_tower.one"], torch.ones(1))
    rows = {row.name: row for row in installed(world.cache)}
    assert all(row.pulled for row in rows.values())


def test_the_base_is_the_only_thing_downloaded_again_never(world, pulled):
    pulled("tiny-vlm")
    pulled("tiny-vlm", force=True)
    assert world.downloads == ["tiny"]


@pytest.mark.parametrize("file", ["lora.safetensors", "vision.safetensors", "model/config.json"])
def test_another_part_is_refused_and_leaves_nothing(world, pulled, models, file):
    path = models["tiny-vlm"].folder / file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ConfigError, match="not the one that was packaged"):
        pulled("tiny-vlm")
    assert world.left == ["tiny"]


def test_a_base_of_another_shape_is_refused(world, pulled, models):
    folder = models["tiny-vlm"].folder
    wrong = {name: value[:, :-1].contiguous() if name.endswith("A") else value
             for name, value in load_file(folder / "lora.safetensors").items()}  # fmt: skip
    save_file(wrong, folder / "lora.safetensors")
    about = json.loads((folder / "vlm.json").read_text())
    about["adapters"][0]["sha256"] = sha256_of(folder / "lora.safetensors")
    (folder / "vlm.json").write_text(json.dumps(about))
    models["tiny-vlm"] = read_vlm(folder)
    with pytest.raises(ConfigError, match="does not fit its base"):
        pulled("tiny-vlm")
    models["tiny-vlm"] = replace(read_vlm(folder), layers=(0, 7))
    with pytest.raises(ConfigError, match="does not fit its base"):
        pulled("tiny-vlm")


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_another_base_of_the_same_shape_is_refused(world, pulled, models, name, tmp_path):
    """A fine-tune, say, whose files fit: the sum would be a model that nobody trained."""
    pulled("tiny-vlm")
    base, out = world.cache / "models" / "tiny", tmp_path / "merged"
    other = shutil.copytree(base, tmp_path / "fine-tune")
    out.mkdir()
    merge_vlm(models["tiny-vlm"], other, out)
    assert (out / "model.safetensors").exists()
    weights = load_file(base / "model.safetensors")
    weights[name] = weights[name] * 1.01
    save_file(weights, other / "model.safetensors")
    for model in (models["tiny-vlm"], models["tiny-vlm-small"]):
        with pytest.raises(ConfigError, match="trained on another base model"):
            merge_vlm(model, other, out)


def test_packaged_models_know_the_base_that_heads_were_trained_for():
    models, heads = [read() for read in packaged_models().values()], packaged_heads()
    expected = {head.fingerprint for head in heads if head.target_name == "smollm2-135m"}
    assert {one.base_fingerprint for one in models if one.base} == expected


def test_newly_packaged_weights_are_merged_anew(world, pulled, models, trained_on):
    folder = pulled("tiny-vlm")
    before = (folder / "model.safetensors").read_bytes()
    shutil.rmtree(models["tiny-vlm"].folder)
    packaged = write_packaged(models["tiny-vlm"].folder, trained_on=trained_on)
    about = json.loads((packaged / "vlm.json").read_text()) | {"description": "another"}
    about["adapters"][0]["scale"] = 1.0
    (packaged / "vlm.json").write_text(json.dumps(about))
    models["tiny-vlm"] = read_vlm(packaged)
    assert (pulled("tiny-vlm") / "model.safetensors").read_bytes() != before


@pytest.mark.parametrize("text", ["", "[]", '{"paceline_vlm": 2}', "{}"])
def test_a_damaged_description_is_a_clear_error(tmp_path, text):
    (tmp_path / "vlm.json").write_text(text)
    with pytest.raises(ConfigError, match="damaged"):
        read_vlm(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda about: about["vision"].update(file="../../vision.safetensors"),
        lambda about: about["vision"].update(file="/tmp/vision.safetensors"),
        lambda about: about["adapters"][0].update(file="../../lora.safetensors"),
        lambda about: about["vision"].update(file="vision.bin"),
        lambda about: about["model"].update({"../config.json": "0"}),
        lambda about: about["model"].update({"/tmp/config.json": "0"}),
    ],
)
def test_parts_that_lead_elsewhere_are_refused(tmp_path, change):
    folder = write_packaged(tmp_path / "model")
    about = json.loads((folder / "vlm.json").read_text())
    read_vlm(folder)
    change(about)
    (folder / "vlm.json").write_text(json.dumps(about))
    with pytest.raises(ConfigError, match="damaged"):
        read_vlm(folder)


def test_packaged_models_are_no_heads():
    names = {head.name for head in packaged_heads()}
    assert names.isdisjoint(packaged_models())
    assert set(packaged_models()) <= set(ZOO)


def test_a_damaged_one_harms_no_other(tmp_path, world, monkeypatch):
    write_packaged(tmp_path / "whole")
    write_packaged(tmp_path / "broken")
    (tmp_path / "broken" / "vlm.json").write_text("{")
    readers = {name: partial(read_vlm, tmp_path / name) for name in ("whole", "broken")}
    monkeypatch.setattr(packaged, "distributions", lambda: [SimpleNamespace(FOLDER=tmp_path, models=lambda: readers)])
    zoo = Zoo({"tiny": world.model})
    assert list(zoo) == ["tiny", "broken", "whole"]
    assert (zoo["tiny"], zoo["whole"].name, "broken" in zoo, "none" in zoo) == (world.model, "whole", True, False)
    assert (list(zoo), len(zoo)) == (["tiny", "broken", "whole"], 3)
    for ask in (lambda: zoo["broken"], lambda: list(zoo.values())):
        with pytest.raises(ConfigError, match="'broken' is damaged"):
            ask()
    with pytest.raises(KeyError):
        zoo["none"]
