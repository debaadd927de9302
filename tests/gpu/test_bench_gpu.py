"""The GPU benchmark's own code, on tiny models on the CPU: every part runs, and refusals say what to do."""

import json

import pytest
import torch

from bench import gpu as bench
from bench import results
from paceline.measure.record import read_records

TINY = ["--device", "cpu", "--tiny", "--context", "20", "--repeat", "1", "--tokens", "8"]
NODES = ["1", "2", "4", "8", "16", "32", "64"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What the whole run prints and finds, and where its records are."""
    folder = tmp_path_factory.mktemp("records")
    with pytest.MonkeyPatch.context() as patched:
        printed = list[str]()
        patched.setattr("builtins.print", lambda *words, **_: printed.append(" ".join(map(str, words))))
        patched.setattr(bench, "RECORDS", folder)
        assert bench.main([*TINY, "--tests=--version", "--machine", "a test"]) == 0
    return printed, json.loads(printed[-1]), folder


def test_every_part_runs(ran):
    printed, found, _ = ran
    assert [line.split(",")[0] for line in printed if line.startswith("--")] == [f"-- {name}" for name in bench.PARTS]
    assert set(bench.PARTS) <= set(found)
    assert found["tests"]["last"].startswith("pytest")
    assert {"bf16", "int4"} <= {row["target"] for row in found["passes"]}
    for row in found["passes"]:
        assert list(row["growth"]) == NODES
        assert row["growth"]["1"] == 1.0
        assert 0 < row["fraction"] < 1
    assert list(found["invariance"]) == ["1", "16", "64"]
    assert 0 < found["rounds"]["draft"] < found["rounds"]["round"]
    assert 0 < found["eagle"]["level"] < found["eagle"]["draft"]
    told = {row["with"]: row for row in found["answers"]}
    assert {"plain", "lookup", "self-int4", "transformers"} <= set(told)
    assert all(told[name]["identical"] == "1 of 1" for name in ("plain", "lookup", "self-int4"))
    assert set(found["not_measured"]) <= {"fp8", "bf16, no graphs", "vLLM"}
    assert found["aims"] == {}, "a tiny model shows nothing about a GPU"


def test_its_records_have_a_place_on_the_page(ran):
    records = read_records(ran[2])
    assert {record.table for record in records} == {"gpu", "gpu-answers"}
    page = results.page(records)
    assert "| target | size, GB | a step, ms |" in page
    assert "`python -m bench.gpu`" in page


def test_a_part_that_fails_stops_no_other(monkeypatch, capsys):
    def broken(run):
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setitem(bench.PARTS, "rounds", broken)
    assert bench.main([*TINY, "--only", "rounds", "invariance"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["not_measured"] == {"rounds": "RuntimeError: no such kernel"}
    assert found["invariance"]["1"]["pass_ms"] > 0
    bench.main([*TINY, "--only", "rounds", "--seconds", "0"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["not_measured"] == {"rounds": "no time was left"}


def test_failed_tests_are_the_exit_code(monkeypatch):
    monkeypatch.setitem(bench.PARTS, "tests", lambda run: {"exit_code": 1})
    assert bench.main([*TINY, "--only", "tests"]) == 1


def test_an_aim_is_reached_or_missed(capsys):
    run = bench.Run(bench.parsed(["--device", "cpu"]))
    run.aim("T(16) / T(1) in bf16", 1.2)
    run.aim("int4 at 8 rows, ms", 2.4)
    assert [aim["reached"] for aim in run.aims.values()] == [False, True]
    assert "at most 1.15: 1.200, missed" in capsys.readouterr().out


def test_without_a_gpu_it_names_what_can_be_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"no CUDA device.*--device cpu --tiny"):
        bench.main([])
    with pytest.raises(SystemExit, match="--tiny"):
        bench.main(["--device", "cpu"])


def test_the_shape_is_that_of_a_7b():
    e, f, layers, v = (bench.SHAPE[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"))
    assert 6.5e9 < layers * (4 * e * e + 3 * e * f) + 2 * v * e < 7.0e9
