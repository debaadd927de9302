"""The script that measures long texts, on a tiny random model."""

import json

import pytest

from tests.bench.test_methods_script import data  # noqa: F401

SCRIPT = "long"


@pytest.fixture
def run(script, monkeypatch, model, data, tmp_path):  # noqa: F811
    (data / "spec_bench").mkdir()
    rows = [
        {"question_id": i, "category": "rag", "turns": [f"w5 w9 w{20 + i} w11 w12\nw7 w{30 + i}"]} for i in range(4)
    ]
    (data / "spec_bench" / "question.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shape = ["--length", "90", "--synthetic", "300", "--kind", "rag", "--rows", "1", "3", "--window", "40"]
    more = ["--num-prompts", "1", "--max-tokens", "8", "-d", "lookup", "-d", "self-int4:window=16"]
    return lambda: script.main([model, "--data", str(data), "--out", str(tmp_path / "out"), *shape, *more])


def test_the_tables(run, tmp_path, monkeypatch, script, capsys):
    assert run() == 0
    told = capsys.readouterr().out
    tables = [line for line in told.splitlines() if line.startswith("| ")]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in tables]
    passes = ["ms behind", "---", "1 rows", "3 rows", "int4, all", "int4, last 40"]
    assert rows == [*passes, "rag, 90 tokens", "---", "lookup", "self-int4:window=16"]
    assert {path.stem for path in (tmp_path / "out").iterdir()} == {"passes-90", "passes-300", "rag-90"}
    monkeypatch.setattr(script, "milliseconds", None)  # a run that is complete measures nothing
    monkeypatch.setattr(script, "answers", None)
    assert run() == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")] == tables
