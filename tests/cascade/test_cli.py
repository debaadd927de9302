"""`paceline calibrate`."""

import json
from pathlib import Path

import pytest

from paceline.system.files import claimed
from tests.cascade.common import PROMPTS, perturbed
from tests.cli.helpers import answer, paceline, refusal, save
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    return save(folder / "small", perturbed(0.002)), save(folder / "large", tiny_model("llama"))


@pytest.fixture
def prompts(tmp_path) -> str:
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": " ".join(f"w{token}" for token in ids if token > 3)} for ids in PROMPTS[:16]]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_calibrate(models, prompts, tmp_path):
    out = str(tmp_path / "calib.json")
    options = ("--prompts", prompts, "--max-disagreement", "0.2", "--out", out, "--short-limit", "8")
    told = paceline("calibrate", *models, *options, "--numerics", "fast")
    assert told.exit_code == 0, told.output
    assert "Promised: at most 20% of all prompts" in told.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calib.json", "calib.svg", "prompts.jsonl"]
    got = answer("calibrate", *models, *options, "--numerics", "fast", "--num-prompts", "14", "--short-limit", "1")
    assert got["prompts"] == 14
    assert (got["max_disagreement"], got["confidence"], got["signal"]) == (0.2, 0.95, "min_prob")
    assert got["differ"] == 0 <= got["coverage"] <= got["ended"] / 14, "of 14 not one may differ"
    assert Path(got["picture"]).exists()


def test_refusals_come_before_loading(models, prompts, tmp_path):
    assert "at least 283 more prompts" in refusal(
        "calibrate", *models, "--prompts", prompts, "-o", str(tmp_path / "c.json")
    )
    most = ("--prompts", prompts, "--max-disagreement", "0.2")
    assert "--mmproj is of one model" in refusal("calibrate", *models, *most, "--mmproj", "x.gguf", code=2)
    assert "unknown signal" in refusal("calibrate", *models, *most, "--signal", "guess", code=2)
    assert "is a .json file" in refusal("calibrate", *models, *most, "--out", str(tmp_path / "c.txt"))
    (tmp_path / "mine.json").write_text("{}")
    assert "did not write" in refusal("calibrate", *models, *most, "--out", str(tmp_path / "mine.json"))
    (tmp_path / "c.svg").write_text("<svg/>")
    assert "c.svg" in refusal("calibrate", *models, *most, "--out", str(tmp_path / "c.json"))
    with claimed(tmp_path / "d.json"):
        assert "another run" in refusal("calibrate", *models, *most, "--out", str(tmp_path / "d.json"))
