"""Where a number came from can be told on any machine, and hashes do not depend on luck."""

import hashlib
import json
import platform
from pathlib import Path

import torch

from paceline.system.provenance import hash_prompts, provenance, sha256_of


def test_provenance_is_json_and_names_the_machine():
    told = json.loads(json.dumps(provenance()))
    assert told["python"] == platform.python_version()
    assert told["torch"] == torch.__version__
    assert told["threads"] == torch.get_num_threads()
    assert told["cores"] >= 1
    assert told["memory_bytes"] is None or told["memory_bytes"] > 1 << 28
    assert told["time"].endswith("+00:00")
    assert isinstance(told["command"], list)
    checkout = (Path(__file__).parents[2] / ".git").exists()
    assert len(told["git_commit"] or "") == (40 if checkout else 0)


def test_sha256_of_matches_hashlib(tmp_path):
    data = bytes(range(256)) * 10_000
    path = tmp_path / "data"
    path.write_bytes(data)
    assert sha256_of(path) == sha256_of(str(path)) == hashlib.sha256(data).hexdigest()


def test_hash_prompts_sees_order_and_boundaries():
    assert hash_prompts(["ab", "c"]) == hash_prompts(["ab", "c"])
    lists = [["ab", "c"], ["a", "bc"], ["c", "ab"], ["abc"], ["abc", ""], [], ["\ud800"]]
    assert len({hash_prompts(prompts) for prompts in lists}) == len(lists)
