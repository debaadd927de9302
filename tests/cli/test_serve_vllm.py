"""`paceline serve --engine vllm --print`: the command, and what is refused by name before anything starts."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import answer, paceline, refusal
from tests.config.test_engine_flags import flags


def command(model: str, *options: str) -> list[str]:
    result = paceline("serve", model, "--json", "--engine", "vllm", "--print", *options)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["command"]


def after(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_the_same_options_in_vllms_words(model):
    words = command(
        model, "--port", "9", "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "3",
        "--allow-origin", "http://a", "--allow-image-hosts", "b", "--weights", "fp8", "--", "--enforce-eager",
    )  # fmt: skip
    assert words[:3] == ["vllm", "serve", model]
    found = {name: after(words, name) for name in words if name.startswith("--") and name != words[-1]}
    assert found == {
        "--host": "127.0.0.1", "--port": "9", "--served-model-name": model.rpartition("/")[2], "--dtype": "float32",
        "--max-model-len": "512", "--max-num-seqs": "3", "--allowed-origins": '["http://a"]',
        "--allowed-media-domains": "b", "--quantization": "fp8",
    }  # fmt: skip
    assert words[-1] == "--enforce-eager"


def test_without_a_drafter_vllm_does_not_draft(model):
    assert "--speculative-config" not in command(model)


@pytest.mark.parametrize(
    ("drafter", "label"), [("lookup", "lookup"), ("suffix", "suffix"), ("model:{}", "draft_model")]
)
def test_drafters_that_vllm_has(model, drafter, label):
    name = drafter.format(model)
    words = command(model, "--drafter", name, "-k", "4")
    assert ["--speculative-config", after(words, "--speculative-config")] == shlex.split(
        flags(name, {label: 4})["vLLM"][0]
    )


def test_exported_heads(model, tmp_path, monkeypatch):
    """One of ours is refused with the command that exports it, until its export is there; an export is used itself."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text('{"paceline_head": 1, "method": "eagle3"}')
    monkeypatch.chdir(tmp_path)
    drafter = ("--engine", "vllm", "--print", "--drafter", "head:mine")
    assert f"paceline export mine mine-vllm --to vllm --model {model}" in refusal("serve", model, *drafter)
    (tmp_path / "mine-vllm").mkdir()
    (tmp_path / "mine-vllm" / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    for name in ("mine", "mine-vllm"):
        config = json.loads(after(command(model, "--drafter", f"head:{name}"), "--speculative-config"))
        assert config["method"] == "eagle3"
        assert Path(config["model"]).name == "mine-vllm"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--drafter", "recycling"), "vLLM cannot draft by recycling"),
        (("--drafter", "self-int4"), "vLLM cannot draft by self-int4"),
        (("--drafter", "lookup+suffix"), "vLLM cannot draft by lookup+suffix"),
        (("--drafter", "lookup", "--policy", "cost_model"), "vLLM has no --policy"),
        (("--numerics", "invariant"), "vLLM has no --numerics"),
        (("--dtype", "float64"), "float64"),
        (("--weights", "int4"), "does not quantize to int4"),
        (("--threads", "2"), "OMP_NUM_THREADS"),
        (("--device", "cpu"), "vLLM has no --device"),
        (("--request-timeout", "3"), "vLLM has no --request-timeout"),
        (("--api-key", "a", "--api-key", "b"), "2 keys"),
        (("--nnodes", "2"), "2 hosts have nothing to share"),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_name(model, options, words):
    assert words in refusal("serve", model, "--engine", "vllm", "--print", *options)


def test_options_of_vllm_need_vllm(model):
    assert "--engine vllm" in refusal("serve", model, "--tensor-parallel-size", "2")
    assert "--engine vllm" in refusal("serve", model, "--", "--enforce-eager")


def test_several_hosts_are_joined_by_ray(model):
    shown = answer("serve", model, "--engine", "vllm", "--print", "--nnodes", "2", "--tensor-parallel-size", "8",
                   "--data-parallel-size", "2")  # fmt: skip
    assert shown["ray"] == ["ray start --head --port=6379", "ray start --address=FIRST_HOST:6379"]
    assert shown["command"][-4:] == ["--distributed-executor-backend", "ray", "--data-parallel-backend", "ray"]
    assert "ray" not in command(model, "--tensor-parallel-size", "8")


def test_keys_are_not_shown(model):
    result = paceline("serve", model, "--engine", "vllm", "--print", "--api-key", "geheim")
    assert result.exit_code == 0
    assert result.stdout.startswith("VLLM_API_KEY=$VLLM_API_KEY vllm serve ")
    assert "geheim" not in result.output
    assert "guarantee" in result.stderr  # said before anything starts


def test_it_runs_what_it_prints(model, tmp_path, monkeypatch):
    """A `vllm` on the PATH is started with these words, and the key in its environment."""
    started = []
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given) or sys.exit())
    (tmp_path / "vllm").touch(mode=0o700)
    options = ("--engine", "vllm", "--api-key", "geheim", "--port", "7")
    result = paceline("serve", model, *options, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert result.exit_code == 0, result.output
    ((program, words, environment),) = started
    assert (program, environment["VLLM_API_KEY"]) == (str(tmp_path / "vllm"), "geheim")
    assert words[:7] == ["vllm", "serve", model, "--host", "127.0.0.1", "--port", "7"]


def test_without_vllm_it_says_so(model, tmp_path):
    result = paceline("serve", model, "--engine", "vllm", env={"PATH": str(tmp_path)})
    assert result.exit_code == 1
    assert "there is no command `vllm`" in result.stderr
