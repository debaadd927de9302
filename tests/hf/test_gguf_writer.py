"""Models written as GGUF files are read back as the same models, bit for bit, or refused by name."""

from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError, IncompatibleModels
from paceline.hf.gguf.file import read_gguf
from paceline.hf.gguf.load import FORMS, open_gguf
from paceline.hf.gguf.writer import write_gguf
from paceline.hf.load import open_checkpoint
from paceline.kernels import load
from paceline.quant.blocks import BlockWeights
from tests.cli.helpers import answer, refusal
from tests.gguf_files import TINY, VARIANTS, vocabulary
from tests.gguf_files import write_gguf as write_as_llama_cpp
from tests.helpers import tokenizer
from tests.tiny import tiny_model

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}
SIZES |= {"vocab_size": len(vocabulary()) + 5, "pad_token_id": 2}
OPTIONS = {
    "gemma2": {"query_pre_attn_scalar": 64},
    "gemma3": {"query_pre_attn_scalar": 64},
    "qwen2moe": {"shared_expert_intermediate_size": 64, "bos_token_id": None},
    "qwen3moe": {"norm_topk_prob": True},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": None},
    "starcoder2": {"sliding_window": None},
    "mistral": {"sliding_window": None},
}
needs_native = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")


def folder_of(place: Path, architecture: str = "llama", dtype=torch.bfloat16, **options) -> Path:
    """A checkpoint with the byte-level tokenizer of the tests' GGUF files."""
    options = OPTIONS.get(architecture, {}) | options
    model = tiny_model(TINY.get(architecture, architecture), dtype, **{**SIZES, **options})
    _, tokens = open_gguf(write_as_llama_cpp(place / "tokens.gguf", tiny_model("llama", **SIZES)), lambda _: None)
    for part in (model, tokens):
        part.save_pretrained(place / "model")
    return place / "model"


@pytest.mark.diagonal
@pytest.mark.parametrize("weights", [None, "f32"])
@pytest.mark.parametrize(
    "architecture", [*(name for name in FORMS if name != "qwen2vl"), "mistral", "olmo3", *VARIANTS]
)
def test_the_file_holds_the_model(architecture, weights, tmp_path):
    place = folder_of(tmp_path, architecture, tie_word_embeddings=architecture.startswith("gemma"))
    done = write_gguf(str(place), tmp_path / "out.gguf", weights)
    assert set(done.formats) | {"F32"} == {"F32", "F32" if weights else "BF16"}  # routers keep 32 bits
    model, read = open_gguf(done.path, lambda _: torch.bfloat16)
    want, tokens, _ = open_checkpoint(str(place), None, "cpu", False)
    assert tokens is not None
    state = type(model).from_pretrained(place).state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in model.state_dict().items())
    rope = {"partial_rotary_factor": 1.0} if architecture == "phi3" else {}
    assert model.config.rope_parameters | rope == want.config.rope_parameters
    for key in (
        "layer_types",
        "sliding_window",
        "eos_token_id",
        "tie_word_embeddings",
        "vocab_size",
    ):
        held = getattr(want.config, key, None)
        if isinstance(held, dict):  # all of it is the default
            held = {name: one for name, one in held.items() if (name, one) != ("partial_rotary_factor", 1.0)}
        assert getattr(model.config, key, None) == held, key
    assert read("he 12<|im_end|>").input_ids == tokens("he 12<|im_end|>").input_ids
    assert read.chat_template == tokens.chat_template


WIDE = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}


@needs_native
@pytest.mark.parametrize(
    ("architecture", "weights"),
    [
        *(("llama", weights) for weights in ("q4_k_m", "q3_k_m", "q8_0", "q4_1")),
        *(("qwen3moe", "q4_k_m"), ("gpt-oss", "mxfp4")),
        *(pytest.param(*more, marks=pytest.mark.more) for more in (("qwen2moe", "q4_0"), ("mixtral", "iq4_xs"))),
        *(("glm4moe", "q4_k_m"), ("ernie4_5-moe", "q8_0")),
        *(pytest.param(*more, marks=pytest.mark.more) for more in (("olmoe", "q6_k"), ("qwen3moe", "mxfp4"))),
    ],
)
def test_the_file_is_the_model_that_is_rounded_in_memory(architecture, weights, tmp_path):
    place = folder_of(tmp_path, architecture, **(WIDE if "moe" in architecture else {}))
    done = write_gguf(str(place), tmp_path / "out.gguf", weights)
    read, made = LLM(done.path), LLM(place, weights=weights)
    assert made.quantized.formats.keys() == done.formats.keys() - {"F32"}  # of routers
    assert weights == "mxfp4" or architecture != "llama" or made.quantized.formats == done.formats
    for name, one in read.loaded.model.named_modules():
        if isinstance(one, BlockWeights):
            other = made.loaded.model.get_submodule(name)
            assert one.form is other.form
            assert torch.equal(one.data, other.data), name
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=1)
    assert read.generate("hello", params)[0].token_ids == made.generate("hello", params)[0].token_ids


