"""A whole run of the training on a tiny model: what it writes is what it trained, and it can be stopped."""

import json
import shutil

import pytest
import torch
from paceline_zoo.vlm import base_fingerprint, merge_vlm, read_vlm
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from examples.tiny_vlm import package
from examples.tiny_vlm.model import GRID, TowerShape
from examples.tiny_vlm.package import Trained, package_vlm
from examples.tiny_vlm.scene import make_scene, render
from examples.tiny_vlm.sft import SftTask, answer_logits, collate, scene_chats
from examples.tiny_vlm.stages import VlmStages
from paceline.errors import ConfigError
from paceline.target import load_model
from paceline.train.log import Saved, Started, read_log
from paceline.train.stages import Done
from tests.examples.toy import config_of, write_easy_vqa, write_language_model


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_language_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def easy(tmp_path_factory):
    return write_easy_vqa(tmp_path_factory.mktemp("easy"))


@pytest.fixture(scope="module")
def finished(base, easy, tmp_path_factory):
    """A run through all stages."""
    out = tmp_path_factory.mktemp("run")
    stages = VlmStages(config_of(base, out, f"easy_vqa={easy}"))
    done = [e for stage in ("pretrain", "sft", "distill", "eval") for e in stages.run(stage) if isinstance(e, Done)]
    assert [one.stage for one in done] == ["pretrain", "sft", "distill", "eval"]
    return out, stages


def test_a_run_leaves_what_it_says(finished, base):
    out, stages = finished
    small = json.loads((out / "tiny-vlm-small" / "vlm.json").read_text())
    assert small["layers"] == [0, 3]
    assert small["vision"]["file"] == "../tiny-vlm/vision.safetensors"
    assert not (out / "tiny-vlm-small" / "pretrain.safetensors").exists()
    got = json.loads((out / "eval.json").read_text())
    assert got["tiny-vlm"]["easy-VQA test"]["questions"] == 4
    assert got["tiny-vlm"]["caption"]["questions"] == 1
    card = (out / "tiny-vlm-small" / "README.md").read_text()
    assert "layers 0, 3" in card
    assert "| easy-VQA test, 4 questions |" in card
    for folder in ("tiny-vlm", "tiny-vlm-small"):
        text = "".join(path.read_text() for path in (out / folder).rglob("*") if path.suffix in (".json", ".md"))
        assert str(out) not in text
        assert str(base) not in text
    assert [event.was_there for event in stages.run("sft")] == [True]
    assert [line["event"] for line in read_log(out / "distill")] == ["step"] * 3 + ["evaluation", "finish"]


@pytest.mark.parametrize("folder", ["model", "model-small"])
def test_plain_transformers_loads_and_answers(finished, folder):
    out, _ = finished
    model = AutoModelForImageTextToText.from_pretrained(out / folder)
    processor = AutoProcessor.from_pretrained(out / folder)
    assert model.dtype == torch.bfloat16
    chat = [
        {"role": "user", "content": [{"type": "image", "image": render(make_scene(1))}, {"type": "text", "text": "Hi"}]}
    ]
    inputs = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")  # noqa: E501  # fmt: skip
    assert int((inputs["input_ids"] == model.config.image_token_index).sum()) == GRID**2
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    assert model.generate(**inputs, max_new_tokens=3, do_sample=False).shape[1] > inputs["input_ids"].shape[1]


