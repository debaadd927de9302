"""What every command of the command line gives: its help, its JSON contract, its text for people."""

import re
from functools import partial

import pytest
import torch
from typer.main import get_command

from paceline import zoo
from paceline.cli.app import app
from paceline.cli.screen import Screen, duration
from paceline.measure.distribution_test import distribution_test
from tests.cli.helpers import GENERATE, answer, paceline, refusal, saved


@pytest.mark.parametrize("command", sorted(get_command(app).commands))
def test_every_command_has_help_with_an_example(command):
    result = paceline(command, "--help")
    assert result.exit_code == 0
    assert "Example:" in result.stdout


@pytest.mark.parametrize("command", [None, *sorted(get_command(app).commands)])
def test_help_in_80_columns_cuts_no_name(command):
    whole = get_command(app) if command is None else get_command(app).commands[command]
    text = paceline(*([command] if command else []), "--help", env={"COLUMNS": "80"}).stdout
    shown = [one for one in whole.params if not getattr(one, "hidden", False)]
    names = {name for one in shown for name in (*one.opts, *one.secondary_opts) if name.startswith("-")}
    assert names <= set(re.findall(r"(?<![\w-])--?\w[\w-]*", text))
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_shell_can_complete():
    asked = {"_PACELINE_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    assert paceline(env={**asked, "COMP_WORDS": "paceline do"}).stdout.split() == ["doctor"]
    words = paceline(env={**asked, "COMP_WORDS": "paceline generate --poli", "COMP_CWORD": "2"}).stdout.split()
    assert words == ["--policy"]
    # As --show-completion, which looks for the shell among the processes above.
    assert "complete_bash" in paceline(env={"_PACELINE_COMPLETE": "source_bash"}).stdout


def test_generate_json(model):
    got = answer("generate", model, *GENERATE, "--drafter", "lookup", "--logprobs", "2")
    plain = answer("generate", model, *GENERATE)
    assert got["token_ids"] == plain["token_ids"]
    assert got["text"] == plain["text"]
    assert len(got["token_ids"]) == len(got["origins"]) == len(got["logprobs"])
    assert set(plain["origins"]) == {"plain"}
    assert len(got["logprobs"][0]["top"]) == 2
    assert (got["lossless"], got["exact"], got["model"], got["drafter"]) == (True, True, model, "lookup")
    assert got["numerics"] in ("fast", "invariant")
    assert got["finish_reason"] in ("stop", "length")
    assert got["tokens_per_s"] > 0
    assert got["mean_acceptance_length"] >= 1
    assert {"prefill", "draft", "verify", "rest", "decode", "rounds"} <= got["timings"].keys()
    assert got["num_prompt_tokens"] == 4


def test_the_four_ways_to_give_a_prompt(model, tmp_path):
    file = tmp_path / "p.txt"
    file.write_text("w5 w9 w5 w9")
    by_text = answer("generate", model, *GENERATE)["token_ids"]
    few = ("--max-tokens", "12")
    assert answer("generate", model, "--prompt-file", str(file), *few)["token_ids"] == by_text
    assert answer("generate", model, "--prompt-file", "-", *few, stdin="w5 w9 w5 w9")["token_ids"] == by_text
    assert answer("generate", model, "--chat", "w5 w9 w5 w9", *few)["token_ids"] == by_text
    assert answer("generate", model, "--token-ids", "5,9,5, 9", *few)["token_ids"] == by_text


def test_sampling_is_reproducible_and_takes_every_option(model):
    options = ["-t", "0.9", "--top-k", "40", "--top-p", "0.95", "--min-p", "0.01", "--seed", "5", "--n", "2"]
    options += ["--repetition-penalty", "1.1", "--presence-penalty", "0.1", "--frequency-penalty", "0.1"]
    options += ["--no-repeat-ngram-size", "4", "--logit-bias", '{"7": -5, "8": 2.5}', "--bad-word", "w30"]
    options += ["--min-tokens", "2", "--stop", "w31", "--stop-token-id", "32", "--ignore-eos", "--threads", "1"]
    options += ["--dtype", "float32", "--device", "cpu", "--max-model-len", "100", "--numerics", "fast"]
    plain = answer("generate", model, *GENERATE, *options)
    drafted = answer("generate", model, *GENERATE, *options, "-d", "lookup", "-k", "3")
    assert [one["token_ids"] for one in plain["outputs"]] == [one["token_ids"] for one in drafted["outputs"]]
    assert len(plain["outputs"]) == 2
    assert plain["seed"] == 5
    assert plain["numerics"] == "invariant"  # native passes know no other
    options[options.index("float32")] = "float64"
    assert answer("generate", model, *GENERATE, *options)["numerics"] == "fast"


def test_a_stream_says_the_text_on_stdout_and_the_rest_on_stderr(model):
    expected = answer("generate", model, *GENERATE)["text"]
    for options in ((), ("--no-stream",)):
        result = paceline("generate", model, *GENERATE, *options)
        assert result.stdout.strip() == expected.strip()
        assert "tokens a pass" in result.stderr
        assert "seed" not in result.stderr, "a greedy answer has no use for one"
    drawn = paceline("generate", model, *GENERATE, "-t", "1")
    (seed,) = re.findall(r"seed (\d{1,10})\n", drawn.stderr)
    assert paceline("generate", model, *GENERATE, "-t", "1", "--seed", seed).stdout == drawn.stdout
    coloured = paceline("generate", model, *GENERATE, "--color", "-d", "lookup")
    assert "\x1b[" in coloured.stdout
    assert "plain step" in coloured.stderr or "correction" in coloured.stderr


def test_demo_json(model, tmp_path):
    got = answer("demo", model, "--max-tokens", "8", "--num-prompts", "2")
    keys = ["model", "drafter", "plain_tokens_per_s", "speculative_tokens_per_s", "speedup", "mean_acceptance_length"]
    assert set(keys) <= got.keys()
    assert got["identical"] is True
    assert got["drafter"] == "lookup"
    assert len(got["prompts"]) == 2
    assert got["prompts"][0]["identical"] is True
    assert got["provenance"]["torch"] == torch.__version__
    assert got["speedup"] == pytest.approx(got["speculative_tokens_per_s"] / got["plain_tokens_per_s"])
    (run,) = saved(got, tmp_path / "demo.json").runs
    assert (run.drafter, run.speedup, run.tokens_per_s) == ("lookup", got["speedup"], got["speculative_tokens_per_s"])


def test_demo_for_people(model, tmp_path):
    svg = tmp_path / "demo.svg"
    for _ in range(2):  # its own file may be replaced
        result = paceline("demo", model, "--max-tokens", "8", "--num-prompts", "1", "--svg", str(svg))
    assert result.exit_code == 0
    assert svg.read_text().startswith("<svg")
    assert "token-identical" in svg.read_text().replace("&#160;", " ")
    svg.write_text("<svg>mine</svg>")
    assert "did not write it" in refusal("demo", model, "--svg", str(svg))
    assert "with speculation" in result.stdout
    assert "token-identical" in result.stdout.replace("\n", " ")


def test_check_json(model, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.measure.check.distribution_test", partial(distribution_test, samples=200))
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "w5 w9 w5"}\n{"turns": ["w8 w8"]}\n')
    got = answer("check", model, "--prompts", str(file), "--max-tokens", "12", "-d", "lookup")
    assert got["verdicts"]["bug"] == 0
    assert sum(got["verdicts"].values()) == len(got["prompts"]) == 4
    assert got["distribution_test"]["passed"] is True
    assert got["distribution_test"]["p_value"] > 1e-6
    assert got["distribution_test"]["samples"] == 200
    assert (got["passed"], got["lossless"], got["drafter"]) == (True, True, "lookup")
    assert {"numerics", "model", "mean_acceptance_length", "provenance"} <= got.keys()
    assert {"verdict", "temperature", "position", "measured"} <= got["prompts"][0].keys()
    assert got["num_references"] == sum(one["measured"] is not None for one in got["prompts"]) == 4
    assert got["prompts"][0]["measured"]["speculative"]["typical"] < 2
    (run,) = saved(got, tmp_path / "check.json").runs
    assert (run.drafter, run.verdicts) == ("lookup", got["verdicts"])


def test_check_says_what_it_does_before_it_begins(model, monkeypatch):
    said = []
    monkeypatch.setattr("paceline.measure.check.check", lambda *given, **options: said.append("began") or 1 / 0)
    monkeypatch.setattr("paceline.cli.screen.Screen.say", lambda screen, text: said.append(text))
    paceline("check", model, "--num-prompts", "2", "--max-tokens", "12")
    assert said[-1] == "began"
    assert "4 answers of up to 12 tokens" in said[-2]
    assert re.search(r"up to about \d+ seconds", said[-2])


def test_without_a_terminal_stages_are_told_in_lines(capsys, monkeypatch):
    monkeypatch.setattr("paceline.cli.screen.LINE_EVERY_S", 0.0)
    with Screen().stages() as report:
        report("measuring", 1, 2)
        report("downloading", 3, None, "MB")
    assert capsys.readouterr().err == "measuring: 1 of 2\ndownloading: 3, MB\n"
    assert [duration(seconds) for seconds in (3, 65, 91, 5500)] == ["10 seconds", "70 seconds", "2 minutes", "2 hours"]


def test_check_fails_with_status_1(model, monkeypatch):
    from paceline.measure.check import Verdict

    monkeypatch.setattr("paceline.measure.check.classify", lambda *given: (Verdict.BUG, "planted"))
    options = ("--num-prompts", "1", "--max-tokens", "4", "--no-distribution-test", "-t", "0")
    got = answer("check", model, *options, code=1)
    assert got["verdicts"] == {"identical": 0, "near_tie": 0, "bug": 1}
    assert got["distribution_test"] is None
    result = paceline("check", model, *options)
    assert result.exit_code == 1
    assert "failed" in result.stdout


def test_a_drafter_that_drafted_nothing_is_reported(model, tmp_path):
    told = "nothing was drafted: the drafter found nothing to propose"
    idle = ("-d", "prediction", "--max-tokens", "12")  # without a prediction
    assert told in paceline("generate", model, "-p", "w5 w9", *idle).stderr
    assert "nothing was drafted" not in paceline("generate", model, "-p", "w5 w9", "--max-tokens", "12").stderr
    for command in ("demo", "check", "bench"):
        more = ("--out", str(tmp_path / "r")) if command == "bench" else ("--no-distribution-test",)
        more = () if command == "demo" else more
        text = paceline(command, model, *idle, "--num-prompts", "1", *more).stdout
        assert told in " ".join(text.split()).lower()


def test_models_and_pull(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    entry = next(row for row in answer("models")["models"] if row["name"] == "smollm2-135m")
    assert (entry["name"], entry["pulled"], entry["licence"]) == ("smollm2-135m", False, "Apache-2.0")
    narrow = paceline("models", env={"COLUMNS": "20"}).stdout.split()
    heads = {f"head:{one['name']}" for one in answer("models")["heads"]}
    assert {"smollm2-135m", "ouroboros:model:PATH_OR_ID[@int4]", *heads} <= set(narrow)
    folder = tmp_path / "models" / "smollm2-135m"
    folder.mkdir(parents=True)
    monkeypatch.setattr(zoo, "pull", lambda name, cache_dir, progress, force: folder)
    assert answer("pull", "smollm2-135m")["folder"] == str(folder)
    assert paceline("pull", "smollm2-135m").stdout.strip() == str(folder)
