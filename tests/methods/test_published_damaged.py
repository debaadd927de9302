"""Heads of others whose config.json or files are damaged: one error of ours, before they take time or memory."""

import json

import pytest
import torch
from safetensors.torch import save_file

from paceline.errors import PacelineError
from paceline.methods.heads.folder import load_head

from .exchange_common import DRAFT, STATES, eagle, folder_of, medusa, plain_config, published, target

AUX = "eagle_aux_hidden_state_layer_ids"
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
WRONG = (10**9, 10**12, 10**30, -1, 0, "x", 2.5, [4], True)


def eagle_folder(path, tensors=None, **changes):
    config = {**plain_config(), "draft_vocab_size": DRAFT, AUX: list(STATES), **changes}
    return folder_of(path, config, published(eagle(own_lm_head=True)) if tensors is None else tensors)


def refused(folder, words=""):
    with pytest.raises(PacelineError) as caught:
        load_head(folder, target())
    assert words in str(caught.value)


def test_the_untouched_ones_are_read(tmp_path):
    assert load_head(eagle_folder(tmp_path / "eagle"), target()).config.states == STATES
    tensors = {name: one for name, one in medusa().state_dict().items() if name != "draft_ids"}
    tensors["token_map"] = medusa().draft_ids
    folder = folder_of(tmp_path / "medusa", {"model_type": "medusa"}, tensors)
    assert load_head(folder, target()).config.num_heads == 3


@pytest.mark.diagonal
@pytest.mark.parametrize("value", WRONG, ids=str)
@pytest.mark.parametrize("size", [*SIZES, "draft_vocab_size", "target_hidden_size"])
def test_sizes(tmp_path, size, value):
    refused(eagle_folder(tmp_path / "head", **{size: value}))


@pytest.mark.parametrize(
    "changes",
    [
        {"eagle_config": "x"},
        {"eagle_config": {AUX: "x"}, AUX: None},
        {AUX: ["1"]},
        {AUX: [10**9]},
        {AUX: 3},
        {"rms_norm_eps": "x"},
        {"rope_theta": "x"},
        {"rope_scaling": [1]},
        {"layer_types": 3},
        {"num_hidden_layers": 10**9},
        {"speculators_model_type": ["eagle3"]},
        {"speculators_model_type": "eagle3", "transformer_layer_config": 3},
    ],
    ids=str,
)
def test_other_values(tmp_path, changes):
    refused(eagle_folder(tmp_path / "head", **changes))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 1000, "\xff"], ids=str)
def test_a_config_that_is_no_object(tmp_path, text):
    folder = eagle_folder(tmp_path / "head")
    (folder / "config.json").write_text(text, encoding="latin-1")
    refused(folder, "config.json")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8, torch.bool])
def test_weights_that_are_no_floats(tmp_path, dtype):
    tensors = published(eagle(own_lm_head=True))
    tensors["norm.weight"] = tensors["norm.weight"].to(dtype)
    refused(eagle_folder(tmp_path / "head", tensors), "norm.weight in")


@pytest.mark.parametrize("name", ["blocks.999999999.layers.0.weight", "blocks.0.layers.999999999.weight"])
def test_medusa_heads_without_number(tmp_path, name):
    refused(folder_of(tmp_path / "head", {"model_type": "medusa"}, {name: torch.zeros(32, 32)}), "num_")


@pytest.mark.parametrize("value", ["x", -1, 10**12, [97]], ids=str)
def test_the_vocabulary_of_medusa(tmp_path, value):
    tensors = {name: one for name, one in medusa(97).state_dict().items() if name != "draft_ids"}
    refused(folder_of(tmp_path / "head", {"model_type": "medusa", "vocab_size": value}, tensors))


@pytest.mark.parametrize("part", ["part.bin", "../part.safetensors", "sub/part.safetensors", 3])
def test_an_index_that_leads_elsewhere(tmp_path, part):
    folder = eagle_folder(tmp_path / "head")
    for place in ("part.bin", "../part.safetensors"):
        save_file(published(eagle(own_lm_head=True)), folder / place)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": part}}))
    refused(folder, "index")


def test_a_file_that_is_cut(tmp_path):
    folder = eagle_folder(tmp_path / "head")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(folder, "cannot be read")
