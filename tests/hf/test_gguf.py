"""GGUF files give the model that was written into them, or an error that says what is wrong."""

import logging
import random
import struct
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader, dequantize
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError, IncompatibleModels, PacelineError
from paceline.hf.gguf.file import read_gguf
from paceline.hf.gguf.load import FORMS, convert_gguf, open_gguf
from paceline.hf.image_prompts import encode
from paceline.hf.load import load_tokenizer, open_checkpoint
from paceline.methods import PromptLookup
from tests.cli.helpers import answer, refusal
from tests.gguf_files import TEMPLATE, TINY, VARIANTS, gguf_tensors, vocabulary, write_gguf
from tests.tiny import tiny_model

IDS = torch.arange(1, 25)[None]
SIZES = {"vocab_size": len(vocabulary()), "intermediate_size": 64, "hidden_size": 32, "pad_token_id": 2}
OPTIONS = {
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3": {"query_pre_attn_scalar": 8},
    "phi3": {"sliding_window": 8},
    **{name: {"attention_multiplier": 0.3, "embedding_multiplier": 3.0} for name in ("granite", "granitemoe")},
    "starcoder2": {"sliding_window": None},
    "qwen3moe": {"norm_topk_prob": True},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": None},
}


def tiny(architecture: str = "llama", **overrides):
    its = SIZES | {"tie_word_embeddings": architecture.startswith("gemma")} | OPTIONS.get(architecture, {})
    return tiny_model(TINY.get(architecture, architecture), **(its | overrides))


def written(path: Path, architecture: str = "llama", **options):
    """A file of a tiny model, and the model."""
    model = tiny(architecture)
    return write_gguf(path / "tiny.gguf", model, architecture, **options), model


def opened(path: Path):
    return open_gguf(path, lambda config: None)


@pytest.mark.parametrize(
    "architecture", sorted(FORMS.keys() - {"qwen2vl"} | VARIANTS.keys())
)  # which is half of a model
def test_the_model_is_the_one_that_was_written(architecture, tmp_path):
    path, expected = written(tmp_path, architecture)
    model, _ = opened(path)
    assert model.dtype == torch.float32
    state = model.state_dict()
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(state[name], weight, rtol=0, atol=2e-7, msg=name)  # Gemma's lose bits to 1 + weight
    torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-4, atol=1e-4)


def test_shared_experts_of_another_size_than_the_others_are_refused(tmp_path):
    path, _ = written(tmp_path, "ernie4_5-moe", more={"ernie4_5-moe.expert_shared_feed_forward_length": 24})
    with pytest.raises(ConfigError, match=r"length 24.*Expected: 48"):
        opened(path)


