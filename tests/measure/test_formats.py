"""In which formats weights are held, and why not packed."""

from dataclasses import replace

import pytest

from paceline import LLM
from paceline.kernels import load
from paceline.measure import formats
from paceline.measure.doctor import held_bytes
from paceline.measure.formats import held_weights, unpacked_formats
from tests.cli.helpers import answer, paceline
from tests.gguf_files import vocabulary, write_gguf
from tests.gguf_mmproj import write_pair
from tests.tiny import tiny_model
from tests.vision.families import make

SIZES = {"vocab_size": len(vocabulary()), "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
SIZES |= {"pad_token_id": 2}
needs_native = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "tiny.gguf"
    return write_gguf(path, tiny_model("llama", **SIZES, tie_word_embeddings=True), quantized=["Q8_0", "Q4_K"])


def told(llm: LLM) -> dict[tuple[str, str], tuple[int, str | None]]:
    return {(one.what, one.form): (one.count, one.reason) for one in held_weights(llm.loaded)}


@needs_native
def test_a_mixed_file(file):
    llm = LLM(file)
    found = told(llm)
    assert found == {
        ("embeddings", "Q8_0"): (1, None),
        ("matrices", "Q8_0"): (7, None),
        ("matrices", "Q4_K"): (7, None),
        ("norms and biases", "bfloat16"): (5, "vectors stay as they are"),
    }
    small = sum(one.nbytes for one in llm.loaded.model.buffers()) // 100  # buffers of rotations
    assert sum(one.num_bytes for one in held_weights(llm.loaded)) == pytest.approx(held_bytes(llm.loaded.model), small)
    assert unpacked_formats(llm, str(file)) == {}


@needs_native
def test_other_weights():
    whole = told(LLM(tiny_model("llama")))
    assert whole["matrices", "float32"] == (15, None)
    assert whole["embeddings", "float32"] == (1, "a pass reads single rows")
    assert told(LLM(tiny_model("llama"), weights="q8_0"))["matrices", "Q8_0"][1] is None
    assert told(LLM(tiny_model("jetmoe")))["experts", "float32"] == (8, "experts run in torch")
    assert told(LLM(tiny_model("qwen3_5")))["convolutions", "float32"] == (2, "they stay as they are")
    assert told(LLM(tiny_model("gpt2")))["matrices", "float32"][1] in (None, "torch runs this layer")


def test_why_a_file_is_not_packed(file, monkeypatch, tmp_path):
    asked = LLM(file, dtype="float32")
    assert unpacked_formats(asked, str(file)) == {
        form: "became float32: a dtype was asked for" for form in ("Q8_0", "Q4_K")
    }
    sizes = {"vocab_size": len(vocabulary()), "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    path = write_gguf(tmp_path / "moe.gguf", tiny_model("qwen2_moe", **sizes), "qwen2moe", quantized="Q8_0")
    assert unpacked_formats(llm := LLM(path), str(path)) == {}
    assert told(llm)["routers", "float32"][1] == "they stay as they are"
    monkeypatch.setattr(formats, "load_kernels", lambda: replace(load(), library=None, reason="no compiler"))
    assert unpacked_formats(asked, str(file))["Q4_K"] == "became float32: no compiler"


@needs_native
def test_a_file_beside_a_projector(tmp_path):
    text, mmproj = write_pair(tmp_path, "llava", *make("llava"), "Q8_0")
    told = unpacked_formats(LLM(text, mmproj=mmproj), str(text))
    assert told.keys() == {"Q8_0"}
    assert told["Q8_0"].endswith(": transformers reads models that see (--mmproj)")


@needs_native
def test_a_file_that_is_rounded_again(file):
    again = "was rounded again: weights=... was given"
    assert unpacked_formats(LLM(file, weights="int4"), str(file)) == {"Q8_0": again}  # Q4_K has no more bits than that
    assert unpacked_formats(LLM(file, weights="q4_k"), str(file)) == {"Q8_0": again, "Q4_K": again}


@needs_native
def test_the_commands_say_it(file):
    check = "check", str(file), "--num-prompts", "1", "--max-tokens", "4", "--no-distribution-test"
    for got in (answer("doctor", str(file), "--batch", "1"), answer(*check)):
        assert {(one["form"], one["reason"]) for one in got["formats"]} >= {("Q8_0", None), ("Q4_K", None)}
        assert got["unpacked"] == {}
    shown = " ".join(paceline("doctor", str(file), "--batch", "1").stdout.split())
    assert "7 matrices Q4_K" in shown
    assert "not packed: vectors stay as they are" in shown
    shown = paceline(*check, "--dtype", "float32").stdout
    assert "Q4_K of the file became float32: a dtype was asked for" in " ".join(shown.split())