def test_merged_is_what_was_trained(base, easy, tmp_path):
    """In float32 and with weights that float16 holds, the merged folder is the trained model up to rounding."""
    config = config_of(base, tmp_path)
    stages = VlmStages(config)
    list(stages.run("pretrain"))
    vision = load_file(tmp_path / "pretrain" / "vision.safetensors")
    task = SftTask(base, vision, config, torch.device("cpu"), [], [])
    torch.manual_seed(3)
    with torch.no_grad():
        for value in task.state().values():
            value.copy_((0.1 * torch.randn_like(value)).half().float())
    package_vlm(Trained(task.lora, task.parts.state_dict(), tower=config.tower), tmp_path / "own", base)
    folder = tmp_path / "merged"
    folder.mkdir()
    merge_vlm(read_vlm(tmp_path / "own"), base, folder, dtype="float32")
    merged = AutoModelForImageTextToText.from_pretrained(folder)
    batch = collate([scene_chats(5)], task.processor, GRID**2)
    with torch.no_grad():
        ours, theirs = answer_logits(task.model, batch)[0], answer_logits(merged, batch)[0]
    assert torch.allclose(ours, theirs, atol=1e-4)
    without = AutoModelForImageTextToText.from_pretrained(folder)
    without.model.language_model.layers[3].mlp.down_proj.weight.data.mul_(1.01)
    with torch.no_grad():
        assert not torch.allclose(ours, answer_logits(without, batch)[0], atol=1e-4), "one layer off must show"


@pytest.mark.parametrize("stage", ["pretrain", "sft", "distill"])
def test_a_stopped_stage_ends_with_the_same_bits(stage, finished, base, easy, tmp_path):
    out, _ = finished
    stages = VlmStages(config_of(base, tmp_path, f"easy_vqa={easy}", f"{stage}.checkpoint_seconds=0"))
    for name in {"pretrain": (), "sft": ("pretrain",), "distill": ("tiny-vlm",)}[stage]:
        shutil.copytree(out / name, tmp_path / name)
    for event in stages.run(stage):
        if isinstance(event, Saved) and event.step == 1:
            break
    again = VlmStages(config_of(base, tmp_path, f"easy_vqa={easy}"))
    events = list(again.run(stage))
    assert isinstance(events[0], Started)
    assert events[0].resumed
    name = {"pretrain": "pretrain/vision.safetensors", "sft": "tiny-vlm/lora.safetensors"}
    file = name.get(stage, "tiny-vlm-small/lora.safetensors")
    straight, resumed = load_file(out / file), load_file(tmp_path / file)
    assert all(torch.equal(straight[key], resumed[key]) for key in straight)
    losses = [[line.get("loss") for line in read_log(folder / stage)] for folder in (out, tmp_path)]
    assert losses[0] == losses[1]


def test_another_run_in_the_same_folder_is_refused(base, tmp_path):
    stages = VlmStages(config_of(base, tmp_path, "pretrain.checkpoint_seconds=0"))
    for event in stages.run("pretrain"):
        if isinstance(event, Saved):
            break
    with pytest.raises(ConfigError, match="steps: "):
        list(VlmStages(config_of(base, tmp_path, "pretrain.steps=9")).run("pretrain"))
    with pytest.raises(ConfigError, match="batch: "):
        list(VlmStages(config_of(base, tmp_path, "pretrain.batch=6")).run("pretrain"))


@pytest.mark.parametrize(
    ("stage", "change", "named"),
    [
        ("pretrain", "pretrain.steps=9", "pretrain.steps"),
        ("pretrain", "tower.width=32", "tower.width"),
        ("sft", "sft.seed=5", "sft.seed"),
        ("sft", "sft.rank=3", "sft.rank"),
        ("sft", "easy_vqa=null", "easy_vqa"),
        ("distill", "distill.loss=tv", "distill.loss"),
    ],
)
def test_a_finished_stage_is_not_done_for_another_run(stage, change, named, finished, base, easy):
    out, _ = finished
    again = VlmStages(config_of(base, out, f"easy_vqa={easy}", change))
    with pytest.raises(ConfigError, match=f"made with other settings(.|\n)*{named}(.|\n)*another out"):
        list(again.run(stage))