@pytest.mark.parametrize("packs", [False, True])
def test_layers_that_guess_the_tokens_after_the_next_are_left_out(packs, tmp_path):
    made = tiny("glm4moe")
    held = gguf_tensors(made, "glm4moe")
    more = {name.replace("blk.1.", "blk.2."): weight for name, weight in held.items() if "blk.1." in name}
    more["blk.2.nextn.eh_proj.weight"] = torch.ones(32, 64)
    entries = {"glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1}
    path = write_gguf(tmp_path / "tiny.gguf", made, "glm4moe", more=entries, tensors=held | more)
    model, _ = open_gguf(path, lambda config: None, packs=packs)
    assert (model.config.num_hidden_layers, model.config.num_mtp_layers) == (2, 0)
    entries["glm4moe.nextn_predict_layers"] = 3
    with pytest.raises(ConfigError, match="nextn_predict_layers 3 of 3"):
        opened(write_gguf(path, made, "glm4moe", more=entries, tensors=held | more))
    del entries["glm4moe.nextn_predict_layers"]
    with pytest.raises(ConfigError, match="nextn"):
        opened(write_gguf(path, made, "glm4moe", more=entries, tensors=held | more))


@pytest.mark.parametrize("quantized", ["Q4_0", "Q8_0", "Q5_0", "F16"])
def test_quantised_weights_are_those_of_llama_cpp_in_bfloat16(quantized, tmp_path, caplog):
    path, expected = written(tmp_path, quantized=quantized)
    with caplog.at_level(logging.WARNING, "paceline"):
        model, _ = opened(path)
    own = quantized == "F16"
    assert model.dtype == (torch.float16 if own else torch.bfloat16)
    assert caplog.messages == ([] if own else [f"tiny.gguf: {quantized} weights become bfloat16."])
    held = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    values = dequantize(held["blk.1.ffn_down.weight"].data, held["blk.1.ffn_down.weight"].tensor_type)
    weight = model.state_dict()["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(weight, torch.from_numpy(values.copy()).to(model.dtype))
    assert (weight.float() - expected.state_dict()["model.layers.1.mlp.down_proj.weight"]).abs().max() < 0.2


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
def test_transformers_reads_the_same(architecture, tmp_path):
    pytest.importorskip("accelerate")
    path, _ = written(tmp_path, architecture, quantized="Q8_0", more={f"{architecture}.rope.freq_base": 50_000.0})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    ours, _ = open_gguf(path, lambda config: torch.float32)
    if architecture == "gemma3":  # they leave out which layers have windows
        theirs.config.layer_types = ours.config.layer_types
    state = theirs.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in ours.state_dict().items())
    for key in ("rope_parameters", "head_dim", "num_key_value_heads", "tie_word_embeddings", "vocab_size"):
        assert getattr(ours.config, key, None) == getattr(theirs.config, key, None), key


def test_a_file_is_a_model_like_any_other(tmp_path):
    path, _ = written(tmp_path, quantized="Q4_0")
    llm = LLM(path, drafter=PromptLookup(), device="cpu")
    assert llm.loaded.name == "tiny.gguf"
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=1, ignore_eos=True)
    chat = [{"role": "user", "content": "hello hello hello"}]
    with_drafts, plain = llm.generate(chat, params)[0], llm.plain().generate(chat, params)[0]
    assert with_drafts.token_ids == plain.token_ids
    assert LLM(str(path), weights="q3_k", device="cpu").quantized is not None


def test_the_tokenizer_comes_from_the_file(tmp_path):
    path, _ = written(tmp_path)
    tokenizer = load_tokenizer(path)
    assert tokenizer.tokenize("  he  1") == ["Ġ", "Ġ", "he", "ĠĠ", "1"]  # digits apart
    assert tokenizer.decode(tokenizer("naïve 🦊 12").input_ids) == "naïve 🦊 12"
    assert tokenizer("<|im_end|>").input_ids == [2]
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.chat_template) == (
        "<|im_end|>",
        "<|im_start|>",
        TEMPLATE,
    )
    assert set(tokenizer("hi")) == {"input_ids", "attention_mask"}


@pytest.mark.parametrize(
    ("split", "text", "pieces"),
    [
        ("llama-bpe", "x12345 y's", ["x", "123", "45", "Ġy", "'s"]),
        ("qwen2", "x123 y's", ["x", "1", "2", "3", "Ġy", "'s"]),
        ("gpt-2", "x123 y's", ["x", "123", "Ġy", "'s"]),
        ("smollm", "x12 y's", ["x", "1", "2", "Ġy", "'s"]),
    ],
)
def test_text_is_split_as_the_merges_were_learnt(split, text, pieces, tmp_path):
    path, _ = written(tmp_path, more={"tokenizer.ggml.pre": split})
    splitter = load_tokenizer(path).backend_tokenizer.pre_tokenizer
    assert [piece for piece, _ in splitter.pre_tokenize_str(text)] == pieces


