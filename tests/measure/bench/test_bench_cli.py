"""`paceline bench` as a user meets it: the JSON line, the folder, the tables, refusals, Ctrl-C."""

import errno
import json
import os
import re
import shutil
import signal
from importlib.util import find_spec
from io import FileIO

import pytest

from paceline.measure.result_folder import claim
from paceline.measure.results import open_results
from paceline.measure.run import BenchRun
from paceline.measure.summary import summarise
from tests.cli.helpers import answer, paceline, refusal

PROMISED = [
    "speedup", "speedup_low", "speedup_high", "mean_acceptance_length", "acceptance_by_position", "plain_tokens_per_s",
    "speculative_tokens_per_s", "floor_fraction", "verdicts", "categories", "drafter", "model", "result", "runs",
]  # fmt: skip


@pytest.fixture
def bench(model, tmp_path):
    """The arguments of a short benchmark that keeps its results in `tmp_path / "r"`."""
    file = tmp_path / "p.jsonl"
    rows = [("one", "w5 w9 w5 w9"), ("two", "w8 w8"), ("one", "w31 w7 w31 w7")]
    file.write_text("".join(json.dumps({"prompt": p, "category": c}) + "\n" for c, p in rows))
    return ("bench", model, "--suite", str(file), "--max-tokens", "12", "--out", str(tmp_path / "r"))


