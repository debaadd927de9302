"""What the command line refuses: exit codes and one-line errors."""

import os
from functools import partial
from pathlib import Path

import pytest

from paceline.system.files import read_stdin
from tests.cli.helpers import WORDS, answer, paceline, refusal, save
from tests.tiny import tiny_model

DIGITS = "9" * 5000


def test_usage_errors_have_status_2(model):
    assert "No such option" in refusal("generate", model, "--temprature", "1", code=2)
    assert "In Paceline it is --max-tokens." in refusal("generate", model, "--max-new-tokens", "1", code=2)
    assert "--drafter model:MODEL" in refusal("bench", model, "--model-draft", "other", code=2)
    assert "--n for the number" in refusal("generate", model, "-n", "8", code=2)
    assert "a folder has no revision" in refusal("generate", model, "-p", "w5", "--revision", "v1")
    assert "No such command" in refusal("generat", code=2)
    assert "In Paceline it is paceline chat MODEL." in refusal("run", code=2)
    assert "there is no prompt" in refusal("generate", model, code=2)
    assert "more than one prompt" in refusal("generate", model, "-p", "a", "-c", "b", code=2)
    assert "more than one prompt" in refusal("generate", model, "a", "-p", "b", code=2)
    both = ("-d", "lookup", "--speculative-config", "{}")
    assert "not both" in refusal("generate", model, "-p", "a", *both, code=2)
    assert "needs a drafter" in refusal("generate", model, "-p", "a", "-k", "3", code=2)
    twice = ("-d", "lookup", "-d", "self-int4")
    assert "--drafter lookup+self-int4" in refusal("generate", model, "-p", "a", *twice, code=2)
    assert "integer" in refusal("generate", model, "-p", "a", "--top-k", "many", code=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-p", "w5", "-d", "lokup"), "did you mean 'lookup'"),
        (("-p", "w5", "--speculative-config", "{method: ngram}"), "not valid JSON"),
        (("-p", "w5", "--speculative-config", '{"method": "ngram", "rejection_sample_method": "typical"}'), "lossy"),
        (("-p", ""), "the prompt is empty"),
        (("--token-ids", ""), "the prompt is empty"),
        (("--token-ids", "1,x"), "--token-ids cannot be read"),
        (("--token-ids", "1,97"), "no token id"),
        (("--prompt-file", "absent.txt"), "cannot be read"),
        (("-p", "w5", "--max-tokens", "0"), "max_tokens has a wrong value"),
        (("-p", "w5", "--logit-bias", "[1]"), '--logit-bias, for example {"42": -5}, has a wrong value'),
        (("-p", "w5", "--logit-bias", '{"5": "1"}'), "valid number"),
        (("-p", "w5", "--logit-bias", f'{{"5": {DIGITS}}}'), "--logit-bias is not valid JSON"),
        (("-p", "w5", "-d", "model:\udcff"), "surrogates"),
        (("-p", "w5 \udcff"), "half a character"),
        (("-p", "w5", "--stop", "\udcff"), "SamplingParams.stop"),
        (("--token-ids", DIGITS), "--token-ids cannot be read"),
        (("--prompt-file", "/dev/zero"), "not a regular file"),
        (("-p", "w5", "--image", "cat.png"), "No such file"),
        (("-p", "w5", "--dtype", "int3"), "unknown dtype"),
        (("-p", "w5", "--device", "toaster"), "unknown device"),
        (("-p", "w5", "--device", "cuda:99"), "no device 'cuda:99'"),
        (("-p", "w5 w6 w7 w8 w9", "--max-model-len", "5"), "the prompt fills the context"),
    ],
)
def test_what_generate_refuses(model, options, words):
    assert words in refusal("generate", model, *options)


@pytest.mark.parametrize(
    "command", [("serve", "none"), ("route", "--small", "a", "--large", "b", "--calibration", "c", "--allow-lossy")]
)
def test_an_empty_key_in_the_environment(command, monkeypatch):
    """It would let in everybody who sends an empty one."""
    monkeypatch.setenv("PACELINE_API_KEY", " ")
    assert "an API key is empty" in refusal(*command)


