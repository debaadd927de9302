"""The demo with images: both sides answer the same, encode an image once each, and all is reported."""

import json

import pytest
from typer.testing import CliRunner

from examples.tiny_vlm.__main__ import app
from examples.tiny_vlm.demo import answer_both_ways, scenes, totals
from examples.tiny_vlm.model import TowerShape, make_model, make_processor
from examples.tiny_vlm.questions import KINDS, scene_suite
from examples.tiny_vlm.scene import HELD_OUT
from paceline.core.request import SamplingParams
from paceline.errors import ConfigError
from paceline.llm import LLM
from paceline.measure.suites import read_suite
from paceline.methods import PromptLookup
from tests.examples.toy import write_language_model


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_language_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def folder(base, tmp_path_factory):
    place = tmp_path_factory.mktemp("vlm")
    make_model(base, tower=TowerShape(16, 1, 2)).save_pretrained(place)
    make_processor(base).save_pretrained(place)
    return str(place)


def test_scenes_are_seeded_and_of_different_kinds():
    assert [shown.name for shown in scenes(3)] == [shown.name for shown in scenes(3)]
    assert scenes(2, seed=1)[0].name != scenes(2)[0].name
    assert all(len(shown.queries) == 5 for shown in scenes(3))


def test_both_sides_look_once_at_each_image(folder):
    llm = LLM(folder, drafter=PromptLookup(), max_num_seqs=1)
    answered = list(answer_both_ways(llm, scenes(2), SamplingParams(temperature=0.0, max_tokens=6)))
    assert len(answered) == 10
    for side in ("plain", "speculative"):
        looks = [getattr(one, side).metrics.vision > 0 for one in answered]
        assert looks == [True, False, False, False, False] * 2
    total = totals(answered)
    assert total["num_identical"] == 10
    assert total["num_known"] == 10


def test_a_model_without_a_tower_is_refused(base):
    llm = LLM(str(base), max_num_seqs=1)
    with pytest.raises(ConfigError, match="cannot read images"):
        list(answer_both_ways(llm, scenes(1), SamplingParams(max_tokens=4)))


def run(*arguments: str):
    return CliRunner().invoke(app, ["demo", *arguments, "--max-tokens", "4"])


def test_the_command_tells_everything_as_json(folder):
    result = run(folder, "--drafter", "lookup", "--num-scenes", "1", "--json")
    assert result.exit_code == 0, result.output
    got = json.loads(result.stdout)
    assert got["identical"]
    assert [row["kind"] for row in got["questions"]] == ["yes/no", "choice", "short", "caption", "steps"]
    assert {"vision", "prefill", "draft", "verify"} <= got["speculative_split"].keys()


def test_the_users_own_image(folder, tmp_path):
    place = tmp_path / "mine.png"
    scenes(1)[0].image.resize((50, 70)).save(place)
    result = run(folder, "--drafter", "lookup", "--image", str(place), "-q", "What is it?", "-q", "Why?")
    assert result.exit_code == 0, result.output
    assert "What is it?" in result.output
    assert "2 of 2 answers were token-identical" in " ".join(result.output.split())
    assert run(folder, "-q", "What is it?").exit_code == 2
    missing = run(folder, "--drafter", "lookup", "--image", str(tmp_path / "none.png"))
    assert missing.exit_code == 1


def test_scenes_for_training_are_no_held_out_ones(tmp_path):
    made = []
    for place, *more in (("held-out",), ("train", "--train")):
        out = tmp_path / place
        assert CliRunner().invoke(app, ["scenes", str(out), "--per-kind", "2", *more]).exit_code == 0
        made.append({one.read_bytes() for one in (out / "images").iterdir()})
    assert len(made[0]) == len(made[1]) == 10
    assert not made[0] & made[1]
    too_many = ["scenes", str(tmp_path / "more"), "--train", "--per-kind", str(HELD_OUT)]
    refused = CliRunner().invoke(app, too_many)
    assert refused.exit_code == 2
    assert "held-out" in refused.output


def test_scenes_become_a_suite(tmp_path):
    assert CliRunner().invoke(app, ["scenes", str(tmp_path / "made"), "--per-kind", "1"]).exit_code == 0
    read = read_suite(str(tmp_path / "made" / "prompts.jsonl"))
    assert [one.category for one in read] == list(KINDS)
    assert [one.turns for one in read] == [(one.text,) for _, one in scene_suite(1)]
    assert all(one.image for one in read)
