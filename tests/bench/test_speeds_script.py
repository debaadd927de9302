"""The script of `make bench`, on a tiny random model."""

import pytest

from paceline.measure.record import read_records
from tests.bench.test_methods_script import data  # noqa: F401

SCRIPT = "speeds"


@pytest.fixture
def run(script, monkeypatch, model, data, tmp_path):  # noqa: F811
    monkeypatch.setattr(script.results, "RECORDS", tmp_path)
    for name, value in {"MODEL": model, "DRAFTERS": ("none", "lookup"), "QUICK_DRAFTERS": ("lookup",)}.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(script, "SUITES", {"humaneval": "HumanEval"})
    monkeypatch.setattr(script, "TOKENS", 12)
    return lambda *options: script.main(["--data", str(data), *options])


def test_it_keeps_the_record_of_this_machine(run, tmp_path, capsys):
    assert run("--machine", "one test") == 0
    told = capsys.readouterr().out
    assert "This takes up to" in told
    (record,) = read_records(tmp_path)
    assert record.machine.name == "one test"
    assert list(record.values) == ["plain", "none", "lookup"]
    assert record.values["lookup"]["identical"] == "2 of 2"
    assert record.values["lookup"]["HumanEval"] == record.values["lookup"]["all"] > 0
    assert "| lookup |" in told
    assert run() == 0
    (again,) = read_records(tmp_path)
    assert again.machine.name == "one test", "known by its processor"


def test_quick_keeps_nothing(run, tmp_path, capsys):
    assert run("--quick") == 0
    assert "8 questions" in capsys.readouterr().out
    assert not read_records(tmp_path)
    with pytest.raises(SystemExit):
        run("--quick", "--update")


def test_a_busy_machine_is_said(run, script, monkeypatch, tmp_path, capsys):
    from paceline.system.hardware import Load

    monkeypatch.setattr(script, "watch_load", lambda: Load(1.5, 0.0, 2.0))
    assert run("--machine", "one test") == 0
    assert "Others use 1.5 cores" in capsys.readouterr().out
    assert read_records(tmp_path)[0].notes == ["Measured beside other work."]
