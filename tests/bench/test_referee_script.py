"""The table of bench/referee.py, and what it starts."""

import pytest

from bench.referee import HEADS, cases, parse, row, verdicts


def comparison(name: str, is_own: bool, **counts: int) -> dict[str, object]:
    return {
        "name": name,
        "is_own": is_own,
        "counts": {"identical": 0, "near-tie": 0, "different": 0, "failed": 0} | counts,
    }


AUDIT = {
    "sides": {"a:1": {}, "b:2": {}},
    "comparisons": [
        comparison("a:1, again", True, identical=24),
        comparison("a:1, together", True, identical=20, **{"near-tie": 4}),
        comparison("b:2, again", True, identical=23, failed=1),
        comparison("a:1 against b:2", False, identical=21, **{"near-tie": 2}, different=1),
    ],
    "tests": [{"name": "a:1, against its own", "p_value": 0.9}, {"name": "a:1 and b:2", "p_value": 0.25}],
    "speeds": [{"name": "a:1", "ratio": None}, {"name": "b:2", "ratio": (1.25, 1.1, 1.4)}],
    "drafts": [{"name": "b:2", "length": (1.5, None, None)}],
}  # fmt: skip


def test_a_row():
    case = list(cases("llama.cpp", None))[1]
    found = dict(zip(HEADS, row("llama.cpp", case, AUDIT), strict=True))
    assert found == {
        "pair": "llama.cpp, n-grams",
        "against": "21 / 2 / 1",
        "the first itself": "44 / 4 / 0",
        "the other itself": "23 / 0 / 1",
        "p": "0.25",
        "tokens a pass": "1.50",
        "speed": "1.25",
    }
    bare = {"sides": AUDIT["sides"], "comparisons": [], "tests": [], "speeds": [], "drafts": []}
    assert row("llama.cpp", case, bare)[1:] == ["-"] * 6
    assert verdicts(AUDIT, True) != verdicts(AUDIT, False)


def test_every_engine_is_asked_plainly_with_drafts_and_against_paceline():
    names = [case.name for case in cases("llama.cpp", "d.gguf")]
    assert names == ["its prompt cache", "n-grams", "a draft model", "Paceline"]
    found = list(cases("vllm", None))
    assert [case.dtype for case in found] == ["bfloat16"] * 2 + ["float32"] * 2
    assert [case.other for case in found] == [" --lookup", None, "--f32 --lookup", None]
    assert [case.first for case in cases("paceline", None)] == ["--drafter lookup"]
    assert "'a b'" in str([case.other for case in cases("vllm", "a b")])


@pytest.mark.parametrize("words", [["--peer", "vllm=python"], ["--peer", "other=python", "--peer-model", "other=m"]])
def test_peers_that_cannot_be_started(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse([*words, "--out", "reports"])
    assert "give its --peer-model" in capsys.readouterr().err
