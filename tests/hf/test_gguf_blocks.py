"""Models whose matrices stay in the blocks of a GGUF file, against the same file in float32."""

import copy
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize

from paceline import LLM, SamplingParams
from paceline.core.tree import TokenTree
from paceline.errors import IncompatibleModels, PacelineError
from paceline.hf.describe import FORMS as NATIVE_FORMS
from paceline.hf.described_experts import BLOCKS
from paceline.hf.experts import split_experts
from paceline.hf.fingerprint import fingerprint
from paceline.hf.gguf import weights
from paceline.hf.gguf.load import FORMS, open_gguf
from paceline.hf.routing import ROUTINGS
from paceline.hf.twin import in_float32, plain_twin
from paceline.kernels import load
from paceline.kernels.packing import Blocks
from paceline.quant.blocks import BlockEmbedding, BlockLinear, BlockWeights
from paceline.quant.packed import PackedLinear
from paceline.target import ModelRunner, load_model
from paceline.target.lora import read_for
from tests import lora
from tests.gguf_files import TINY, VARIANTS, gguf_tensors, write_gguf
from tests.kernels.test_passes import has_bits_of_rows, random_tree
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4, "vocab_size": 300}
SIZES |= {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
MIXED = ["Q4_K", "Q6_K", "Q8_0", "Q5_0", "Q4_1"]
KNOWN = NATIVE_FORMS.keys() - (ROUTINGS.keys() - BLOCKS.keys())
NATIVE = [*(name for name, form in FORMS.items() if form.model_type in KNOWN and name != "qwen2vl"), *VARIANTS]
MIXTURES = ["qwen3moe", "gpt-oss", "mixtral"]
IDS = torch.tensor([[5, 9, 31, 7, 100, 3]])


def written(folder: Path, architecture: str, quantized: str | list[str] = MIXED, **options: object) -> Path:
    own = {"starcoder2": {"sliding_window": None}} | {one: {"tie_word_embeddings": True} for one in ("gemma", "gemma2")}
    options = own.get(architecture, {}) | options
    model = tiny_model(TINY.get(architecture, architecture), **SIZES, **options)
    return write_gguf(folder / "tiny.gguf", model, architecture, quantized=quantized)


def packed(path: Path):
    return open_gguf(path, lambda config: None, packs=True)[0]


def in_32_bits(path: Path):
    return open_gguf(path, lambda config: torch.float32)[0]


@pytest.mark.parametrize("architecture", NATIVE)
def test_nothing_is_rounded_again(architecture, tmp_path):
    path = written(tmp_path, architecture)
    model, want = packed(path), in_32_bits(path)
    split_experts(want)
    layers = {name: one for name, one in model.named_modules() if isinstance(one, BlockWeights)}
    assert {type(one) for one in layers.values()} == {BlockLinear, BlockEmbedding}
    assert not [one for one in model.modules() if type(one) is torch.nn.Linear]
    exact = plain_twin(in_float32(model))
    for name in layers:
        assert torch.equal(exact.get_submodule(name).weight, want.get_submodule(name).weight), name
    most = 0.05 if architecture == "qwen2moe" else 0.01  # the gate of its shared expert becomes bfloat16
    with torch.inference_mode():
        torch.testing.assert_close(exact(IDS).logits, want(IDS).logits, rtol=1e-2, atol=most)


def test_the_fingerprint_is_that_of_the_same_file_in_16_bits(tmp_path):
    path = written(tmp_path, "llama")
    assert fingerprint(packed(path)) == fingerprint(open_gguf(path, lambda config: None)[0])


def test_a_tied_output_layer_shares_the_embeddings(tmp_path):
    model = packed(written(tmp_path, "llama", tie_word_embeddings=True))
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert head.data.data_ptr() == embedding.data.data_ptr()
    assert packed(written(tmp_path, "llama")).get_output_embeddings().data.data_ptr() != embedding.data.data_ptr()


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "granite", "starcoder2", "olmo2", "smollm3", *MIXTURES])
def test_a_row_has_the_same_bits_in_every_pass(architecture, tmp_path):
    rng = random.Random(architecture)
    runner = ModelRunner(load_model(str(written(tmp_path, architecture))), 2, 200)
    assert runner.loaded.is_native
    slot, other = runner.cache.allocate(), runner.cache.allocate()
    for length in (1, 40, 90):
        text = [rng.randrange(3, 97) for _ in range(length)]
        for one in (slot, other):
            runner.cache.truncate(one, 0)
        runner.extend_cache(slot, text)
        runner.extend_cache(other, text[: length // 2])
        tree, beside = random_tree(13, rng), random_tree(13, rng)
        got = runner.forward([slot, other], TokenTree.of([*tree.rows, *beside.rows]))[0].clone()
        assert has_bits_of_rows(got, runner, slot, tree)


@pytest.mark.parametrize("drafter", ["lookup", "self-int4"])
def test_answers_are_those_of_plain_decoding(drafter, tmp_path):
    llm = LLM(written(tmp_path, "qwen2"), drafter=drafter, numerics="invariant")
    for params in (SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=1.0, seed=3)):
        assert (
            llm.generate("hello hello", params)[0].token_ids == llm.plain().generate("hello hello", params)[0].token_ids
        )


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_an_adapter_of_a_model_in_blocks(architecture, tmp_path):
    """Its factors are in the order of transformers' rows, which files permute."""
    path = written(tmp_path, architecture, "Q8_0")
    want, runner = in_32_bits(path), ModelRunner(load_model(str(path)), 1, 64)
    adapter = read_for(runner.loaded, "one", lora.save(tmp_path / "adapter", want))
    assert isinstance(runner.loaded.model.get_submodule(next(iter(adapter.low_rank.factors))), BlockLinear)
    slot, (*text, last) = runner.cache.allocate(), IDS[0].tolist()
    runner.cache.adapters[slot] = adapter
    runner.extend_cache(slot, text)
    got = runner.forward([slot], TokenTree.chain([[last]]))[0, 0]
    with torch.inference_mode():
        right, plain = (lora.merged(want, one)(IDS).logits[0, -1] for one in (tmp_path / "adapter", None))
    assert (got - right).abs().max() < 0.1 * right.std()  # inputs of products are rounded to 8 bits
    assert (plain - right).abs().max() > right.std()


def test_a_dtype_or_other_weights_unpack_the_file(tmp_path):
    path = written(tmp_path, "llama", "Q8_0")

    def kinds(llm):
        return {type(one) for one in llm.loaded.model.modules() if isinstance(one, BlockLinear | PackedLinear)}

    assert kinds(LLM(path)) == {BlockLinear}
    assert kinds(LLM(path, dtype="bfloat16")) == {PackedLinear}
    assert LLM(path, weights="int4").quantized.num_quantized == 14  # the output layer keeps its 8 bits
    with pytest.raises(IncompatibleModels, match=r"INT8.*more bits"):
        LLM(path, weights="int8")


def test_what_cannot_be_kept_is_told(tmp_path, caplog):
    model = packed(written(tmp_path, "llama", ["Q8_0", "BF16"]))
    assert not caplog.messages
    assert {type(one) for one in model.modules()} >= {BlockLinear, PackedLinear}


def test_kernels_that_multiply_wrongly_are_refused(tmp_path, monkeypatch):
    path = written(tmp_path, "llama")
    assert load_model(str(path)).is_native
    monkeypatch.setattr(Blocks, "rows", lambda self, some, rows=Blocks.rows: rows(self, some).roll(1, 0))
    with pytest.raises(PacelineError, match="multiply wrongly"):
        load_model(str(path))


def test_bad_weights_are_refused(tmp_path):
    model = tiny_model("llama", **SIZES)
    tensors = gguf_tensors(model, "llama")
    lacking = {name: one for name, one in tensors.items() if name != "blk.1.ffn_up.weight"}
    with pytest.raises(PacelineError, match="lacks weights"):
        packed(write_gguf(tmp_path / "a.gguf", model, quantized="Q8_0", tensors=lacking))
    shorter = tensors | {"blk.1.ffn_up.weight": tensors["blk.1.ffn_up.weight"][:480]}
    with pytest.raises(PacelineError):
        packed(write_gguf(tmp_path / "b.gguf", model, quantized="Q8_0", tensors=shorter))
    path = write_gguf(tmp_path / "c.gguf", model, quantized="Q8_0")
    data = bytearray(path.read_bytes())
    data[-34:-32] = np.array([np.inf], np.float16).tobytes()
    path.write_bytes(data)
    with pytest.raises(PacelineError, match="finite"):
        packed(path)


@pytest.mark.parametrize(
    ("side", "cut", "message"),
    [
        ("up", lambda all: all[:3], r"ffn_up_exps.*\[3, 256, 256\].*\[4, 256, 256\]"),
        ("up", lambda all: torch.cat([all, all[:1]]), r"ffn_up_exps.*\[5, 256, 256\].*\[4, 256, 256\]"),
        ("down", lambda all: all[:, :32], r"ffn_down_exps.*\[4, 32, 256\].*\[4, 256, 256\]"),
        ("down", None, r"lacks weights.*experts\.0\.down_proj"),
    ],
)
def test_experts_that_are_not_whole_are_refused(side, cut, message, tmp_path):
    model, name = tiny_model("qwen3_moe", **SIZES), f"blk.1.ffn_{side}_exps.weight"
    tensors = gguf_tensors(model, "qwen3moe")
    whole = tensors.pop(name)
    tensors |= {} if cut is None else {name: cut(whole).contiguous()}
    with pytest.raises(PacelineError, match=message):
        packed(write_gguf(tmp_path / "tiny.gguf", model, "qwen3moe", quantized="Q8_0", tensors=tensors))


def test_every_expert_has_the_bytes_of_the_file(tmp_path):
    path = written(tmp_path, "gpt-oss", ["MXFP4", "Q8_0"])
    held = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    experts = packed(path).model.layers[1].mlp.experts
    for side in ("gate", "up", "down"):
        tensor, bias = held[f"blk.1.ffn_{side}_exps.weight"], held[f"blk.1.ffn_{side}_exps.bias"]
        for index, expert in enumerate(experts):
            layer = getattr(expert, f"{side}_proj")
            assert layer.form.name == tensor.tensor_type.name
            values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type)[index])
            assert torch.equal(layer.blocks.rows(range(len(values))), values)
            assert torch.equal(layer.bias, torch.from_numpy(bias.data[index].copy()).bfloat16())


