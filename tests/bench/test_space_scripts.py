"""The scripts that measure SPACE and what full fine-tuning costs, on tiny models: their parts, and both whole."""

import importlib
import json
import time
from decimal import Decimal
from pathlib import Path

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.heads import save_head
from paceline.runner import load_model
from tests.space.common import adapter
from tests.tiny import tiny_model
from tests.unit.cli_helpers import save

SCRIPTS = Path(__file__).parents[2] / "bench"
ADD = "def add(a, b):\n    "
CHECK = "\n\ndef check(f):\n    assert f(2, 3) == 5\n\ncheck(add)\n"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return {name: importlib.import_module(name) for name in ("common", "space", "quality")}


@pytest.fixture
def quality(scripts):
    return scripts["quality"]


@pytest.fixture(scope="module")
def attached(model, tmp_path_factory) -> str:
    """A random adapter with a transition, saved for the tiny model."""
    made = adapter(num_masks=2, rank=2, transition_rank=4, max_position_embeddings=512)
    return str(save_head(tmp_path_factory.mktemp("adapter") / "random", made, load_model(model), {}, "a random one"))


@pytest.fixture
def prompts(tmp_path) -> str:
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps({"text": f"w{i} w9 w{i} w9 w{i}"}) + "\n" for i in (5, 8, 31)))
    return str(path)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 18", "18"),
        ("She makes 9 * 2 = $18.00.", "18"),
        ("2,125", "2125"),
        ("about $1,450,000 a year, not 7, 8", "8"),
        ("the loss is -$10", "-10"),
        ("the loss is $-10!", "-10"),
        ("x = -10.5", "-10.5"),
        ("16-3", "3"),
        ("- one\n- 4 eggs", "4"),
        ("**42**", "42"),
        ("1,2345", "2345"),
    ],
)
def test_the_last_number(quality, text, number):
    assert quality.last_number(text) == Decimal(number)


def test_no_number(quality):
    assert quality.last_number("none of them.") is None


def test_mcnemar_against_values_by_hand(quality):
    assert quality.mcnemar(0, 0) == quality.mcnemar(5, 5) == quality.mcnemar(1, 0) == 1.0
    assert quality.mcnemar(0, 5) == 2 / 32
    assert quality.mcnemar(9, 1) == quality.mcnemar(1, 9) == 2 * (1 + 10) / 1024
    assert quality.mcnemar(2, 6) == 2 * (1 + 8 + 28) / 256


@pytest.mark.parametrize(
    ("body", "passes"),
    [
        ("return a + b", True),
        ("return a - b", False),
        ("return a +", False),
        ("import os; os._exit(0)", False),  # leaves before its last line
        ("raise SystemExit(0)", False),
        ("return len(bytearray(1 << 34)) and a + b", False),  # more memory than it may have
        ("open('big', 'wb').write(bytes(1 << 22)); return a + b", False),
        ("import os; return a + b if not os.environ.get('PATH') and os.listdir() == ['candidate.py'] else 0", True),
    ],
)
def test_programs_are_judged(quality, body, passes):
    assert quality.runs(ADD + body + CHECK) is passes


@pytest.mark.parametrize("body", ["while True: pass", "import time; time.sleep(60)"])
def test_endless_programs_are_stopped(quality, body):
    begin = time.perf_counter()
    assert not quality.runs(ADD + body + CHECK, seconds=1.0)
    assert time.perf_counter() - begin < 20


def test_what_a_program_leaves_running_is_stopped(quality, tmp_path):
    sign = tmp_path / "still-there"
    child = f"import time, pathlib; time.sleep(0.7); pathlib.Path({str(sign)!r}).touch()"
    started = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])\n"
    quality.runs(started)  # who is no administrator may not even start it
    time.sleep(1.5)
    assert not sign.exists()


def test_what_is_asked_of_the_data_sets(quality, tmp_path):
    solved, code = tmp_path / "gsm8k.jsonl", tmp_path / "code.jsonl"
    rows = [{"question": f"q{i}", "answer": f"1 + 1\n#### {i},000"} for i in range(6)]
    solved.write_text("\n".join(map(json.dumps, rows)))
    asked = quality.gsm8k(solved, 3)
    assert [task.prompt[0]["content"] for task in asked.tasks] == ["q1", "q3", "q5"]
    assert asked.tasks[1].solves("so it is $3000.")
    assert not asked.tasks[1].solves("so it is 3.")
    task = {"task_id": "t", "prompt": ADD, "test": CHECK.replace("check(add)\n", ""), "entry_point": "add"}
    code.write_text(json.dumps(task))
    (one,) = quality.humaneval(code, None, run_code=True).tasks
    assert one.prompt == "def add(a, b):"
    assert one.solves("\n    return a + b")
    assert not one.solves("\n    return a * b")
    assert quality.humaneval(code, None, run_code=False).tasks[0].solves is None
    code.write_text(json.dumps({"prompt": ADD}))
    assert quality.main(["none", "none", "--humaneval", str(code)]) == 2


