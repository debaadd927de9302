"""The script that puts all drafting methods into one table, on a tiny random model."""

import json
from pathlib import Path

import pytest

from paceline.hf.fingerprint import hash_vocabulary
from paceline.hf.load import load_tokenizer
from paceline.measure.run import BenchRun
from paceline.methods.suffix.corpus import write_index

SCRIPT = "methods"


@pytest.fixture
def script(script, monkeypatch):
    monkeypatch.setattr(script, "memory_of", lambda args: dict.fromkeys(args.drafter, 12))
    return script


@pytest.fixture
def data(tmp_path) -> Path:
    (tmp_path / "data" / "humaneval").mkdir(parents=True)
    rows = [{"task_id": f"HumanEval/{i}", "prompt": "w5 w9 w11 " * 4 + f"w{20 + i}"} for i in range(2)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "data" / "humaneval" / "HumanEval.jsonl").write_text(lines)
    return tmp_path / "data"


def run(script, monkeypatch, model, data, *drafters: str) -> Path:
    out = data.parent / "out"
    options = ["--data", str(data), "--out", str(out), "--suite", "humaneval", "--temperature", "0"]
    options += ["--budget", "equal", "--num-prompts", "2", "--max-tokens", "12", "--runs", "2"]
    for drafter in drafters:
        options += ["-d", drafter]
    monkeypatch.setattr("sys.argv", ["methods.py", model, *options])
    assert script.main() == 0
    return out


def test_the_table(script, monkeypatch, model, data, capfd):
    corpus = data.parent / "corpus"
    write_index(corpus, [[5, 9, 11, 12, 13]], hash_vocabulary(load_tokenizer(model)), lambda *_: None)
    drafters = "none", "lookup", "suffix", f"suffix:{corpus}"
    out = run(script, monkeypatch, model, data, *drafters)
    told = capfd.readouterr()
    assert (out / "table.md").read_text() in told.out
    assert "Loading weights" not in told.out + told.err
    head, _, *rows = [line.split(" | ") for line in told.out.splitlines() if line.startswith("|")]
    assert head[-4:] == ["95% interval", "drafting", "memory", "identical |"]
    assert [row[0].removeprefix("| ") for row in rows] == [*drafters]
    assert [row[-2:] for row in rows] == [["12 MB", "4 of 4 |"]] * 4


def test_an_answer_counts_with_its_fastest_run(script, tmp_path):
    for run, seconds in enumerate(([3.0, 1.0], [2.0, 4.0])):
        (tmp_path / str(run)).mkdir()
        line = {"category": "maths", "index": 0, "side": "lookup", "num_tokens": 8, "rounds": []}
        lines = [json.dumps(line | {"turn": turn, "seconds": one}) for turn, one in enumerate(seconds)]
        (tmp_path / str(run) / "answers.jsonl").write_text("\n".join(lines))
        summary = {"runs": [{"drafter": "lookup", "verdicts": {"identical": 2}}]}
        (tmp_path / str(run) / "summary.json").write_text(json.dumps(summary))
    cells, verdicts = script.read_piece([tmp_path / "0", tmp_path / "1"])
    assert list(cells["maths", 0]["lookup"]) == [16, 3.0, 0, 0]
    assert verdicts["lookup"] == {"identical": 4}


@pytest.mark.parametrize(
    ("drafter", "told"),
    [("head:absent", "absent"), ("suffix:absent", "no corpus index"), ("lokup", "did you mean"), ("lookup", "twice")],
)
def test_what_cannot_be_used_is_refused_before_anything_is_measured(
    script, monkeypatch, model, data, capsys, drafter, told
):
    monkeypatch.setattr(BenchRun, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit):
        run(script, monkeypatch, model, data, "lookup", drafter)
    assert told in capsys.readouterr().err
    assert not (data.parent / "out").exists()