def test_a_sentencepiece_vocabulary(tmp_path):
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "▁", "a", "b", "ab", "▁ab", "<end_of_turn>"]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [3, 3, 3, 2, 1, 1, 1, 1, 1, 3] + [6] * 256
    model = tiny("gemma", vocab_size=len(tokens))
    roles = {"bos": 2, "eos": 1, "padding": 0, "unknown": 3}
    more = {f"tokenizer.ggml.{role}_token_id": index for role, index in roles.items()}
    more |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.merges": None}
    more |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.add_bos_token": True}
    more |= {"tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))]}
    more |= {"tokenizer.ggml.add_space_prefix": False}
    model, tokenizer = opened(write_gguf(tmp_path / "tiny.gguf", model, "gemma", more=more))
    assert tokenizer("ab ab<end_of_turn>").input_ids == encode(tokenizer, "<bos>ab ab<end_of_turn>") == [2, 7, 8, 9]
    assert tokenizer.decode([7, 8]) == "ab ab"
    assert model.generation_config.eos_token_id == [1, 9]  # chats end at the end of a turn too
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again("ab ab<end_of_turn>").input_ids == [2, 7, 8, 9]


def test_the_ends_of_an_answer(tmp_path):
    path, _ = written(tmp_path, more={"tokenizer.ggml.eot_token_id": 5})
    assert opened(path)[0].generation_config.eos_token_id == [2, 5]


def test_rotations_of_llama_3(tmp_path):
    scaling = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    expected = tiny(rope_parameters=scaling, head_dim=64)
    plain = 500_000.0 ** -(torch.arange(0, 64, 2) / 64)
    factors = plain / expected.model.rotary_emb.inv_freq
    assert factors.max() > 31
    tensors = gguf_tensors(expected, "llama")
    more = {"llama.rope.freq_base": 500_000.0}
    path = write_gguf(tmp_path / "tiny.gguf", expected, more=more, tensors=tensors | {"rope_freqs.weight": factors})
    model, _ = opened(path)
    assert model.config.rope_parameters == scaling
    torch.testing.assert_close(model(IDS).logits, expected(IDS).logits)
    tensors["rope_freqs.weight"] = factors * torch.linspace(1, 1.01, len(factors))
    with pytest.raises(ConfigError, match="the factors of Llama 3"):
        opened(write_gguf(tmp_path / "other.gguf", expected, more=more, tensors=tensors))


def test_scaling_of_yarn(tmp_path):
    scaling = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    expected = tiny(rope_parameters=scaling)
    path = write_gguf(tmp_path / "tiny.gguf", expected)
    torch.testing.assert_close(opened(path)[0](IDS).logits, expected(IDS).logits)
    usual = {"llama.rope.scaling.attn_factor": 1.1386294, "llama.rope.scaling.yarn_beta_fast": 16.0}
    rope = opened(write_gguf(path, expected, more=usual))[0].config.rope_parameters
    assert (rope["beta_fast"], rope["beta_slow"], rope.get("attention_factor")) == (16.0, 1.0, None)
    for odd in ({"attn_factor": 2.0}, {"yarn_ext_factor": 0.5}):
        with pytest.raises(ConfigError, match=rf"rope\.scaling\.{min(odd)}"):
            opened(write_gguf(path, expected, more={f"llama.rope.scaling.{key}": one for key, one in odd.items()}))


@pytest.mark.parametrize("rope", [None, "yarn"])
def test_windows_make_an_olmo_2_an_olmo_3(rope, tmp_path):
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64}
    plain = {"rope_type": "default", "rope_theta": 5e5}
    full = yarn if rope else plain
    expected = tiny("olmo3", rope_parameters={"full_attention": full, "sliding_attention": plain})
    model, _ = opened(write_gguf(tmp_path / "tiny.gguf", expected, "olmo2"))
    assert model.config.layer_types == ["sliding_attention", "full_attention"]
    torch.testing.assert_close(model(IDS).logits, expected(IDS).logits)


def test_an_exaone_4_without_windows(tmp_path):
    expected = tiny("exaone4", sliding_window=None, layer_types=["full_attention"] * 2)
    model, _ = opened(write_gguf(tmp_path / "tiny.gguf", expected, "exaone4"))
    torch.testing.assert_close(model(IDS).logits, expected(IDS).logits)


def test_a_granite_without_scales(tmp_path):
    expected = tiny("granite", attention_multiplier=8**-0.5, residual_multiplier=1.0, logits_scaling=1.0)
    scales = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
    expected.config.embedding_multiplier = expected.model.embedding_multiplier = 1.0
    path = write_gguf(tmp_path / "tiny.gguf", expected, "granite", more={f"granite.{one}": None for one in scales})
    torch.testing.assert_close(opened(path)[0](IDS).logits, expected(IDS).logits)