def test_a_model_agrees_with_itself_and_not_with_another(quality, model):
    llm, other = LLM(model), LLM(tiny_model("llama", seed=7, max_position_embeddings=512))
    for seed in (3, 4):
        ids = torch.randint(3, 97, (9,), generator=torch.Generator().manual_seed(seed)).tolist()
        answer = llm.generate([ids], SamplingParams(max_tokens=20, ignore_eos=True))[0].token_ids
        assert quality.ranked_first(llm, ids, answer) == 20
        assert quality.ranked_first(llm, ids, [*answer[:-1], (answer[-1] + 1) % 97]) == 19
        assert quality.ranked_first(other, ids, answer) < 10
    assert not any(llm.runner.cache.lengths)


@pytest.mark.usefixtures("unchecked_types")
def test_quality_as_a_whole(quality, model, tmp_path, capsys):
    solved, result = tmp_path / "gsm8k.jsonl", tmp_path / "result.json"
    solved.write_text("".join(json.dumps({"question": f"w5 w{i}", "answer": "#### 7"}) + "\n" for i in range(6, 9)))
    tuned = save(tmp_path / "tuned", tiny_model("llama", seed=7, max_position_embeddings=512))
    common = ["--gsm8k", str(solved), "--tokens", "12", "--batch", "2", "--json", str(result)]
    assert quality.main([model, model, *common]) == 0
    (row,) = json.loads(result.read_text())["rows"]
    assert (row["agreement"], row["identical"], row["p"]) == (1.0, 3, 1.0)
    assert quality.main([model, tuned, *common]) == 0
    (row,) = json.loads(result.read_text())["rows"]
    assert row["agreement"] < 0.5
    assert row["identical"] == 0
    assert row["only_original"] - row["only_tuned"] == row["original"] - row["tuned"]
    assert "| GSM8K, 3 |" in capsys.readouterr().out


@pytest.mark.usefixtures("unchecked_types")
def test_space_as_a_whole(scripts, model, attached, prompts, tmp_path, capsys):
    result = tmp_path / "result.json"
    sizes = "--num-prompts 3 --tokens 10 --temperatures 1 --k 1 2 3 --nodes 4 --depths 2 --batch 2 --weights int8"
    others = ["--no-transition", "--drafters", "lookup", "--draft-nodes", "3", "--json", str(result)]
    code = scripts["space"].main([model, attached, "--quick", "--suites", prompts, *sizes.split(), *others])
    told = capsys.readouterr()
    assert code == 0, told
    assert "left out: 3 in a row" in told.err
    rows = json.loads(result.read_text())["rows"]
    settings = ["k = 1", "k = 2", "4 nodes, 2 deep", "chain, cost model", "tree, cost model"]
    labels = ["plain", *[f"{name}, {one}" for name in ("space", "space without transition") for one in settings]]
    labels += ["lookup", "lookup, cost model"]
    assert [row["drafter"] for row in rows] == labels
    assert told.out.count("| 3 of 3 |") == len(rows)
    for row in rows:
        assert not row["differing"]
        assert row["mean_acceptance_length"] >= 1
        assert len(row["ratios"]) == 2
        if row["drafter"] == "plain":
            assert (row["mean_acceptance_length"], row["nodes"], row["speedup"]) == (1, 0, 1)
        if row["drafter"] == "space, k = 2":
            assert 1 < row["nodes"] <= 2


@pytest.mark.usefixtures("unchecked_types")
def test_space_tells_of_answers_that_differ(scripts, model, attached, prompts, monkeypatch, capsys):
    """The mutant: an engine that answers something else."""
    true = scripts["space"].engines_of

    def wrong(*given):
        made = true(*given)
        model = tiny_model("llama", seed=7, max_position_embeddings=512)
        return {**made, "another model": LLM(model, tokenizer=made["plain"].tokenizer)}

    monkeypatch.setattr(scripts["space"], "engines_of", wrong)
    quick = ["--quick", "--suites", prompts, "--tokens", "6", "--k", "1", "--nodes"]
    assert scripts["space"].main([model, attached, *quick]) == 1
    assert "another model differs (weights none, batch 1, temperature 0) on 1, " in capsys.readouterr().err


def test_a_transition_can_be_taken_off(scripts, model, attached):
    whole = adapter(num_masks=2, rank=2, transition_rank=4)
    bare = scripts["space"].without_transition(whole)
    assert bare.shift(torch.ones(1, 32)) is None
    assert whole.shift(torch.ones(1, 32)) is not None
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in bare.state_dict().items())
    assert scripts["space"].main([model, "smollm2-135m-medusa", "--quick"]) == 2