def test_prompts_that_never_end_or_are_no_text(model, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal("generate", model, "--prompt-file", str(tmp_path / "pipe"))
    assert "not a regular file" in refusal("generate", model, "-p", "w5", "--profile", str(tmp_path / "pipe"))
    (tmp_path / "bytes").write_bytes(b"w5 \xff")
    assert "is not text" in refusal("generate", model, "--prompt-file", str(tmp_path / "bytes"))
    monkeypatch.setattr("paceline.cli.generate.read_stdin", partial(read_stdin, max_bytes=4))
    for stdin, words in ((b"w5 \xff", "is not text"), (b"w5 w6 w7", "too large")):
        told = paceline("generate", model, "--prompt-file", "-", stdin=stdin)
        assert told.exit_code == 1
        assert words in told.stderr
    (tmp_path / "lines").write_bytes(b"w5\r\n")
    monkeypatch.undo()
    ended = answer("generate", model, "--prompt-file", str(tmp_path / "lines"), "--max-tokens", "2", "--seed", "1")
    assert (
        ended["token_ids"] == answer("generate", model, "-p", "w5\n", "--max-tokens", "2", "--seed", "1")["token_ids"]
    )


def test_a_template_that_refuses(tmp_path):
    folder = Path(save(tmp_path / "model", tiny_model("llama")))
    (folder / "chat_template.jinja").write_text("{{ raise_exception('System role not supported') }}")
    for command in (
        ("generate", "-c", "w5"),
        ("check", "-d", "lookup", "--no-distribution-test", "--prompts", "chats.jsonl"),
    ):
        (tmp_path / "chats.jsonl").write_text('{"question": "w5"}\n')
        given = [str(tmp_path / one) if one == "chats.jsonl" else one for one in command]
        assert "System role not supported" in refusal(given[0], str(folder), *given[1:])


def test_wrong_models_are_refused(tmp_path, model):
    asked = ("-p", "w5")
    assert "no model at" in refusal("generate", str(tmp_path / "absent"), *asked)
    assert "did you mean 'smollm2-135m'" in refusal("generate", "smollm2-135", *asked)
    other = save(tmp_path / "other", tiny_model("llama"), [*WORDS[:4], *WORDS[:3:-1]])
    assert "another tokenizer" in refusal("check", model, "-d", f"model:{other}", "--no-distribution-test")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            ("generate", "text.txt", "-p", "w5"),
            "is not a model. Got: a file whose name does not end in .gguf. Expected:",
        ),
        (("convert", "text.txt", "out"), "Got: a file that begins with b'w5 w'. Expected: a GGUF file."),
        (
            ("show", "text.txt"),
            "Got: expected value at line 1 column 1. Expected: a folder that `paceline bench` wrote",
        ),
    ],
)
def test_a_text_file_in_place_of_what_is_expected(command, words, tmp_path, monkeypatch):
    """It is said at once: nothing is asked of a hub."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("w5 w6\n")
    told = refusal(*command)
    assert words in told
    assert told.count("Got:") == 1


FOLDERS = {
    "bench": ("bench", "none", "--out"),
    "train": ("train", "eagle3", "model=none", "prompts=[p.jsonl]", "--out"),
    "index": ("index", "p.jsonl", "--model", "none", "--out"),
    "convert": ("convert", "none.gguf"),
    "export": ("export", "none", "--to", "vllm"),
}
FILES = {
    "tune": ("tune", "none", "--out"),
    "demo": ("demo", "none", "--svg"),
    "calibrate": ("calibrate", "none", "none", "--prompts", "p.jsonl", "--max-disagreement", "0.5", "--out"),
}


@pytest.mark.parametrize("command", [*FOLDERS, *FILES])
def test_an_out_that_cannot_be_written(command, tmp_path, monkeypatch):
    """A file in the place of a folder, the other way round, below a file, and without permission; nothing is loaded."""
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text("".join(f'{{"prompt": "w{i}"}}\n' for i in range(99)))
    Path("folder.json", "more").mkdir(parents=True)
    arguments = FOLDERS.get(command) or FILES[command]
    if command in FOLDERS:
        told = refusal(*arguments, "p.jsonl")
        assert "p.jsonl" in told
        assert "a file" in told
    else:
        assert "'folder.json' cannot be replaced. Got: a folder." in refusal(*arguments, "folder.json")
    assert "a file in the place of the folder" in refusal(*arguments, "p.jsonl/below/out.json")
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    assert "no permission for the folder" in refusal(*arguments, "new/out.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.json", "p.jsonl"]


def test_debug_lets_the_stack_trace_out(model):
    for arguments in (("--debug", "generate", model, "-p", ""), ("generate", model, "-p", "", "--debug")):
        result = paceline(*arguments)
        assert result.exit_code == 1
        assert type(result.exception).__name__ == "ConfigError"


def test_other_failures_are_told_in_one_line(model, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("paceline.llm.LLM.stream", fail)
    assert "Unexpected RuntimeError: first line. This is a bug" in refusal("generate", model, "-p", "w5")

    def full(*arguments):
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr("paceline.llm.LLM.stream", full)
    assert refusal("generate", model, "-p", "w5") == "Error: No space left on device: somewhere."
