"""The command line as a user meets it: JSON contracts, exit codes, one-line errors, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration
from typer.testing import CliRunner

from paceline import zoo
from paceline.cli import app
from tests.tiny import tiny_model

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(4, 97))]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def save(folder: Path, model, words=WORDS) -> str:
    model.save_pretrained(folder)
    whole = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=whole, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    # Long enough a context for an answer that someone can interrupt.
    return save(tmp_path_factory.mktemp("tiny"), tiny_model("llama", max_position_embeddings=50_000))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Models this small only lose time to a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def paceline(*arguments: str, stdin: str | None = None):
    return CliRunner().invoke(app, list(arguments), input=stdin)


def answer(*arguments: str, code: int = 0, stdin: str | None = None) -> dict:
    """The one line of JSON on stdout."""
    result = paceline(*arguments, "--json", stdin=stdin)
    assert result.exit_code == code, result.output
    assert len(result.stdout.splitlines()) == 1
    return json.loads(result.stdout)


def refusal(*arguments: str, code: int = 1) -> str:
    """The one message on stderr, on one line."""
    result = paceline(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.output
    if code == 1:
        assert result.stderr.startswith("Error: ")
        assert len(result.stderr.splitlines()) == 1, result.stderr
    return " ".join(result.stderr.replace("│", " ").split())


GENERATE = ("--prompt", "w5 w9 w5 w9", "--max-tokens", "12")


# What every command gives


@pytest.mark.parametrize("command", ["demo", "generate", "check", "models", "pull"])
def test_every_command_has_help_with_an_example(command):
    result = paceline(command, "--help")
    assert result.exit_code == 0
    assert "Example:" in result.stdout


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
    assert plain["numerics"] == "fast"


def test_a_stream_says_the_text_on_stdout_and_the_rest_on_stderr(model):
    expected = answer("generate", model, *GENERATE)["text"]
    for options in ((), ("--no-stream",)):
        result = paceline("generate", model, *GENERATE, *options)
        assert result.stdout.strip() == expected.strip()
        assert "tokens a pass" in result.stderr
    coloured = paceline("generate", model, *GENERATE, "--color", "-d", "lookup")
    assert "\x1b[" in coloured.stdout
    assert "plain step" in coloured.stderr or "correction" in coloured.stderr


def test_demo_json(model):
    got = answer("demo", model, "--max-tokens", "8", "--num-prompts", "2")
    keys = ["model", "drafter", "plain_tokens_per_s", "speculative_tokens_per_s", "speedup", "mean_acceptance_length"]
    assert set(keys) <= got.keys()
    assert got["identical"] is True
    assert got["drafter"] == "lookup"
    assert len(got["prompts"]) == 2
    assert got["prompts"][0]["identical"] is True
    assert got["provenance"]["torch"] == torch.__version__
    assert got["speedup"] == pytest.approx(got["speculative_tokens_per_s"] / got["plain_tokens_per_s"])


def test_demo_for_people(model):
    result = paceline("demo", model, "--max-tokens", "8", "--num-prompts", "1")
    assert result.exit_code == 0
    assert "with speculation" in result.stdout
    assert "token-identical" in result.stdout.replace("\n", " ")


def test_check_json(model, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "w5 w9 w5"}\n{"turns": ["w8 w8"]}\n')
    got = answer("check", model, "--prompts", str(file), "--max-tokens", "12", "-d", "lookup")
    assert got["verdicts"]["bug"] == 0
    assert sum(got["verdicts"].values()) == len(got["prompts"]) == 4
    assert got["law_test"]["passed"] is True
    assert got["law_test"]["p_value"] > 1e-6
    assert got["law_test"]["samples"] >= 1000
    assert (got["passed"], got["lossless"], got["drafter"]) == (True, True, "lookup")
    assert {"numerics", "model", "mean_acceptance_length", "provenance"} <= got.keys()
    assert {"verdict", "temperature", "position", "gap", "noise"} <= got["prompts"][0].keys()


def test_check_fails_with_status_1(model, monkeypatch):
    from paceline.checks.verdict import Verdict

    monkeypatch.setattr("paceline.check.classify", lambda divergence, measured: (Verdict.BUG, "planted"))
    options = ("--num-prompts", "1", "--max-tokens", "4", "--no-law-test", "-t", "0")
    got = answer("check", model, *options, code=1)
    assert got["verdicts"] == {"identical": 0, "near_tie": 0, "bug": 1}
    assert got["law_test"] is None
    result = paceline("check", model, *options)
    assert result.exit_code == 1
    assert "failed" in result.stdout


def test_models_and_pull(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    (entry,) = answer("models")["models"]
    assert (entry["name"], entry["pulled"], entry["licence"]) == ("smollm2-135m", False, "Apache-2.0")
    assert "smollm2-135m" in paceline("models").stdout
    folder = tmp_path / "models" / "smollm2-135m"
    folder.mkdir(parents=True)
    monkeypatch.setattr(zoo, "pull", lambda name, cache_dir, progress, force: folder)
    assert answer("pull", "smollm2-135m")["folder"] == str(folder)
    assert paceline("pull", "smollm2-135m").stdout.strip() == str(folder)


# What is refused


def test_usage_errors_have_status_2(model):
    assert "No such option" in refusal("generate", model, "--temprature", "1", code=2)
    assert "No such command" in refusal("generat", code=2)
    assert "there is no prompt" in refusal("generate", model, code=2)
    assert "more than one prompt" in refusal("generate", model, "-p", "a", "-c", "b", code=2)
    both = ("-d", "lookup", "--speculative-config", "{}")
    assert "not both" in refusal("generate", model, "-p", "a", *both, code=2)
    assert "needs a drafter" in refusal("generate", model, "-p", "a", "-k", "3", code=2)
    assert "integer" in refusal("generate", model, "-p", "a", "--top-k", "many", code=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-p", "w5", "-d", "lokup"), "did you mean 'lookup'"),
        (("-p", "w5", "--speculative-config", "{method: ngram}"), "not valid JSON"),
        (("-p", "w5", "--speculative-config", '{"metod": "ngram"}'), "did you mean 'method'"),
        (("-p", "w5", "--speculative-config", '{"method": "ngram", "rejection_sample_method": "typical"}'), "lossy"),
        (("-p", ""), "the prompt is empty"),
        (("--token-ids", ""), "the prompt is empty"),
        (("--token-ids", "1,x"), "--token-ids cannot be read"),
        (("--token-ids", "1,97"), "no token id"),
        (("--prompt-file", "absent.txt"), "cannot be read"),
        (("-p", "w5", "-t", "-1"), "temperature is out of range"),
        (("-p", "w5", "--max-tokens", "0"), "max_tokens is out of range"),
        (("-p", "w5", "--logit-bias", "[1]"), "--logit-bias cannot be read"),
        (("-p", "w5", "--logit-bias", '{"970": 1}'), "names no token"),
        (("-p", "w5", "--image", "cat.png"), "is a text model"),
        (("-p", "w5", "--dtype", "int3"), "unknown dtype"),
        (("-p", "w5", "--device", "toaster"), "unknown device"),
        (("-p", "w5", "--device", "cuda:99"), "no device 'cuda:99'"),
        (("-p", "w5 w6 w7 w8 w9", "--max-model-len", "5"), "the prompt fills the context"),
    ],
)
def test_what_generate_refuses(model, options, words):
    assert words in refusal("generate", model, *options)


def test_wrong_models_are_refused(tmp_path, model):
    asked = ("-p", "w5")
    assert "no model at" in refusal("generate", str(tmp_path / "absent"), *asked)
    assert "did you mean 'smollm2-135m'" in refusal("generate", "smollm2-135", *asked)
    T5ForConditionalGeneration(
        T5Config(d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2, vocab_size=97)
    ).save_pretrained(tmp_path / "t5")
    assert "not a causal language model" in refusal("generate", str(tmp_path / "t5"), *asked)
    (tmp_path / "clip").mkdir()
    (tmp_path / "clip" / "config.json").write_text('{"model_type": "clip"}')
    assert "not a causal language model" in refusal("demo", str(tmp_path / "clip"))
    other = save(tmp_path / "other", tiny_model("llama"), [*WORDS[:4], *WORDS[:3:-1]])
    assert "different tokenizers" in refusal("check", model, "-d", f"model:{other}", "--no-law-test")


def test_damaged_weights_are_refused(tmp_path):
    broken = tiny_model("llama")
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    assert "NaN or infinite logits" in refusal("generate", save(tmp_path / "nan", broken), "-p", "w5")
    folder = Path(save(tmp_path / "cut", tiny_model("llama")))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert "cannot be read" in refusal("generate", str(folder), "-p", "w5")


def test_debug_lets_the_stack_trace_out(model):
    for arguments in (("--debug", "generate", model, "-p", ""), ("generate", model, "-p", "", "--debug")):
        result = paceline(*arguments)
        assert result.exit_code == 1
        assert type(result.exception).__name__ == "ConfigError"


def test_other_failures_are_told_in_one_line(model, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("paceline.llm.LLM.stream", fail)
    assert "Unexpected RuntimeError: first line. This is a fault" in refusal("generate", model, "-p", "w5")

    def full(*arguments):
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr("paceline.llm.LLM.stream", full)
    assert refusal("generate", model, "-p", "w5") == "Error: No space left on device: somewhere."


# As a process


def start(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "paceline", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


ENDLESS = ("-p", "w5", "--max-tokens", "40000", "--ignore-eos", "--numerics", "fast")


def test_ctrl_c_ends_a_stream_politely(model):
    process = start("generate", model, *ENDLESS)
    assert process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.decode().strip() == "Stopped."


def test_a_closed_pipe_is_silent(model):
    process = start("generate", model, *ENDLESS)
    assert process.stdout.read(20)
    process.stdout.close()
    errors = process.stderr.read()
    process.wait(timeout=30)
    assert errors == b""


def test_help_answers_at_once():
    begin = time.perf_counter()
    process = start("--help")
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert b"speculative" in out
    assert time.perf_counter() - begin < 5  # half a second on an idle machine
    loaded = "import sys, paceline.cli; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", loaded]).split() == [b"False", b"False"]
