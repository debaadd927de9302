"""Options in config.json of others' heads: what could change the numbers is honoured, or refused by its name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import PacelineError
from paceline.methods.heads.folder import load_head
from tests.helpers import loaded
from tests.methods.common import edit
from tests.methods.common import saved as saved_head

from .exchange_common import (
    DRAFT,
    LAYERS,
    STATES,
    VOCAB,
    dflash,
    eagle,
    folder_of,
    medusa,
    plain_config,
    published,
    target,
)
from .test_dflash_layout import config_of, tensors_of

AUX = "eagle_aux_hidden_state_layer_ids"
NORM = "layers.0.input_layernorm.weight"
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
INF = float("inf")


def eagle3(path, tensors=None, **changes):
    config = {**plain_config(), "draft_vocab_size": DRAFT, AUX: list(STATES), **changes}
    return folder_of(path, config, published(eagle(own_lm_head=True)) if tensors is None else tensors)


def eagle1(path, tensors=None, **changes):
    own = {name: one for name, one in eagle(1, VOCAB).state_dict().items() if "draft" not in name}
    return folder_of(path, {**plain_config(), **changes}, own if tensors is None else tensors)


def speculators(path, tensors=None, **changes):
    layer = plain_config(architectures=None) | changes.pop("layer", {})
    config = {"speculators_model_type": "eagle3", "draft_vocab_size": DRAFT, AUX: list(STATES)}
    config |= {"norm_before_residual": False, "transformer_layer_config": layer, **changes}
    return folder_of(path, config, published(eagle(own_lm_head=True)) if tensors is None else tensors)


def dflash_head(path, tensors=None, **changes):
    return folder_of(path, config_of(**changes), tensors_of(dflash(VOCAB)) if tensors is None else tensors)


def medusa_heads(path, tensors=None, **changes):
    own = {name: one for name, one in medusa(VOCAB).state_dict().items() if name != "draft_ids"}
    return folder_of(path, {"model_type": "medusa", **changes}, own if tensors is None else tensors)


LAYOUTS = {
    "eagle3": eagle3,
    "eagle1": eagle1,
    "speculators": speculators,
    "dflash": dflash_head,
    "medusa": medusa_heads,
}
OF_LAYERS = [name for name in LAYOUTS if name != "medusa"]


def read(folder):
    return load_head(folder, target())


def refused(folder, *words):
    with pytest.raises(PacelineError) as caught:
        read(folder)
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


WITHOUT_EFFECT = {
    "_name_or_path": "org/head", "architectures": None, "attention_dropout": 0.0, "auto_map": {"AutoModel": "a.B"},
    "bos_token_id": 1, "chunk_size_feed_forward": 0, "dtype": "bfloat16", "eos_token_id": [2, 3], "hidden_act": "silu",
    "initializer_range": 0.02, "logit_scale": 1.0, "mlp_bias": False, "output_attentions": False, "pretraining_tp": 1,
    "quantization_config": None, "temperature": 1.0, "torch_dtype": "float16", "use_cache": True, "an_option": False,
    "tie_word_embeddings": True, "max_window_layers": 28, "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_has_no_effect_is_read(layout, tmp_path):
    """As libraries write it into every config.json."""
    assert (
        read(LAYOUTS[layout](tmp_path / "h", **WITHOUT_EFFECT)).config == read(LAYOUTS[layout](tmp_path / "i")).config
    )


@pytest.mark.diagonal
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "value"), [
    ("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0), ("logit_scale", 0.5), ("logits_scaling", 8.0),
    ("embedding_multiplier", 12.0), ("residual_multiplier", 0.22), ("attention_multiplier", 0.1),
    ("query_pre_attn_scalar", 256), ("hidden_act", "gelu"), ("partial_rotary_factor", 0.5), ("mlp_bias", True),
    ("an_option", 3), ("quantization_config", {"bits": 4}), ("use_qk_norm", True), ("mlp_bias", "false"),
], ids=str)  # fmt: skip
def test_what_changes_the_numbers_is_refused_by_name(layout, name, value, tmp_path):
    refused(LAYOUTS[layout](tmp_path / "h", **{name: value}), name)


@pytest.mark.diagonal
@pytest.mark.parametrize("layout", OF_LAYERS)
@pytest.mark.parametrize(("changes", "word"), [
    ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "sliding"),
    ({"use_sliding_window": True}, "sliding"),
    ({"sliding_window": 8}, "sliding"),
    ({"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"]}, "sliding"),
    ({"layer_types": ["chunked_attention"]}, "layer_types"),
    ({"use_sliding_window": "false", "sliding_window": 8}, "use_sliding_window"),
    ({"rope_theta": 0}, "rope_theta"), ({"rope_theta": -1e4}, "rope_theta"), ({"rope_theta": INF}, "rope_theta"),
    ({"rope_theta": "1e4"}, "rope_theta"),
    ({"rms_norm_eps": 0}, "rms_norm_eps"), ({"rms_norm_eps": INF}, "rms_norm_eps"),
    ({"rope_theta": 5.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_theta"),
    ({"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default"}}, "rope_type"),
    ({"rope_scaling": {**LINEAR, "type": "yarn"}}, "rope_type"),
    ({"rope_scaling": {**LINEAR, "odd": 3}}, "odd"),
    ({"rope_scaling": {**LINEAR, "factor": INF}}, "rope_scaling.factor"),
    ({"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}}, "mrope_section"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
    ({"rope_scaling": {**YARN, "truncate": "false"}}, "truncate"),
], ids=str)  # fmt: skip
def test_layers(layout, changes, word, tmp_path):
    changes = {"layer": changes} if layout == "speculators" else changes
    refused(LAYOUTS[layout](tmp_path / "h", **changes), word)


@pytest.mark.parametrize("layout", OF_LAYERS)
def test_windows_behind_the_last_layer_are_none(layout, tmp_path):
    changes = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    read(LAYOUTS[layout](tmp_path / "h", **({"layer": changes} if layout == "speculators" else changes)))


@pytest.mark.parametrize(("layout", "changes", "word"), [
    ("eagle3", {AUX: [1, 3, 3]}, AUX),
    ("eagle3", {AUX: [3, 1, 6]}, AUX), ("eagle3", {"paceline_states": [6, 3, 1]}, "paceline"),
    ("eagle3", {AUX: None, "eagle_config": {AUX: [5, 2, 0]}}, f"eagle_config.{AUX}"),
    ("speculators", {AUX: [1, 1, 6]}, AUX),
    ("dflash", {"dflash_config": {"target_layer_ids": [5, 3, 1]}}, "target_layer_ids"),
    ("dflash", {"dflash_config": {"target_layer_ids": [1, 3, 3]}}, "target_layer_ids"),
    ("dflash", {"num_target_layers": LAYERS + 1}, "num layers 9"),
    ("dflash", {"block_size": 4, "dflash_config": {"block_size": 6}}, "block_size"),
    ("dflash", {"draft_vocab_size": 40}, "draft_vocab_size"),
    ("dflash", {"dflash_config": {"causal": "false"}}, "causal"),
    ("dflash", {"dflash_config": {"use_swa": True}}, "use_swa"),
    ("eagle3", {"norm_before_residual": "false"}, "norm_before_residual"), ("eagle3", {"fc_norm": "false"}, "fc_norm"),
    ("eagle3", {"eagle_config": {"norm_output": "false"}}, "norm_output"),
    ("eagle3", {"norm_output": True, "eagle_config": {"norm_output": False}}, "norm_output"),
    ("eagle3", {"parallel_drafting": "false"}, "parallel_drafting"), ("eagle3", {"eagle_config": {"odd": 3}}, "odd"),
    ("eagle3", {"tie_word_embeddings": "false"}, "tie_word_embeddings"), ("eagle3", {"pard_token": 3}, "mask token"),
    ("eagle3", {"eagle_config": {"use_aux_hidden_state": "true"}}, "use_aux_hidden_state"),
    ("eagle1", {"norm_before_residual": True}, "norm_before_residual"),
    ("eagle1", {"draft_vocab_size": 40}, "draft_vocab_size"),
    ("eagle1", {"bias": True}, "bias True"), ("eagle3", {"attention_bias": True}, "attention_bias True"),
    ("eagle1", {"qkv_bias": True}, "qkv_bias True"), ("eagle1", {"attention_bias": "false"}, "attention_bias"),
    ("speculators", {"layer": {"attention_bias": True}}, "attention_bias True"),
    ("speculators", {"vocab_size": 5}, "vocab_size"),
    ("speculators", {"norm_before_residual": "false"}, "norm_before_residual"),
    ("medusa", {"hidden_size": 64}, "hidden_size 64"),
    ("medusa", {"original_lm_head": "false"}, "original_lm_head"),
    ("medusa", {"medusa_fc_bias": True}, "medusa_fc_bias True"),
    ("medusa", {"medusa_fc_bias": "false"}, "medusa_fc_bias"),
], ids=str)  # fmt: skip
def test_each_layout(layout, changes, word, tmp_path):
    refused(LAYOUTS[layout](tmp_path / "h", **changes), word)


def test_biases_that_are_not_announced(tmp_path):
    one = {
        name: t
        for name, t in eagle(1, VOCAB, attention_bias=True, fc_bias=True).state_dict().items()
        if "draft" not in name
    }
    assert read(eagle1(tmp_path / "told", one, qkv_bias=True, attention_bias=False, bias=True)).config.attention_bias
    refused(eagle1(tmp_path / "untold", one), "attention_bias False")
    refused(eagle1(tmp_path / "denied", one, qkv_bias=True, bias=False), "bias False")
    heads = {name: t for name, t in medusa(VOCAB, bias=True).state_dict().items() if name != "draft_ids"}
    assert read(medusa_heads(tmp_path / "medusa", heads)).config.bias
    refused(medusa_heads(tmp_path / "without", heads, medusa_fc_bias=False), "medusa_fc_bias False")


def test_output_rows_that_are_tied_to_embeddings_of_its_own(tmp_path):
    tensors = published(eagle(own_lm_head=True, own_embeddings=True))
    assert read(eagle3(tmp_path / "both", tensors, tie_word_embeddings=True)).config.own_lm_head
    del tensors["lm_head.weight"]
    refused(eagle3(tmp_path / "tied", tensors, tie_word_embeddings=True), "tie_word_embeddings")


def test_two_mask_tokens(tmp_path):
    head = eagle(own_lm_head=True, mask_token_id=11, num_speculative_tokens=4)
    tensors = published(head) | {"mask_hidden": head.mask_hidden.detach()}
    assert read(eagle3(tmp_path / "one", tensors, ptd_token_id=11, mask_token_id=11)).config.mask_token_id == 11
    refused(eagle3(tmp_path / "two", tensors, ptd_token_id=11, mask_token_id=12), "[11, 12]")
    refused(
        eagle3(tmp_path / "none", tensors, ptd_token_id=11, paceline_num_speculative_tokens=0), "num_speculative_tokens"
    )


def test_tensors_under_two_names(tmp_path):
    tensors = published(eagle(own_lm_head=True))
    for number, name in enumerate((NORM, "model.midlayer.input_layernorm.weight")):
        refused(eagle3(tmp_path / str(number), tensors | {name: torch.ones(32)}), "holds a tensor twice", NORM)


def test_tensors_in_two_files(tmp_path):
    folder = eagle3(tmp_path / "h")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"norm.weight": tensors["norm.weight"] + 1}, folder / "b.safetensors")
    names = {"norm.weight": "b.safetensors", "fc.weight": "a.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    refused(folder, "a tensor of the same name", "norm.weight")


def test_a_key_twice(tmp_path):
    folder = eagle3(tmp_path / "h")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text('{"rms_norm_eps": 0.5, ' + text[1:])
    refused(folder, "'rms_norm_eps' with two values")


@pytest.mark.parametrize(("change", "word"), [
    ({"states": [0, 1, 1]}, "states"), ({"states": [2, 1, 0]}, "states"), ({"rms_norm_eps": INF}, "rms_norm_eps"),
    ({"rope_theta": INF}, "rope_theta"), ({"norm_before_residual": "false"}, "norm_before_residual"),
    ({"rope_scaling": {**LINEAR, "factor": INF}}, "factor"), ({"rope_scaling": {**LINEAR, "odd": 3}}, "odd"),
    ({"rope_scaling": {**YARN, "truncate": "no"}}, "truncate"),
], ids=str)  # fmt: skip
def test_heads_of_our_own(change, word, tmp_path):
    head = saved_head(tmp_path / "head")
    edit(head / "config.json", lambda config: config["head"].update(change))
    with pytest.raises(PacelineError, match=word):
        load_head(head, loaded())