def test_scaled_rotations_come_back(tmp_path):
    llama3 = {"rope_type": "llama3", "rope_theta": 1e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for i, rope in enumerate(
        (llama3 | {"original_max_position_embeddings": 8192}, {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
    ):
        (tmp_path / str(i)).mkdir()
        place = folder_of(tmp_path / str(i), rope_parameters=rope)
        model, _ = open_gguf(write_gguf(str(place), tmp_path / f"{i}.gguf", None).path, lambda _: None)
        assert model.config.rope_parameters == rope


def test_llama_cpp_s_converter_writes_the_same(tmp_path):
    place = folder_of(tmp_path, dtype=torch.float32)
    ours = {one.name: one for one in GGUFReader(write_gguf(str(place), tmp_path / "out.gguf", None).path).tensors}
    theirs = GGUFReader(write_as_llama_cpp(tmp_path / "theirs.gguf", tiny_model("llama", **SIZES))).tensors
    assert ours.keys() == {one.name for one in theirs}
    assert all((ours[one.name].data == one.data).all() for one in theirs)


def test_yarn_comes_back(tmp_path):
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    path = write_gguf(str(folder_of(tmp_path, rope_parameters=yarn)), tmp_path / "out.gguf", None).path
    assert open_gguf(path, lambda _: None)[0].config.rope_parameters == yarn | {"beta_fast": 32.0, "beta_slow": 1.0}


def test_a_sentencepiece_vocabulary_comes_back(tmp_path):
    place, pieces = folder_of(tmp_path), ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("▁", "hell"), ("▁", "▁")]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz.,"]
    vocabulary = {piece: place for place, piece in enumerate([*pieces, *letters, *("".join(one) for one in merges)])}
    made = Tokenizer(BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    given = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    given.save_pretrained(place)
    tiny_model("llama", **{**SIZES, "vocab_size": len(vocabulary)}).save_pretrained(place)
    path = write_gguf(str(place), tmp_path / "out.gguf", None).path
    held = read_gguf(path).metadata
    assert held["tokenizer.ggml.model"] == "llama"
    assert held["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    _, read = open_gguf(path, lambda _: None)
    for text in ("hello  hell, ABC é</s>x", "  ", "hehell"):
        assert read(text).input_ids == given(text).input_ids, text
        assert read.decode(read(text).input_ids) == given.decode(given(text).input_ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_bias": True}, r"attention_bias|q_proj.bias|no place"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, "rope_parameters"),
    ],
)
def test_what_a_file_cannot_say_is_refused(options, message, tmp_path):
    place = folder_of(tmp_path, **options)
    with pytest.raises((IncompatibleModels, ConfigError), match=message):
        write_gguf(str(place), tmp_path / "out.gguf", "q8_0")
    assert not (tmp_path / "out.gguf").exists()


def test_other_models_and_quantised_files_are_refused(tmp_path):
    place = folder_of(tmp_path)
    tokenizer().save_pretrained(place)
    with pytest.raises(ConfigError, match="byte-level tokenizers"):
        write_gguf(str(place), tmp_path / "out.gguf", None)
    tiny_model("gpt_neox").save_pretrained(tmp_path / "neox")
    tokenizer().save_pretrained(tmp_path / "neox")
    with pytest.raises(IncompatibleModels, match=r"gpt_neox.*Expected.*llama"):
        write_gguf(str(tmp_path / "neox"), tmp_path / "out.gguf", None)
    quantised = write_as_llama_cpp(tmp_path / "q.gguf", tiny_model("llama", **SIZES), quantized="Q8_0")
    with pytest.raises(ConfigError, match=r"quantised already\. Got: Q8_0"):
        write_gguf(str(quantised), tmp_path / "out.gguf", "q4_0")
    assert not list(tmp_path.glob("out*"))


def test_on_the_command_line(tmp_path):
    place, out = folder_of(tmp_path), tmp_path / "out.gguf"
    done = answer("convert", str(place), str(out), "--weights", "q6_k", "--json")
    assert done == {"path": str(out), "size_bytes": out.stat().st_size, "formats": {"Q6_K": 16}}
    assert read_gguf(out).metadata["general.name"] == "model"
    assert "exists" in refusal("convert", str(place), str(out))
    assert "--weights is for GGUF files" in refusal("convert", str(out), str(tmp_path / "new"), "--weights", "q6_k")
    assert "Expected: a GGUF file" in refusal("convert", str(place), str(tmp_path / "new"))
