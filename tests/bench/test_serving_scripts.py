"""Clients of the OpenAI API that are installed here, and a short soak, against servers with tiny models."""

import json
import subprocess
import sys

import pytest

from tests.bench.conftest import SCRIPTS
from tests.server.helpers import TEMPLATE, listening
from tests.structured.common import byte_tokenizer
from tests.tiny import tiny_model

SCRIPT = "clients"
CLIENTS = ("openai", "langchain", "llama_index", "litellm", "instructor", "curl", "openai_node", "ai_sdk")


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client(name, script):
    assert {client.__name__ for client in script.CLIENTS} == {*CLIENTS}
    with listening() as (url, _, service):
        service.defaults["logit_bias"] = {85: -100.0}  # no endless blanks in forms
        at = script.Target(f"{url}/v1", "none")
        at.find_model()
        try:
            getattr(script, name)(at)
        except ImportError as error:
            pytest.skip(f"not installed: {error}")
    assert at.rows
    assert not [row for row in at.rows if row[2] != "passed"]


def test_a_check_that_fails_is_seen(script):
    at = script.Target("", "")
    with at.check("a", "b"):
        raise ValueError("c")
    assert at.rows == [("a", "b", "FAILED: ValueError: c")]


@pytest.mark.slow
def test_a_soak(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    tiny_model("llama", max_position_embeddings=2048).save_pretrained(tmp_path)
    command = [sys.executable, SCRIPTS / "soak.py", tmp_path, "--minutes", "0.2", "--log", tmp_path / "log"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=500)
    told = json.loads(made.stdout.splitlines()[-1])
    assert told["faults"] == []
    assert made.returncode == 0
    kinds = {kind.split()[0] for kind in told["counts"]}
    assert kinds == {"whole", "stream", "slow", "leave", "nonsense", "raw"}