def test_a_finished_stage_is_done_for_the_same_run_alone(finished, base, easy, tmp_path):
    """Settings without an influence on the result may change; the files it was made of may not."""
    out, _ = finished
    harmless = (
        "pretrain.micro_batch=4",
        "sft.log_every=2",
        "pretrain.checkpoint_seconds=1",
        "held_out=2",
        f"easy_vqa={easy}",
    )
    for stage in ("pretrain", "sft", "distill"):
        assert [event.was_there for event in VlmStages(config_of(base, out, *harmless)).run(stage)] == [True]
    other = shutil.copytree(base, tmp_path / "fine-tune")
    weights = load_file(other / "model.safetensors")
    save_file({name: value * 1.01 for name, value in weights.items()}, other / "model.safetensors")
    run = shutil.copytree(out, tmp_path / "run")
    for stage in ("pretrain", "sft", "distill"):
        with pytest.raises(ConfigError, match="model"):
            list(VlmStages(config_of(other, run, f"easy_vqa={easy}")).run(stage))
    file = run / "pretrain" / "vision.safetensors"
    save_file({name: value + 1 for name, value in load_file(file).items()}, file)
    with pytest.raises(ConfigError, match="vision"):
        list(VlmStages(config_of(base, run, f"easy_vqa={easy}")).run("sft"))
    about = json.loads((run / "tiny-vlm" / "vlm.json").read_text())
    (run / "tiny-vlm" / "vlm.json").write_text(json.dumps({**about, "description": "another"}))
    with pytest.raises(ConfigError, match=r"distill\.teacher"):
        list(VlmStages(config_of(base, run, f"easy_vqa={easy}")).run("distill"))
    (run / "pretrain" / "settings.json").unlink()
    with pytest.raises(ConfigError, match=r"settings\.json"):
        list(VlmStages(config_of(base, run, f"easy_vqa={easy}")).run("pretrain"))


@pytest.mark.parametrize("step", ["save_file", "vlm_card", "provenance"])
def test_a_half_written_package_does_not_look_whole(base, tmp_path, monkeypatch, step):
    out, trained = tmp_path / "own", Trained({}, {"one": torch.ones(1)}, tower=TowerShape(16, 1, 2))
    package_vlm(trained, out, base)
    assert read_vlm(out).base_fingerprint == base_fingerprint(base) == load_model(str(base)).fingerprint

    def stopped(*_):
        raise OSError("the power went")

    monkeypatch.setattr(package, step, stopped)
    with pytest.raises(OSError, match="power"):
        package_vlm(trained, out, base)
    assert not (out / "vlm.json").exists()
    with pytest.raises(ConfigError, match="damaged"):
        read_vlm(out)


@pytest.mark.parametrize(("stage", "fix"), [("sft", "pretrain"), ("distill", "sft"), ("eval", "sft")])
def test_a_stage_too_early_says_which_comes_first(stage, fix, base, tmp_path):
    with pytest.raises(ConfigError, match=f"`{fix}` first"):
        list(VlmStages(config_of(base, tmp_path)).run(stage))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("pretrain.steps=0", "pretrain.steps"),
        ("pretrain.lr=.nan", "pretrain.lr"),
        ("sft.rank=65536", "more memory than is free"),
        ("sft.scenes=0 sft.easy=0", "sft.scenes"),
        ("distill.layers=99", "cannot be kept"),
        ("distill.loss=mse", "distill.loss"),
        ("tower.heads=3", "tower.width cannot be shared"),
        ("tower.width=65536 tower.heads=2 tower.layers=256", "more memory than is free"),
        ("name=../x", "name"),
        ("name=sft", "name"),
        ("easy_vqa=none", "easy-VQA"),
        ("model=none", "language model"),
        ("sft.rnk=1", "did you mean 'rank'"),
    ],
)
def test_a_run_is_refused_before_anything_is_written(words, named, base, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.train.models.available_memory", lambda: 1 << 26)
    split = [word.replace(":\t", ": ") for word in words.replace(": ", ":\t").split(" ")]
    with pytest.raises(ConfigError, match=named):
        list(VlmStages(config_of(base, tmp_path / "out", *split)).run("pretrain"))
    assert not (tmp_path / "out").exists()


def test_only_what_is_asked_for_is_checked(base, tmp_path):
    VlmStages(config_of(base, tmp_path / "out", "distill.layers=99"), ("pretrain", "sft")).check()