@pytest.mark.parametrize("pair", [("experts.0.", "experts.1."), ("gate_proj", "up_proj")])
def test_experts_that_are_swapped_are_seen(pair, tmp_path, monkeypatch):
    each, swapped = weights._each_expert, {pair[0]: pair[1], pair[1]: pair[0]}

    def wrong(name, tensor):
        for key, one in each(name, tensor):
            yield re.sub("|".join(map(re.escape, pair)), lambda found: swapped[found[0]], key), one

    monkeypatch.setattr(weights, "_each_expert", wrong)
    with pytest.raises(AssertionError):
        test_every_expert_has_the_bytes_of_the_file(tmp_path)


def test_a_copy_in_float32_leaves_the_model_alone(tmp_path):
    model = packed(written(tmp_path, "llama"))
    before = copy.deepcopy({name: one.dtype for name, one in model.named_parameters()})
    wide = in_float32(model)
    assert {name: one.dtype for name, one in model.named_parameters()} == before
    assert all(one.input_bits == 8 for one in model.modules() if isinstance(one, BlockLinear))
    assert wide.dtype == torch.float32
    shared = zip(model.modules(), wide.modules(), strict=True)
    assert all(a.data.data_ptr() == b.data.data_ptr() for a, b in shared if isinstance(a, BlockWeights))
