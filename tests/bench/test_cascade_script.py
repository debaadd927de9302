"""The script that holds a calibration against prompts that it has not seen, on tiny random models."""

import json

from paceline.cascade import Calibration, Signal, load_calibration
from paceline.cascade.bound import Point
from paceline.cascade.calibration import ModelId
from tests.cascade.common import PROMPTS, made_up, perturbed
from tests.cli.helpers import save
from tests.tiny import tiny_model

SCRIPT = "cascade"


def run(script, tmp_path, capsys, threshold: float, noise: float = 0.03) -> dict:
    """Whole, with a calibration that trusts what is surer than `threshold`."""
    folders = {
        "small": save(tmp_path / "small", perturbed(noise)),
        "large": save(tmp_path / "large", tiny_model("llama")),
    }
    rows = [{"prompt": " ".join(f"w{token}" for token in ids if token > 3)} for ids in PROMPTS[:12]]
    (tmp_path / "fresh.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--prompts", str(tmp_path / "fresh.jsonl"), "--tokens", "12", "--out", str(tmp_path / "told.json")]
    small, large = (script.LLM(folders[role], dtype="float32", max_num_seqs=1) for role in ("small", "large"))
    made: Calibration = made_up(
        threshold,
        small=ModelId.of(small),
        large=ModelId.of(large),
        small_context=small.runner.max_length,
        curves={Signal.MIN_PROB: (Point(1.0, 0, 0), Point(threshold, 100, 0))},
        prompts={"paths": folders, "weights": {"small": None, "large": None}},
    )
    made.save(tmp_path / "calib.json")
    assert load_calibration(tmp_path / "calib.json").sampling == {"logit_bias": {"2": 4.0}}
    assert script.main([str(tmp_path / "calib.json"), *options]) == 0
    told = json.loads((tmp_path / "told.json").read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == told
    return told


def test_answers_given_alone_may_differ_and_decided_ones_may_not(script, tmp_path, capsys):
    told = run(script, tmp_path, capsys, threshold=0.0)
    assert told["prompts"] == 12 == told["alone"] + told["decided_by_large"]
    assert 0 < told["alone_and_different"] <= told["alone"]
    assert told["of_these_not_its_own"] == 0
    assert told["share"] == told["alone_and_different"] / 12 < told["at_most"]
    assert 0.0 <= told["chance"] < 0.5, "1% is promised, and of twelve at least one differs"


def test_nobody_is_trusted_beyond_the_threshold(script, tmp_path, capsys):
    told = run(script, tmp_path, capsys, threshold=0.999)
    assert (told["alone"], told["alone_and_different"], told["of_these_not_its_own"]) == (0, 0, 0)
    assert told["chance"] == 1.0


def test_an_answer_of_the_large_model_that_is_not_its_own_fails_the_run(script):
    found = [script.Compared("unsure", False, False, (1.0, 2.0)), script.Compared("confident", True, True, (1.0, 4.0))]
    told = script.told_of(found, 0.01, 0.95)
    assert told["of_these_not_its_own"] == 1
    assert told["speedup"] == {"all": 3.0, "alone": 4.0, "decided": 2.0}
    assert told["seconds"] == {"cascade": 2.0, "large": 6.0}
    assert "1 of 1" in script.report(told)


def test_what_is_no_calibration_is_refused(script, tmp_path, capsys):
    (tmp_path / "x.json").write_text("{}")
    assert script.main([str(tmp_path / "x.json"), "--prompts", str(tmp_path / "none.jsonl")]) == 2
    assert "is not a file of the kind paceline-cascade" in capsys.readouterr().err
