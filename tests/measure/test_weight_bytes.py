"""Bytes that a pass reads: counted by hand for tiny models of every way to hold weights."""

import copy

import pytest
import torch

from paceline.measure import machine
from paceline.measure.doctor import held_bytes, int4_bytes
from paceline.measure.machine import read_bandwidth, weight_bytes
from paceline.quant.linears import quantize_linears
from paceline.quant.packed import PackedLinear
from paceline.target import LoadedModel, load_model, wrap_model
from paceline.target.adapters import share_copy
from tests.real_models import default_model
from tests.tiny import tiny_model

E, F, V, LAYERS = 32, 64, 128, 2  # of the tiny models: 4 heads, 4 key-value heads of 8; the kernels pad none of these
WHOLE = {"intermediate_size": F, "vocab_size": V, "num_key_value_heads": 4}
LINEARS = LAYERS * (4 * E * 32 + 3 * E * F)
NORMS = (2 * LAYERS + 1) * E
HEAD = V * E


def bfloat16_bytes(loaded: LoadedModel, count: int) -> int:
    """Of so many weights in linear layers: twelve bits each, a table and patches, or 16 bits without such kernels."""
    short = [m for m in loaded.model.modules() if isinstance(m, PackedLinear) and m.patches is not None]
    return count * 3 // 2 + sum(16 + m.patches.nbytes for m in short) if short else 2 * count


@pytest.mark.parametrize("tied", [False, True])
def test_llama_by_hand(tied):
    loaded = wrap_model(tiny_model("llama", tie_word_embeddings=tied, **WHOLE))
    assert weight_bytes(loaded) == 4 * (LINEARS + NORMS + HEAD)
    loaded = wrap_model(tiny_model("llama", torch.bfloat16, tie_word_embeddings=tied, **WHOLE))
    assert weight_bytes(loaded) == bfloat16_bytes(loaded, LINEARS + HEAD) + 2 * NORMS


def test_mutants_miscount(monkeypatch):
    """Were the embedding read whole, buffers left out or shared tensors counted twice, the number would be another."""
    loaded = wrap_model(tiny_model("llama", torch.bfloat16))
    right = weight_bytes(loaded)
    with monkeypatch.context() as patch:
        patch.setattr(machine, "_read_by", lambda m: [*m.parameters(recurse=False), *m.buffers(recurse=False)])
        assert weight_bytes(loaded) > right
    quantised = _quantised(loaded)
    right = weight_bytes(quantised)
    with monkeypatch.context() as patch:
        patch.setattr(machine, "_read_by", lambda m: m.parameters(recurse=False))
        assert weight_bytes(quantised) < right
    twice = _with_shared_layer()
    right = weight_bytes(twice)
    with monkeypatch.context() as patch:
        patch.setattr(machine, "_identity", lambda tensor: object())
        assert weight_bytes(twice) > right


def test_int4_layers_count_what_they_hold():
    loaded = _quantised(wrap_model(tiny_model("llama", torch.bfloat16, **WHOLE)))
    assert weight_bytes(loaded) == LINEARS // 2 + 4 * LINEARS // 32 + 2 * NORMS + bfloat16_bytes(loaded, HEAD)


def test_size_of_the_int4_copy_is_foretold():
    model = tiny_model("llama", torch.bfloat16, intermediate_size=64, vocab_size=112)
    foretold = int4_bytes(model)
    assert quantize_linears(model, 32, "int4").num_bytes == foretold


def test_only_routed_experts_count():
    """2 of 4 experts: gate, up and down of each, beside everything that every token reads."""
    experts, width = 4, 32
    loaded = wrap_model(tiny_model("qwen3_moe", num_experts=experts, moe_intermediate_size=width))
    everything = held_bytes(loaded.model)
    expert = 4 * LAYERS * experts * 3 * E * width
    embedding = 4 * 97 * E
    rotary = sum(b.nbytes for b in loaded.model.base_model.rotary_emb.buffers())
    assert weight_bytes(loaded) == everything - embedding - rotary - expert // 2


def test_masks_and_position_tables_do_not_count():
    loaded = wrap_model(tiny_model("gpt2", vocab_size=V))
    tables = 4 * (V * 32 + 256 * 32)  # tokens and positions; GPT-2 ties its head to the first
    parameters = sum(p.nbytes for p in loaded.model.parameters())
    assert weight_bytes(loaded) == parameters - tables + 4 * V * 32


@pytest.mark.parametrize("name", ["gemma3", "phi3", "opt", "falcon", "mixtral", "gpt_oss", "deepseek_v3"])
def test_never_more_than_is_held(name):
    loaded = wrap_model(tiny_model(name, tie_word_embeddings=False))
    assert 0 < weight_bytes(loaded) < held_bytes(loaded.model)


def test_the_default_model():
    loaded = load_model(str(default_model()), device="cpu")
    norms = 61 * 576
    assert weight_bytes(loaded) == bfloat16_bytes(loaded, 134_515_008 - norms) + 2 * norms


def test_bandwidth_is_that_of_memory():
    """Between a very old and a very new machine, and not that of a cache (a thread cannot read 2 TB/s)."""
    assert 2e8 < read_bandwidth("cpu", seconds=0.05) < 2e12


def test_bandwidth_buffer_was_written(monkeypatch):
    """Pages never written are one page of zeros, which the cache holds."""
    monkeypatch.setattr(machine, "available_memory", lambda: 0)
    buffer = machine._buffer(torch.device("cpu"))
    assert buffer.nbytes == machine._LEAST_BYTES
    assert bool((buffer == 1).all())


def _quantised(loaded: LoadedModel) -> LoadedModel:
    model = share_copy(loaded.model)
    quantize_linears(model, 32, "shared")
    return loaded.with_model(model)


def _with_shared_layer() -> LoadedModel:
    loaded = wrap_model(tiny_model("llama"))
    loaded.model.add_module("again", copy.copy(loaded.model.get_output_embeddings()))
    return loaded
