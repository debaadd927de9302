"""vLLM's options on the command line, and what is said of names that nobody knows here."""

import json
import shlex

import pytest
from typer.main import get_command

from paceline.cli.app import _suggest, app
from paceline.cli.options import token_count
from paceline.integrations.other_names import OPTIONS
from paceline.integrations.vllm_options import ENGINE, SERVER, as_flag
from paceline.server import run
from tests.cli.helpers import answer, paceline, refusal
from tests.other_engines import CONSTRUCTOR, FURTHER, USUAL

COMMANDS = get_command(app).commands
HARMLESS = shlex.split(
    "--gpu-memory-utilization 0.9 --enforce-eager --swap-space 4 --load-format auto --tensor-parallel-size 1 -pp 1 "
    "--enable-auto-tool-choice --disable-log-requests --block-size 16 "
    "--max-num-batched-tokens 8k --enable-chunked-prefill --no-enable-log-requests --uvicorn-log-level info -O3 "
    "--distributed-executor-backend mp --chat-template-content-format auto --task generate --max-logprobs 20"
)
HONOURED = shlex.split(
    "--tool-call-parser mistral --reasoning-parser qwen3 --max-model-len 8k --seed 0 --served-model-name m "
    "--generation-config vllm --trust-remote-code --dtype auto "
    "--no-enable-prefix-caching --max-num-seqs 4 --api-key k --revision main --tokenizer t --chat-template {{x}}"
)


@pytest.fixture
def bound(monkeypatch):
    def bind(*address):
        raise OSError("enough")

    monkeypatch.setattr(run, "bind", bind)


@pytest.mark.usefixtures("bound")
def test_what_changes_nothing_is_accepted_with_one_line():
    told = paceline("serve", "none", *HARMLESS, *HONOURED)
    line, end = told.stderr.splitlines()
    assert end == "Error: enough."
    assert line.startswith("These options change nothing here: --")
    named = {word.strip(",.") for word in line.split() if word.startswith("--")}
    assert {word for word in HARMLESS if word.startswith("--")} - {"--no-enable-log-requests"} <= named
    assert not named & {*HONOURED, "--enable-prefix-caching"}
    assert paceline("serve", "none", *HONOURED).stderr == "Error: enough.\n"


def test_what_matters_is_refused_all_at_once(tmp_path):
    wrong = "--tensor-parallel-size 2 --lora-modules a=b --quantization awq --enable-lora"
    told = refusal("serve", "none", *HARMLESS[:3], *wrong.split(), "-dp", "2")
    for word in ("--tensor-parallel-size 2", "--data-parallel-size 2", "--lora-modules", "merge", "--weights (int8",
                 "--engine vllm"):  # fmt: skip
        assert word in told
    file = tmp_path / "serve.yaml"
    file.write_text("model: none\ngpu-memory-utilization: 0.9\nlora-modules: x\nenable_lora: true\n")
    told = refusal("serve", "--config", str(file))
    assert "--lora-modules" in told
    assert "--enable-lora" in told
    file.write_text("model: none\nmax-model-length: 3\n")
    assert "gpu_memory_utilization" not in refusal("serve", "--config", str(file))


