"""Models that are loaded by name into the form of the kernels, against those of transformers."""

import subprocess
import sys

import pytest
import torch

from paceline.hf.checkpoint import Stored
from paceline.hf.described import DescribedModel, outlined
from paceline.hf.experts import state_by_expert
from paceline.hf.fingerprint import fingerprint
from paceline.hf.load import open_checkpoint
from paceline.kernels import load
from paceline.target import load_model
from tests.gguf_files import write_gguf
from tests.helpers import tokenizer
from tests.tiny import LATENT, NATIVE, RECURRENT, tiny_model

pytestmark = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")
READ = [name for name in NATIVE if name not in RECURRENT | LATENT or name == "qwen3_5"]
LEAVES = ("weight", "bias", "layer_scalar", "dt_bias", "A_log", "e_score_correction_bias", "sinks")
BIASED = {"attention_bias": True, "mlp_bias": True, "attention_out_bias": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
OTHERS = [
    ("llama", BIASED),
    ("granite", BIASED),
    ("llama", {"tie_word_embeddings": True}),
    ("gemma2", {"tie_word_embeddings": True}),
    ("llama", {"rope_parameters": YARN}),
    ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64}}),
    ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
]


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in READ), *OTHERS])
def test_it_is_the_model_of_transformers(name, options, tmp_path):
    model = tiny_model(name, **options)
    model.save_pretrained(tmp_path)
    ours, _, _ = open_checkpoint(str(tmp_path), None, "cpu", False, tokenizer=tokenizer(), packs=True)
    assert isinstance(ours, DescribedModel)
    theirs = open_checkpoint(str(tmp_path), None, "cpu", False, tokenizer=tokenizer())[0]
    assert fingerprint(ours) == fingerprint(theirs)
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert ours.dtype is theirs.dtype
    held = state_by_expert(theirs)
    for path, module in ours.named_modules():
        for leaf in LEAVES:
            if isinstance(own := getattr(module, leaf, None), torch.Tensor):
                assert torch.equal(own, held.pop(f"{path}.{leaf}")), path
    assert not held
    ids = torch.tensor([[5, 9, 31, 7]])
    assert torch.equal(ours.get_input_embeddings()(ids), theirs.get_input_embeddings()(ids))
    rotary, places = theirs.base_model.rotary_emb, torch.arange(300)[None]
    for kind in getattr(rotary, "layer_types", [None]):
        given = torch.empty(0), places, *(() if kind is None else (kind,))
        for got, want in zip(ours.base_model.rotary_emb(*given), rotary(*given), strict=True):
            assert torch.equal(got, want.repeat(1, 1, got.shape[-1] // want.shape[-1]))  # some give half of it


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_dtype_is_the_one_asked_for(dtype, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype)
    assert loaded.is_native
    assert {one.dtype for one in loaded.model.parameters()} == {loaded.dtype} == {getattr(torch, dtype)}


def test_what_does_not_match_is_left_to_transformers():
    model = tiny_model("llama")
    stored = {name: Stored("F32", tuple(one.shape)) for name, one in model.state_dict().items()}
    some = next(iter(stored))
    assert outlined(model.config, torch.float32, stored) is not None
    for other in (
        {name: one for name, one in stored.items() if name != some},
        stored | {"model.more.weight": Stored("F32", (3,))},
        stored | {some: Stored("F32", (3,))},
        stored | {some: Stored("I32", stored[some].shape)},
    ):
        assert outlined(model.config, torch.float32, other) is None
    assert outlined(model.config, torch.float64, stored) is None
    assert outlined(tiny_model("mixtral").config, torch.float32, stored) is None


@pytest.mark.parametrize("kind", ["folder", pytest.param("Q8_0", marks=pytest.mark.slow)])
def test_modelling_code_is_not_imported_once_a_model_has_passed(kind, tmp_path):
    model = tiny_model("llama", hidden_size=64, intermediate_size=64, head_dim=16, vocab_size=1 << 16)
    if kind == "folder":
        path = tmp_path / "model"
        model.save_pretrained(path)
        tokenizer().save_pretrained(path)
    else:
        path = write_gguf(tmp_path / "model.gguf", model, "llama", quantized=kind)
    code = f"""
import os, sys
from paceline import LLM, SamplingParams
from paceline.kernels import load
load()
os.environ["PACELINE_CACHE"] = {str(tmp_path / "cache")!r}
assert LLM({str(path)!r}, drafter="lookup").generate([[5, 9, 31]], SamplingParams(max_tokens=3))[0].token_ids
tables = "transformers.models.auto."
names = [name for name in sys.modules if name.startswith("transformers.models.") and not name.startswith(tables)]
print([name for name in names if ".modeling_" in name], "transformers.modeling_utils" in sys.modules)
"""
    said = [subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1] for _ in range(2)]
    assert said == ["['transformers.models.llama.modeling_llama'] True", "[] False"]
