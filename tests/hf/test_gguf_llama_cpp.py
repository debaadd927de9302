"""llama.cpp computes the same from the same files.

PACELINE_TEST_LLAMA_CPP is the python of an environment with `xllamacpp`; without it, the one that runs the tests.
"""

import importlib.util
import os
import sys
from contextlib import contextmanager

import pytest
import torch

from bench.peers import PeerOptions, open_peer
from bench.peers.isolated import IsolatedPeer
from paceline import LLM, SamplingParams
from paceline.hf.gguf.load import FORMS, open_gguf
from paceline.hf.gguf.writer import write_gguf
from paceline.zoo import resolve
from tests.gguf_files import VARIANTS
from tests.gguf_files import write_gguf as write_as_llama_cpp

from .test_gguf import opened, tiny
from .test_gguf_writer import WIDE, folder_of

PYTHON = os.environ.get("PACELINE_TEST_LLAMA_CPP", sys.executable)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.executable == PYTHON and importlib.util.find_spec("xllamacpp") is None,
        reason="no xllamacpp: PACELINE_TEST_LLAMA_CPP names the python of an environment that has it",
    ),
]
WINDOW = 8
OPTIONS = {
    # llama.cpp knows windows of this architecture by 64 layers alone
    "exaone4": {"num_hidden_layers": 64, "layer_types": [*3 * ["sliding_attention"], "full_attention"] * 16},
    "gpt-oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},  # of YaRN it rounds the ramp's ends
    "olmoe": {"num_key_value_heads": 4},  # it knows no other
    "phi3": {"sliding_window": None},  # which it ignores
}
TABLES = ("gemma", "gemma2", "gemma3", "starcoder2")  # llama.cpp looks GELU up, by 16 bits


@contextmanager
def llama_cpp(path):
    with open_peer(f"llama.cpp={PYTHON}", str(path), PeerOptions(cache_dtype="float32")) as peer:
        assert isinstance(peer, IsolatedPeer)
        yield peer


def largest_difference(path, model, measure=lambda ours, theirs: (ours - theirs).abs().max()) -> float:
    """Of log-probabilities after texts of 6 and 40 tokens."""
    chance = torch.Generator().manual_seed(1)
    worst = 0.0
    with llama_cpp(path) as peer, torch.inference_mode():
        for length in (6, 5 * WINDOW):
            ids = torch.randint(3, model.config.vocab_size, (length,), generator=chance)
            ours = model(ids[None]).logits[0, -1].log_softmax(-1)
            theirs = torch.from_numpy(peer.logprobs(ids.tolist()).copy())
            worst = max(worst, float(measure(ours, theirs)))
    return worst


@pytest.mark.parametrize("architecture", [*(one for one in FORMS if one != "qwen2vl"), *VARIANTS])
def test_the_same_probabilities(architecture, tmp_path):
    path = write_as_llama_cpp(tmp_path / "tiny.gguf", tiny(architecture, **OPTIONS.get(architecture, {})), architecture)
    model, _ = opened(path)
    assert largest_difference(path, model) < (1e-2 if architecture in TABLES else 1e-4)


def test_llama_cpp_ignores_the_windows_of_phi3(tmp_path):
    """So it differs from transformers on texts that are longer: from us, who read them."""
    expected = tiny("phi3", sliding_window=WINDOW)
    path = write_as_llama_cpp(tmp_path / "tiny.gguf", expected, "phi3")
    model, _ = opened(path)
    assert model.config.sliding_window == WINDOW
    assert largest_difference(path, model) > 1
    model.config.sliding_window = None
    assert largest_difference(path, model) < 1e-4


@pytest.mark.parametrize("weights", [None, "q4_k_m"])
def test_the_same_answer_from_a_file_that_we_wrote(weights, tmp_path):
    file = write_gguf(str(resolve("smollm2-135m")), tmp_path / "out.gguf", weights).path
    text = "def fibonacci(n):\n"  # no near tie in the next tokens, which other sums could decide in another way
    answer = LLM(file).generate(text, SamplingParams(max_tokens=12))[0]
    with llama_cpp(file) as peer:
        assert peer.run("plain", answer.prompt_token_ids, 12, 0.0).token_ids == answer.token_ids


@pytest.mark.parametrize(
    "architecture", [*(one for one in FORMS if one not in ("exaone", "exaone4", "qwen2vl")), *VARIANTS]
)
def test_the_same_probabilities_from_a_file_that_we_wrote(architecture, tmp_path):
    """Exaone is written as llama; tiny models of exaone4 have windows that llama.cpp does not see."""
    tied = {"tie_word_embeddings": architecture.startswith("gemma")}
    place = folder_of(tmp_path, architecture, torch.float32, **tied, **OPTIONS.get(architecture, {}))
    path = write_gguf(str(place), tmp_path / "out.gguf", "f32").path
    model, _ = open_gguf(path, lambda _: torch.float32)
    assert largest_difference(path, model) < (1e-2 if architecture in TABLES else 1e-4)


@pytest.mark.parametrize("weights", ["q4_k_m", "q8_0", "q4_0", "mxfp4"])
@pytest.mark.parametrize(
    "architecture", ["qwen3moe", "gpt-oss", "qwen2moe", "olmoe", "mixtral", "glm4moe", "ernie4_5-moe"]
)
def test_nearly_the_same_probabilities_from_packed_experts(architecture, weights, tmp_path):
    """In nats: llama.cpp rounds inputs to 8 bits."""
    place = folder_of(tmp_path, architecture, torch.float32, **WIDE, **OPTIONS.get(architecture, {}))
    path = write_gguf(str(place), tmp_path / "out.gguf", weights).path
    model, _ = open_gguf(path, lambda _: torch.float32)
    assert largest_difference(path, model, lambda ours, theirs: (theirs.exp() * (theirs - ours)).sum()) < 0.3