def test_every_option_of_the_table_is_read_and_none_is_shown():
    command = COMMANDS["serve"]
    for name, option in (ENGINE | SERVER).items():
        words = [as_flag(name)] if option.is_flag else [as_flag(name), "1"]
        given = command.make_context("serve", ["MODEL", *words]).params
        assert given[name] in (True, "1", 1)
    own = {"nnodes", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"}
    own |= {"served_model_name", "override_generation_config", "reasoning_parser"}
    for name, shown in (("serve", own), ("generate", set())):
        hidden = {one.name for one in COMMANDS[name].params if getattr(one, "hidden", False)}
        assert {*ENGINE, *(SERVER if name == "serve" else ())} - hidden == shown
    assert "gpu-memory" not in paceline("serve", "--help").stdout
    assert "changes nothing here" in refusal("bench", "none", "--swap-space", "4", code=2)


def test_vllm_gets_its_own_options(model):
    words = json.loads(
        paceline("serve", model, "--json", "--engine", "vllm", "--print", *HARMLESS, "--no-enable-prefix-caching",
                 "--lora-modules", "a=b", "--seed", "3", "--max-model-len", "8K").stdout
    )["command"]  # fmt: skip
    for word in ("--enforce-eager", "--no-enable-prefix-caching", "--lora-modules", "a=b", "--seed", "8192"):
        assert word in words
    assert words[words.index("--gpu-memory-utilization") + 1] == "0.9"


def test_generate_reads_the_engines_options(model):
    plain = answer("generate", model, "-p", "w5 w9", "--max-tokens", "4")
    options = ("--gpu-memory-utilization", "0.9", "--enforce-eager", "--max-model-len", "1k", "--tokenizer", model)
    assert answer("generate", model, "-p", "w5 w9", "--max-tokens", "4", *options)["token_ids"] == plain["token_ids"]
    assert "--enable-lora" in refusal("generate", model, "-p", "w5", "--enable-lora", "--quantization", "awq")


@pytest.mark.parametrize(
    ("text", "count"),
    [("8192", 8192), ("8k", 8000), ("8K", 8192), ("25.6k", 25600), ("1m", 10**6), ("1M", 1 << 20), ("auto", None),
     ("-1", None)],
)  # fmt: skip
def test_numbers_of_tokens_as_vllm_reads_them(text, count):
    assert token_count(text) == count


@pytest.mark.parametrize("text", ["0", "8q", "1.0005k", "k", "", "-5", "9" * 5000, "1e3"])
def test_what_is_no_number_of_tokens(model, text):
    assert "no number of tokens" in refusal("generate", model, "-p", "w5", f"--max-model-len={text}", code=2)


def test_system_messages_and_chat_templates(model, tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{% for m in messages %}{{ m['role'] }} w7 {{ m['content'] }} {% endfor %}")
    chat = ("generate", model, "--chat", "w5 w9", "--max-tokens", "2")
    with_system = answer(*chat, "--system", "w8 w8")
    assert with_system["token_ids"] == answer("generate", model, "-p", "w8 w8w5 w9", "--max-tokens", "2")["token_ids"]
    assert answer(*chat)["num_prompt_tokens"] == 2
    assert answer(*chat, "--chat-template", str(file))["num_prompt_tokens"] == 4
    assert answer(*chat, "--chat-template", "{{ messages[0]['content'] }} w4")["num_prompt_tokens"] == 3
    assert "cannot be read" in refusal(*chat, "--chat-template", "{% for")
    assert "cannot be read" in refusal(*chat, "--chat-template", "none.jinja")
    assert "--system goes with --chat" in refusal("generate", model, "-p", "w5", "--system", "w8", code=2)


def said_of(command, words: list[str]) -> str:
    try:
        command.make_context("x", words)
    except Exception as error:
        if hasattr(error, "format_message"):
            _suggest(error)
            return error.format_message()
    return ""


CLI = (
    "--ctx-size --n-gpu-layers --mmproj --flash-attn --mlock --no-mmap --cache-type-k --jinja --keep --lora --temp "
    "--rope-freq-base --hf-repo --parallel --alias --batch-size --ubatch-size --cont-batching --grammar --in-prefix "
    "--multiline-input --verbose --log-disable --no-warmup --lora-scaled --predict --mirostat --samplers --typical "
    "--mem-fraction-static --tp --context-length --model-path --chunked-prefill-size --num-shard --max-input-tokens"
)


@pytest.mark.parametrize("name", ["serve", "generate", "bench", "convert"])
def test_a_suggestion_never_has_another_meaning(name):
    found = {}
    for word in [*map(as_flag, [*CONSTRUCTOR, *USUAL, *FURTHER]), *CLI.split()]:
        said = said_of(COMMANDS[name], ["MODEL", word])
        if "Did you mean" in said or "Possible options" in said:
            found[word] = said
    assert found in ({}, {"--tp": "No such option: --tp. Did you mean '-tp'?"})


def test_commands_of_others():
    words = "complete run run-batch collect-env download env list ps push rm cp create stop launch add-new-model-like"
    found = {}
    for word in words.split():
        said = " ".join(paceline(word).stderr.replace("│", " ").split())
        assert f"No such command: {word}." in said
        assert ("In Paceline it is" in said) is (word in OPTIONS)
        found |= {word: said} if "Did you mean" in said else {}
    assert found == {}
    assert "Did you mean 'generate'?" in refusal("generat", code=2)
