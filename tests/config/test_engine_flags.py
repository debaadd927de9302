"""What other engines are told: snapshots of every method, and JSON that survives a shell."""

import json
import shlex

import pytest

from paceline.config import engine_flags, parse


def flags(name: str, depths=None, *alone) -> dict[str, tuple[str, str]]:
    found = engine_flags(parse(name), depths or {}, [parse(one) for one in alone])
    return {one.engine: (one.flags, one.remark) for one in found}


def test_none():
    assert flags("none") == dict.fromkeys(
        ("vLLM", "SGLang", "llama.cpp"), ("", "no drafter pays here: start it without speculation")
    )


def test_lookup():
    assert flags("lookup", {"lookup": 7}) == {
        "vLLM": (
            '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 3, '
            '"prompt_lookup_min": 1}\'',
            "",
        ),
        "SGLang": (
            "--speculative-algorithm NGRAM --speculative-num-draft-tokens 8 --speculative-ngram-max-bfs-breadth 1",
            "CUDA only; it has no limit on the length of a match, only on its trie (18)",
        ),
        "llama.cpp": (
            "--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 7",
            "older builds: --spec-ngram-size-n and -m",
        ),
    }


def test_suffix():
    flags_of_vllm, remark = flags("suffix", {"suffix": 6})["vLLM"]
    assert flags_of_vllm == '--speculative-config \'{"method": "suffix", "num_speculative_tokens": 6}\''
    assert "arctic-inference" in remark
    assert "corpus" in flags("suffix:corpus")["vLLM"][1]
    assert flags("suffix")["SGLang"] == ("", "has no suffix")


def test_draft_model():
    assert flags("model:org/small", {"draft_model": 4}) == {
        "vLLM": (
            '--speculative-config \'{"method": "draft_model", "num_speculative_tokens": 4, "model": "org/small"}\'',
            "",
        ),
        "SGLang": (
            "--speculative-algorithm STANDALONE --speculative-draft-model-path org/small --speculative-num-steps 4 "
            "--speculative-eagle-topk 1 --speculative-num-draft-tokens 5",
            "",
        ),
        "llama.cpp": (
            "--spec-type draft-simple -md draft.gguf --spec-draft-n-max 4 --spec-draft-n-min 1",
            "draft.gguf: org/small converted; older builds: --draft-max, --draft-min",
        ),
    }
    rounded = flags("model:org/small@int4")
    assert "INT4 already" in rounded["vLLM"][1]
    assert "INT4 already" in rounded["SGLang"][1]
    assert "Q4_0" in rounded["llama.cpp"][1]


def test_self_int4():
    found = flags("self-int4", {"self-int4": 3})
    assert found["vLLM"][0] == found["SGLang"][0] == ""
    assert found["SGLang"][1] == "no INT4 self-draft"
    assert found["llama.cpp"] == (
        "--spec-type draft-simple -md model-Q4_0.gguf --spec-draft-n-max 3 --spec-draft-n-min 1",
        "no INT4 self-draft: this loads a second copy with a cache of its own; older builds: --draft-max, --draft-min",
    )


def test_combined():
    depths = {"lookup": 8, "draft_model": 4}
    found = flags("lookup+model:org/small", depths, "self-int4", "lookup")
    assert json.loads(shlex.split(found["vLLM"][0])[1])["method"] == "ngram"
    assert found["vLLM"][1] == "lookup alone"
    own_flags, remark = flags("self-int4", depths)["llama.cpp"]
    assert found["llama.cpp"] == (own_flags, f"self-int4 alone; {remark}")
    assert flags("lookup+model:a", depths)["SGLang"] == ("", "no drafter pays by itself")
    assert flags("lookup+self-int4", depths, "self-int4")["SGLang"] == ("", "no INT4 self-draft")


def test_names_survive_a_shell():
    config = parse({"method": "draft_model", "model": "/my models/it's"})
    (vllm, sglang, _) = engine_flags(config, {"draft_model": 2})
    assert json.loads(shlex.split(vllm.flags)[1])["model"] == "/my models/it's"
    assert "/my models/it's" in shlex.split(sglang.flags)


@pytest.mark.parametrize(
    ("method", "vllm", "sglang"),
    [("eagle", True, True), ("eagle3", True, True), ("medusa", True, False), ("blockwise", False, False)],
)
def test_heads_are_exported_first(method, vllm, sglang):
    config = parse({"method": method, "model": "heads/my-head"})
    by_engine = {one.engine: one for one in engine_flags(config, {method: 4})}
    assert bool(by_engine["vLLM"].flags) is vllm
    assert bool(by_engine["SGLang"].flags) is sglang
    assert bool(by_engine["llama.cpp"].flags) is (method == "eagle3")
    for engine, target in (("vLLM", "vllm"), ("SGLang", "sglang"), ("llama.cpp", "llama.cpp")):
        one = by_engine[engine]
        if one.flags:
            assert f"my-head-{target}" in one.flags
            assert f"paceline export heads/my-head my-head-{target} --to {target} --model MODEL" in one.remark