@pytest.mark.parametrize("architecture", ["qwen2moe", "gpt-oss"])
def test_experts_in_blocks_become_bfloat16(architecture, tmp_path):
    sizes = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    expected = tiny(architecture, **sizes)
    path = write_gguf(tmp_path / "tiny.gguf", expected, architecture, quantized=["Q8_0", "Q5_0"])
    held = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in GGUFReader(path).tensors}
    experts = opened(path)[0].model.layers[1].mlp.experts
    gate, up, down = (torch.from_numpy(held[f"blk.1.ffn_{side}_exps.weight"]) for side in ("gate", "up", "down"))
    mixed = architecture == "gpt-oss"
    both = torch.stack([gate, up], dim=2).flatten(1, 2).mT if mixed else torch.cat([gate, up], dim=1)
    assert torch.equal(experts.gate_up_proj, both.bfloat16())
    assert torch.equal(experts.down_proj, (down.mT if mixed else down).bfloat16())


def test_experts_that_are_not_whole_are_refused(tmp_path):
    model = tiny("qwen3moe")
    tensors = gguf_tensors(model, "qwen3moe")
    lacking = {name: one for name, one in tensors.items() if name != "blk.1.ffn_up_exps.weight"}
    with pytest.raises(ConfigError, match=r"lacks weights.*gate_up_proj"):
        opened(write_gguf(tmp_path / "less.gguf", model, "qwen3moe", tensors=lacking))
    tensors["blk.1.ffn_up_exps.weight"] = tensors["blk.1.ffn_up_exps.weight"][:, :8].contiguous()
    with pytest.raises(ConfigError, match=r"ffn_up_exps.weight' of shape \[4, 8, 32\].*\[4, 24, 32\]"):
        opened(write_gguf(tmp_path / "short.gguf", model, "qwen3moe", tensors=tensors))


