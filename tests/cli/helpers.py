"""The command line called in this process, and saved models small enough for it."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.measure.results import SavedResults, open_results

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(4, 97))]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
GENERATE = ("--prompt", "w5 w9 w5 w9", "--max-tokens", "12")


def save(folder: Path, model, words=WORDS) -> str:
    model.save_pretrained(folder)
    whole = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=whole, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    ).save_pretrained(folder)
    return str(folder)


def paceline(*arguments: str, stdin: str | bytes | None = None, env: dict[str, str] | None = None):
    return CliRunner().invoke(app, list(arguments), input=stdin, env=env)


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


def saved(told: dict[str, object], file: Path) -> SavedResults:
    """What a command printed with --json, as `paceline plot` reads it."""
    file.write_text(json.dumps(told))
    return open_results(file)
