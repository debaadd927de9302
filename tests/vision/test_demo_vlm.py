"""`paceline demo-vlm`: both sides answer the same, look at a picture once each, and everything is told."""

import json

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.core.request import SamplingParams
from paceline.demo_vlm import demo_vlm, rendered, totals
from paceline.drafters import PromptLookup
from paceline.errors import ConfigError
from paceline.llm import LLM
from paceline.train.vlm.shape import TowerShape, make_model, make_processor
from tests.train.vlm_toy import write_language_model

pytestmark = pytest.mark.usefixtures("unchecked_types")


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
    assert [shown.name for shown in rendered(3)] == [shown.name for shown in rendered(3)]
    assert rendered(2, seed=1)[0].name != rendered(2)[0].name
    assert all(len(shown.queries) == 5 for shown in rendered(3))


def test_both_sides_look_once_at_each_picture(folder):
    llm = LLM(folder, drafter=PromptLookup(), max_batch_size=1)
    answered = list(demo_vlm(llm, rendered(2), SamplingParams(temperature=0.0, max_tokens=6)))
    assert len(answered) == 10
    for side in ("plain", "speculative"):
        looks = [getattr(one, side).timings.vision > 0 for one in answered]
        assert looks == [True, False, False, False, False] * 2
    total = totals(answered)
    assert total["num_identical"] == 10
    assert total["num_known"] == 10


def test_a_model_without_eyes_is_refused(base):
    llm = LLM(str(base), max_batch_size=1)
    with pytest.raises(ConfigError, match="no eyes"):
        list(demo_vlm(llm, rendered(1), SamplingParams(max_tokens=4)))


def run(*arguments: str):
    return CliRunner().invoke(app, ["demo-vlm", *arguments, "--max-tokens", "4", "--no-progress"])


def test_the_command_tells_everything_as_json(folder, tmp_path):
    result = run(folder, "--drafter", "lookup", "--num-scenes", "1", "--save", str(tmp_path / "png"), "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["identical"]
    assert [row["kind"] for row in told["questions"]] == ["yes/no", "choice", "short", "caption", "steps"]
    assert {"vision", "prefill", "draft", "verify"} <= told["speculative_split"].keys()
    (saved,) = (tmp_path / "png").iterdir()
    saved.write_bytes(b"mine")
    again = run(folder, "--drafter", "lookup", "--num-scenes", "1", "--save", str(tmp_path / "png"))
    assert "did not write it" in " ".join(again.stderr.split())


def test_the_users_own_picture(folder, tmp_path):
    place = tmp_path / "mine.png"
    rendered(1)[0].image.resize((50, 70)).save(place)
    result = run(folder, "--drafter", "lookup", "--image", str(place), "-q", "What is it?", "-q", "Why?")
    assert result.exit_code == 0, result.output
    assert "What is it?" in result.output
    assert "2 of 2 answers were token-identical" in " ".join(result.output.split())
    assert run(folder, "-q", "What is it?").exit_code == 2
    missing = run(folder, "--drafter", "lookup", "--image", str(tmp_path / "none.png"))
    assert missing.exit_code == 1