def test_linear_scaling(tmp_path):
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    path, _ = written(tmp_path, "gemma3", more={f"gemma3.{key}": value for key, value in scaling.items()})
    rope = opened(path)[0].config.rope_parameters
    assert rope["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 10_000.0}
    path, _ = written(tmp_path, more={"llama.rope.scale_linear": 8.0})  # of older files
    assert opened(path)[0].config.rope_parameters == {"rope_type": "linear", "factor": 8.0, "rope_theta": 10_000.0}
    path, _ = written(tmp_path, more={"llama.rope.scale_linear": 8.0, "llama.rope.scaling.factor": 4.0})
    with pytest.raises(ConfigError, match=r"factor 4\.0, rope.scale_linear 8\.0"):
        opened(path)


def test_version_2_and_a_joined_output_layer(tmp_path):
    expected = tiny(tie_word_embeddings=True)
    path = write_gguf(tmp_path / "tiny.gguf", expected)
    content = bytearray(path.read_bytes())
    content[4:8] = struct.pack("<I", 2)
    path.write_bytes(content)
    model, _ = opened(path)
    assert model.config.tie_word_embeddings
    torch.testing.assert_close(model(IDS).logits, expected(IDS).logits)


REFUSED = {
    "projector": ({"general.architecture": "clip"}, "a vision projector", "the file of the language model"),
    "adapter": ({"general.type": "adapter"}, "of type 'adapter'", "the file of the language model"),
    "architecture": ({"general.architecture": "mamba"}, "not read from GGUF.*mamba.*llama", "hub id of the same model"),
    "entry": ({"llama.attention.sinks": True}, r"llama\.attention\.sinks True", "hub id of the same model"),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type 'yarn', no factor.*linear or yarn", "hub id"),
    "partial rotation": ({"llama.rope.dimension_count": 4}, "dimension_count 4.*8, as of keys", "hub id"),
    "layers": ({"llama.block_count": 1_000_000_000}, "1,000,000,000 layers.*number of tensors", "hub id"),
    "one layer more": ({"llama.block_count": 3}, "lacks weights", "fetch the model again"),
    "vast": ({"llama.feed_forward_length": 1 << 30}, "a larger model than its weights", "fetch the model again"),
    "no heads": ({"llama.attention.head_count": 0}, r"llama\.attention\.head_count.*Got: 0", "equal to 1"),
    "nothing said": ({"llama.embedding_length": None}, r"no llama\.embedding_length", "hub id"),
    "words": ({"llama.block_count": "two"}, r"llama\.block_count.*'two'", "integer"),
    "split of text": ({"tokenizer.ggml.pre": "unheard-of"}, "tokenizer.*gpt2, unheard-of", r"tokenizer=\.\.\."),
    "no split of text": ({"tokenizer.ggml.pre": None}, "tokenizer.*gpt2, None", r"tokenizer=\.\.\."),
    "kind of tokenizer": ({"tokenizer.ggml.model": "bert"}, "tokenizer.*bert", r"tokenizer=\.\.\."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused(name, tmp_path):
    more, what, fix = REFUSED[name]
    path, _ = written(tmp_path, more=more)
    with pytest.raises(ConfigError if name != "architecture" else IncompatibleModels, match=what) as caught:
        opened(path)
    assert caught.match(fix)


def test_other_tensors_are_refused(tmp_path):
    model = tiny()
    tensors = gguf_tensors(model, "llama")
    more = tensors | {"blk.0.attn_sinks.weight": torch.zeros(4)}
    with pytest.raises(ConfigError, match=r"blk\.0\.attn_sinks\.weight"):
        opened(write_gguf(tmp_path / "more.gguf", model, tensors=more))
    del tensors["blk.1.ffn_up.weight"]
    with pytest.raises(ConfigError, match=r"lacks weights.*up_proj"):
        opened(write_gguf(tmp_path / "less.gguf", model, tensors=tensors))


def test_what_is_no_whole_gguf_file_is_refused(tmp_path):
    path, _ = written(tmp_path)
    content = path.read_bytes()
    broken = {
        "begins with b'PK": b"PK\3\4" + content,
        "empty file": b"",
        "version 3 in big-endian order": content[:4] + struct.pack(">I", 3) + content[8:],
        r"Got: version 1\. .*convert the original": content[:4] + struct.pack("<I", 1) + content[8:],
        "version 7": content[:4] + struct.pack("<I", 7) + content[8:],
        "bytes too few": content[:-100],
        "cannot be read": content[:300],
    }
    for what, bad in broken.items():
        (tmp_path / "bad.gguf").write_bytes(bad)
        with pytest.raises(ConfigError, match=r"cannot be read|cut off") as caught:
            open_checkpoint(str(tmp_path / "bad.gguf"), None, "cpu", False)
        assert caught.match(what)
    for missing in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(ConfigError):
            read_gguf(missing)


def test_damage_anywhere_in_the_header_is_an_error_of_ours_or_harmless(tmp_path):
    path, _ = written(tmp_path)
    content, chance = path.read_bytes(), random.Random(0)
    header = content.index(b"blk.0.") + 2000
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(chance.choice((1, 1, 8))):
            damaged[chance.randrange(header)] = chance.choice((0, 255, chance.randrange(256)))
        path.write_bytes(damaged)
        try:
            file = read_gguf(path)
            for tensor in file.tensors[:3]:
                list(file.values(tensor))
        except (PacelineError, NotImplementedError):
            pass


def test_a_converted_folder_is_loaded_by_transformers(tmp_path):
    path, expected = written(tmp_path, "gemma3", quantized="BF16")
    stages: list[tuple[str, int, int | None]] = []
    (tmp_path / "out").mkdir()
    convert_gguf(path, tmp_path / "out", lambda *report: stages.append(report))
    count = len(read_gguf(path).tensors)
    assert stages == [("convert", done, count) for done in range(1, count + 1)]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.dtype, model.config.architectures) == (torch.bfloat16, ["Gemma3ForCausalLM"])
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(model.state_dict()[name], expected.state_dict()[name].bfloat16())
    assert model.generation_config.eos_token_id == 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("  he  1") == ["Ġ", "Ġ", "he", "ĠĠ", "1"]
    assert tokenizer.chat_template == TEMPLATE


def test_the_command_line(tmp_path):
    path, _ = written(tmp_path, quantized="Q8_0")
    out = tmp_path / "out"
    assert answer("convert", str(path), str(out))["folder"] == str(out)
    (tmp_path / "plain").write_text("")
    modes = {one.stat().st_mode for one in out.iterdir()}
    assert modes == {(tmp_path / "plain").stat().st_mode}
    assert "exists already" in refusal("convert", str(path), str(out))
    given = ("--max-tokens", "8", "--ignore-eos", "--device", "cpu")
    ours, folder = (answer("generate", str(one), "hello", *given) for one in (path, out))
    assert ours["token_ids"] == folder["token_ids"] == answer("generate", str(path), "-p", "hello", *given)["token_ids"]


def test_a_file_has_no_revision(tmp_path):
    with pytest.raises(ConfigError, match="a file has no revision"):
        LLM(write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", vocab_size=262)), revision="main")
