"""The script that puts clients before servers, on tiny models that listen."""

import json
import sys

import pytest

from tests.server.helpers import listening, tiny_llm

SCRIPT = "serve_load"
FEW = ("--clients", "1", "3", "--requests", "3", "--max-tokens", "9")


@pytest.fixture
def tokenizer(tmp_path) -> str:
    tiny_llm().tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def test_servers_are_measured_in_turns(script, tokenizer, capsys):
    with listening() as (a, *_), listening() as (b, *_):
        assert script.main([tokenizer, "--base-url", f"a={a}", "--base-url", f"b={b}/v1/", *FEW, "--json"]) == 0
        url = f"{a}/nowhere"
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    found = json.loads(lines[0])
    assert [(row["server"], row["clients"]) for row in found["rows"]] == [("a", 1), ("b", 1), ("a", 3), ("b", 3)]
    assert found["same_as_first"] == {"a": 1.0, "b": 1.0}, "greedy answers of one model"
    for row in found["rows"]:
        assert row["requests"] == 3
        assert 0 < row["tokens"] <= 27
        assert row["tokens"] / row["tokens_per_s"] == pytest.approx(row["seconds"], abs=0.001), (
            "seconds to the millisecond"
        )
        assert 0 < row["first_ms"]["median"] <= row["first_ms"]["p95"] <= row["first_ms"]["p99"] <= 1e3 * row["seconds"]
    with pytest.raises(script.httpx.HTTPError):
        script.main([tokenizer, "--base-url", f"a={url}", *FEW])


def test_chats_are_new_unless_they_are_to_repeat(script):
    questions = script_questions()
    first, second = script.chats_of(questions, 3, 0), script.chats_of(questions, 3, 3)
    assert len({one[0]["content"] for one in first + second}) == 6
    assert all(one[0]["content"].startswith(f"({place})") for place, one in enumerate(first))


def script_questions():
    from paceline.measure.suites import read_suite

    return read_suite("built-in")[:2]


def test_percentiles_are_observed_values(script):
    assert script.spread_ms([0.001 * n for n in range(1, 21)]) == {"median": 10.5, "p95": 19.0, "p99": 20.0}
    assert script.spread_ms([]) == {"median": None, "p95": None, "p99": None}


def test_a_server_that_does_not_start_ends_the_run(script):
    command = f"{sys.executable} -c 'raise ValueError(7)'"
    with pytest.raises(SystemExit, match=r"(?s)ValueError: 7\n.*x did not start"), script.started("x", command):
        pass