def test_json_and_folder(bench, model, tmp_path):
    got = answer(*bench, "-d", "lookup", "-d", "none", "--repeat", "2")
    assert set(PROMISED) <= got.keys()
    assert (got["model"], got["drafter"], got["complete"]) == (model, "lookup", True)
    assert [one["drafter"] for one in got["runs"]] == ["lookup", "none"]
    assert got["speedup"] == pytest.approx(got["speculative_tokens_per_s"] / got["plain_tokens_per_s"])
    assert got["verdicts"] == {"identical": 6, "near_tie": 0, "bug": 0}
    assert got["categories"].keys() == {"one", "two"}
    assert got["floor_fraction"] > 0
    assert 0 <= (got["draft_acceptance_rate"] or 0.0) <= 1
    assert sum(got["no_draft_reasons"].values()) <= got["answers"]
    assert got["peak_memory_bytes"] > 1e6
    assert got["provenance"]["torch"]
    assert len(got["prompts_sha256"]) == 64
    folder = tmp_path / "r"
    assert got["result"] == str(folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == {key: value for key, value in got.items() if key != "result"}
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * 2 * 3
    for line in lines:
        assert len(line["token_ids"]) == len(line["origins"]) == len(line["sources"]) == len(line["pieces"])
        assert sum(one["num_emitted"] for one in line["rounds"]) == len(line["token_ids"])
        assert all(len(one["pieces"]) == len(one["token_ids"]) for one in line["rounds"])


def test_the_folder_reads_back(bench, tmp_path):
    answer(*bench, "-k", "3")  # the default policy may draft nothing on a busy machine
    opened = open_results(tmp_path / "r")
    (run,) = opened.runs
    assert (run.drafter, set(run.categories), run.batch) == ("lookup", {"one", "two"}, 1)
    assert run.speedup is not None
    assert run.acceptance
    assert len(run.rounds) == len(run.acceptance)
    answers = opened.answers()
    assert [one.side for one in answers] == ["plain", "lookup"] * 3
    assert answers[0].prompt == "w5 w9 w5 w9"
    assert opened.floor_s is not None


def test_raw_prompts_of_a_file_are_remarked_once(bench, tmp_path):
    assert paceline(*bench).stderr.count("without the model's chat template: 3") == 1
    file = tmp_path / "chats.jsonl"
    file.write_text('{"question": "w5 w9"}\n{"turns": ["w5", "w7"]}\n')
    result = paceline(*bench, "--suite", str(file), "--out", str(tmp_path / "chats"))
    assert "template" not in result.stderr
    answers = [one for one in open_results(tmp_path / "chats").answers() if one.is_plain]
    assert [(one.id, one.turn, one.prompt) for one in answers] == [("1", 0, "w5 w9"), ("2", 0, "w5"), ("2", 1, "w7")]


def test_raw_prompts_of_a_published_suite_are_remarked(bench, tmp_path):
    (tmp_path / "HumanEval.jsonl").write_text('{"task_id": "HumanEval/0", "prompt": "w5 w9"}\n')
    result = paceline(*bench, "--suite", "humaneval", "--data", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert result.stderr.count("without the model's chat template: 1") == 1


def test_for_people(bench):
    result = paceline(*bench, "--num-prompts", "2", "--batch", "2")
    assert result.exit_code == 0, result.output
    for told in ("Category", "one", "all", "interval", "2 identical, 0 near-ties, 0 bugs", "of the floor", "kept in"):
        assert told in result.stdout
    assert "batch 2" in result.stdout


def test_several_drafters_side_by_side(bench):
    result = paceline(*bench, "-d", "lookup", "-d", "self-int4", "-k", "3", env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert "3 prompts, each answered plainly and with lookup, self-int4, up to 12 tokens" in result.stderr
    (table,) = re.findall(r"Drafter .*?(?=\n\s*\n)", result.stdout, re.S)
    rows = [line.split() for line in table.splitlines()[2:]]
    assert [row[0] for row in rows] == ["lookup", "self-int4"]
    for row in rows:
        assert re.fullmatch(r"[\d.]+x", row[1])
        assert re.fullmatch(r"\d+%", row[4])
        assert row[5:] == ["3", "of", "3"]
    alone = paceline(*bench[:-1], bench[-1] + "2")
    assert not re.findall(r"^ Drafter ", alone.stdout, re.M)


def test_the_default_folder_and_prompts(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("bench", model, "--num-prompts", "1", "--max-tokens", "2")
    first, second = answer(*options), answer(*options)
    assert first["suite"] == "built-in"
    assert first["result"].startswith("results/")
    assert first["result"].endswith("-lookup")
    assert second["result"] == first["result"] + "-2"


@pytest.fixture
def fails_after_two(monkeypatch):
    """Makes a run raise once two prompts are measured."""

    def plant(error: BaseException):
        measure = BenchRun.measure

        def stopped(run, questions, progress):
            def until_two(what, done, total):
                progress(what, done, total)
                if (what, done) == ("measuring", 2):
                    raise error

            measure(run, questions, until_two)

        monkeypatch.setattr(BenchRun, "measure", stopped)

    return plant


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (RuntimeError("the engine broke"), 1)])
def test_what_was_measured_is_kept(bench, tmp_path, fails_after_two, error, code):
    fails_after_two(error)
    got = answer(*bench, code=code)
    assert got["error"]["type"] == type(error).__name__
    assert (got["complete"], got["prompts"]) == (False, 2)
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["complete"] is False
    assert len(open_results(tmp_path / "r").answers()) == 4
    assert sorted(one.name for one in (tmp_path / "r").iterdir()) == ["answers.jsonl", "summary.json"]


def test_ctrl_c_while_it_is_stopping(bench, tmp_path, fails_after_two, monkeypatch):
    fails_after_two(KeyboardInterrupt())

    def again(*given):
        os.kill(os.getpid(), signal.SIGINT)
        return summarise(*given)

    monkeypatch.setattr("paceline.measure.summary.summarise", again)
    assert paceline(*bench).exit_code == 130
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["prompts"] == 2


def test_a_full_disk_ends_the_run_and_keeps_whole_lines(bench, tmp_path, monkeypatch):
    class Full(FileIO):
        left = 20_000

        def write(self, data):
            if not self.left:
                raise OSError(errno.ENOSPC, "No space left on device")
            told = super().write(data[: self.left])
            self.left -= told
            return told

    monkeypatch.setattr("paceline.measure.result_folder.FileIO", Full)
    result = paceline(*bench)
    assert result.exit_code == 1
    assert "stopped early" in result.stdout
    assert "No space left on device" in result.stderr
    (count,) = re.findall(r"the (\d) finished answers are kept there", result.stderr)
    assert int(count) == len(open_results(tmp_path / "r").answers()) >= 1


def test_a_summary_that_cannot_be_written(bench, tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("paceline.measure.result_folder.write_text", full)
    got = answer(*bench, code=1)
    assert got["verdicts"]["identical"] == 3
    assert "the 6 finished answers are kept" in got["error"]["fix"]
    with (tmp_path / "r" / "answers.jsonl").open("a") as file:
        file.write('{"index": 3, "id"')  # killed while it wrote
    assert "of a run that was killed" in refusal(*bench)
    assert answer("show", str(tmp_path / "r"))["answers"] == 3


def test_a_folder_belongs_to_one_run(bench, tmp_path):
    folder = tmp_path / "r"
    with claim(folder, "m", ["lookup"]):
        assert "another run is writing" in refusal(*bench)
    assert not folder.exists()
    folder.mkdir()
    (folder / "answers.jsonl").write_text("a training's\n")
    assert "holds results already. Got: answers.jsonl" in refusal(*bench)
    assert [(one.name, one.read_text()) for one in folder.iterdir()] == [("answers.jsonl", "a training's\n")]


def test_answers_of_a_single_token_have_no_speed(bench):
    """Nothing can be compared where the pass that reads the prompt gives the whole answer."""
    result = paceline(*bench, "--max-tokens", "1")
    assert result.exit_code == 0, result.output
    assert "3 identical" in result.stdout
    assert "–" in result.stdout


def test_a_category_that_ends_at_once_is_shown_and_drawn_beside_others(bench, model, tmp_path):
    """Two prompts, six drafters; one answer is its first token alone, so that its category has no speed-up."""
    (first,) = (one["token_ids"][0] for one in _first_tokens(bench, tmp_path))
    ends = shutil.copytree(model, tmp_path / "ends")
    for name in ("config.json", "generation_config.json"):
        told = json.loads((ends / name).read_text())
        (ends / name).write_text(json.dumps({**told, "eos_token_id": [first]}))
    drafters = ["lookup", "none", "self-int4", "lookup+self-int4", f"model:{ends}", f"lookup+model:{ends}"]
    for form, tried in (((), drafters), (("--json",), drafters[:1])):
        folder = str(tmp_path / f"both{len(form)}")
        asked = ("bench", str(ends), *bench[2:], "--num-prompts", "2", *(x for name in tried for x in ("-d", name)))
        result = paceline(*asked, "--out", folder, *form)
        assert result.exit_code == 0, result.output
        told = json.loads((tmp_path / folder / "summary.json").read_text())
        speeds = [[one["speedup"] for one in run["categories"].values()] for run in told["runs"]]
        assert all(None in row and row != [None, None] for row in speeds)
    folder = str(tmp_path / "both0")
    for command in (("plot", folder), ("show", folder), ("show", folder, "--json"), ("show", folder, "--html")):
        if command[0] != "plot" or find_spec("matplotlib"):
            assert paceline(*command).exit_code == 0, command


def _first_tokens(bench, folder) -> list[dict]:
    """The plain answers, of one token each, to the first prompt."""
    answer(*bench, "--num-prompts", "1", "--max-tokens", "1", "--out", str(folder / "first"))
    lines = [json.loads(line) for line in (folder / "first" / "answers.jsonl").read_text().splitlines()]
    return [line for line in lines if line["side"] == "plain"]


def test_interrupted_before_anything_was_measured(bench, tmp_path, monkeypatch):
    def at_once(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(BenchRun, "measure", at_once)
    assert paceline(*bench).exit_code == 130
    assert not (tmp_path / "r").exists()


def test_refusals(bench, model, tmp_path):
    assert "did you mean 'gsm8k'?" in refusal("bench", model, "--suite", "gsm8")
    assert "openai/human-eval" in refusal("bench", model, "--suite", "humaneval")
    assert "line 1" in refusal("bench", model, "--suite", _bad(tmp_path))
    assert "twice" in refusal(*bench, "-d", "lookup", "-d", "lookup", code=2)
    assert "python -m bench.peers" in refusal(*bench, "--peer", "vllm=x", code=2)
    assert "unknown drafter" in refusal(*bench, "-d", "lokup")
    assert "greater than or equal to 0" in refusal(*bench, "--seed", "-5", code=2)
    assert "no prompt fits" in refusal(*bench, "--max-model-len", "2")
    assert not (tmp_path / "r").exists()
    answer(*bench)
    assert "holds results already" in refusal(*bench)


def _bad(folder) -> str:
    (folder / "bad.jsonl").write_text("{")
    return str(folder / "bad.jsonl")
