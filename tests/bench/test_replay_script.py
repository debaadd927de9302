"""The script that records drafts and replays the default policy on them."""

import json
import random

import pytest

from paceline import SamplingParams
from paceline.core.interfaces import DraftBudget
from paceline.core.request import TokenSequence
from tests.bench.test_methods_script import data  # noqa: F401

SCRIPT = "replay"
SECONDS = {"passes": {"1": 0.010, "4": 0.011, "16": 0.014}, "drafts": {"good": [0.0005, 0.0], "bad": [0.0005, 0.0]}}


def answers(count: int, length: int = 60) -> list[dict[str, object]]:
    """Answers with a drafter that proposes the next four tokens, and one that proposes others."""
    made = []
    for number in range(count):
        output = [100 * number + i for i in range(length)]

        def rows(wrong: int, output=output):
            for place in range(length - 1):
                ids = [0, *(token + wrong for token in output[place : place + 4])]
                chain = {"ids": ids, "parents": [*range(-1, len(ids) - 1)], "confidences": None}
                yield {"position": place, "hint": 0, "branches": 1, **chain}

        proposals = {"good": [*rows(0)], "bad": [*rows(1000)]}
        made.append({"category": f"c{number % 2}", "prompt": [1, 2, 3], "output": output, "proposals": proposals})
    return made


def test_right_drafts_pay_and_wrong_ones_cost_little(script):
    def replayed(*names: str) -> tuple[float, float]:
        cell = script.replay(SECONDS, (), answers(6), list(names), random.Random(0))["all"]
        assert cell[2] == 6 * 60, "every token is emitted once"
        return cell[1] / cell[0], cell[2] / cell[3]

    (good, tokens), (bad, ones), (both, _) = replayed("good"), replayed("bad"), replayed("bad", "good")
    assert good > 2.5
    assert tokens > 3
    assert 0.9 < bad <= 1
    assert ones == 1
    assert both > 0.8 * good


def test_trees_are_cut_as_their_drafter_would(script):
    """By depth, by nodes, by the least probability, and where the policy ends a draft."""
    row = {"parents": [-1, 0, 0, 1, 3], "confidences": [1.0, 0.6, 0.3, 0.5, 0.9]}  # paths of 0.6, 0.3, 0.3, 0.27
    assert script.cut(row, DraftBudget(9, 9), 9) == ([0, 1, 2, 3, 4], 3)
    assert script.cut(row, DraftBudget(9, 9), 2) == ([0, 1, 2, 3], 2)
    assert script.cut(row, DraftBudget(9, 1), 9) == ([0, 1], 3)
    assert script.cut(row, DraftBudget(9, 9, min_probs=[0.28]), 9) == ([0, 1, 2, 3], 3)
    assert script.cut(row, DraftBudget(9, 9, min_probs=[0.1, 0.2, 0.4]), 9) == ([0, 1, 2], 3)
    asked: list[list[float]] = []
    assert script.cut(row, DraftBudget(9, 9, 0, lambda path: asked.append([*path]) or len(path) < 2), 9)[1] == 2
    assert asked == [[0.6], [0.6, 0.5]]


@pytest.mark.parametrize(("at_once", "seconds"), [(False, 1.0), (True, 0.5)])
def test_a_draft_that_is_made_at_once_takes_one_step(script, at_once, seconds):
    row = {"position": 0, "hint": 0, "branches": 1, "at_once": at_once, "ids": [9, 1, 2], "parents": [-1, 0, 1]}
    answer = {"output": [1, 2, 3, 4], "proposals": {"m": [row | {"confidences": None}]}}
    drafter = script.Replayed(["m"], {"drafts": {"m": [0.5, 0.0]}}, [answer])
    seq = TokenSequence([5, 9], SamplingParams(max_tokens=4, ignore_eos=True), 0, frozenset(), 100, slot=0)
    made, spent = drafter.play(seq, DraftBudget(2, 2))
    assert (made.num_emitted, spent) == (3, seconds)
    assert drafter.draft_options(seq)[0].at_once == at_once


def test_record_and_run(script, model, data, tmp_path, monkeypatch, capsys):  # noqa: F811
    trace = tmp_path / "trace.jsonl"
    record = ["record", model, str(trace), "--data", str(data), "-d", "lookup", "--suite", "humaneval"]
    monkeypatch.setattr("sys.argv", ["replay.py", *record, "--num-prompts", "2", "--max-tokens", "12"])
    script.main()
    seconds, *rows = map(json.loads, trace.read_text().splitlines())
    assert seconds["passes"]["1"] > 0
    assert [len(row["proposals"]["lookup"]) <= len(row["output"]) for row in rows] == [True, True]
    monkeypatch.setattr("sys.argv", ["replay.py", "run", str(trace), "--seeds", "1"])
    script.main()
    assert "| lookup | " in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["replay.py", "run", str(trace), "-d", "suffix"])
    with pytest.raises(SystemExit, match="not in this trace: suffix; it has lookup"):
        script.main()
