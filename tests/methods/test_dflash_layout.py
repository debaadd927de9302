"""DFlash heads as their authors publish them, written by hand; what the module lacks is refused."""

import pytest
import torch

from paceline.config import parse
from paceline.errors import ConfigError, IncompatibleModels
from paceline.methods.dflash.head import DFlashHead
from paceline.methods.heads.folder import load_head, save_head
from tests.methods.heads import block_of

from .exchange_common import DRAFT, VOCAB, WIDTH, dflash, folder_of, plain_config, target


def tensors_of(head: DFlashHead, prefix: str = "") -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in head.state_dict().items() if name != "draft_ids"}


def config_of(**changes) -> dict:
    nested = {"mask_token_id": 11, "target_layer_ids": [1, 3, 5], **changes.pop("dflash_config", {})}
    usual = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, "block_size": 6}
    return plain_config(**{**usual, "dflash_config": nested, **changes})


def blocks(head: DFlashHead) -> torch.Tensor:
    head.attach(target().embeddings, target().output_rows())
    with torch.inference_mode():
        states = torch.randn(1, 9, 3 * WIDTH, generator=torch.Generator().manual_seed(0))
        return block_of(head, states, list(range(8)))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_the_authors_layout(prefix, tmp_path):
    head = dflash(VOCAB)
    folder = folder_of(tmp_path / "h", config_of(), tensors_of(head, prefix))
    read = load_head(folder, target())
    assert (read.config.states, read.config.mask_token_id, read.config.block_size) == ((2, 4, 6), 11, 6)
    torch.testing.assert_close(blocks(read), blocks(head))
    assert parse(f"head:{folder}").as_dict()["method"] == "dflash"
    again = load_head(save_head(tmp_path / "ours", read, target(), {}), target())
    assert again.config == read.config


def test_block_size_may_be_nested_and_rotary_positions_scaled(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    head = dflash(VOCAB, rope_theta=500.0, rope_scaling=scaling)
    config = config_of(dflash_config={"block_size": 6}, block_size=None, rope_theta=500.0, rope_scaling=scaling)
    read = load_head(folder_of(tmp_path / "h", config, tensors_of(head)), target())
    torch.testing.assert_close(blocks(read), blocks(head))


@pytest.mark.parametrize("name", ["causal", "causal_head"])
def test_causal_heads_are_jetspec(name, tmp_path):
    head = dflash(VOCAB, causal=True)
    folder = folder_of(tmp_path / "h", config_of(dflash_config={name: True}), tensors_of(head))
    read = load_head(folder, target())
    assert read.config == head.config
    torch.testing.assert_close(blocks(read), blocks(head))
    assert parse(f"head:{folder}").as_dict()["method"] == "jetspec"
    plain = folder_of(tmp_path / "p", config_of(dflash_config={name: False}), tensors_of(head))
    assert parse(f"head:{plain}").as_dict()["method"] == "dflash"


@pytest.mark.parametrize("changes", [
    {"architectures": ["DFlash2DraftModel"]}, {"dflash_config": {"projector_type": "dspark"}}, {"is_causal": True},
    {"dflash_config": {"input_embedding_scale": 45.25}}, {"attention_bias": True},
    {"layer_types": ["full_attention", "sliding_attention"]}, {"quantization_config": {"bits": 4}},
], ids=str)  # fmt: skip
def test_what_the_module_lacks_is_refused(changes, tmp_path):
    folder = folder_of(tmp_path / "h", config_of(**changes), tensors_of(dflash(VOCAB)))
    with pytest.raises(IncompatibleModels, match="DFlash module lacks"):
        load_head(folder, target())


def speculators(head: DFlashHead, **changes) -> tuple[dict, dict[str, torch.Tensor]]:
    """The head as speculators writes it, by hand: config.json and tensors."""
    layer = {key: value for key, value in config_of().items() if key not in ("dflash_config", "block_size")}
    size, ids = head.config.draft_vocab_size, head.draft_ids
    config = {
        "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "speculators_version": "0.9.0",
        "block_size": 6, "draft_vocab_size": size, "mask_token_id": 11, "aux_hidden_state_layer_ids": [2, 4, 6],
        "sample_from_anchor": False, "sliding_window_non_causal": False, "target_hidden_size": None,
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "org/t"}},
        "transformer_layer_config": layer | {"layer_types": ["full_attention"] * 2},
    }  # fmt: skip
    tensors = {**tensors_of(head), "embed_tokens.weight": target().embeddings.clone()}
    tensors["lm_head.weight"] = target().output_rows()[ids].clone()
    if size < VOCAB:
        tensors["d2t"] = ids - torch.arange(size)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return config | changes, tensors


@pytest.mark.parametrize("size", [DRAFT, VOCAB])
@pytest.mark.parametrize("holds_embeddings", [True, False])
def test_the_layout_of_speculators(size, holds_embeddings, tmp_path):
    head = dflash(size)
    config, tensors = speculators(head)
    if not holds_embeddings:
        del tensors["embed_tokens.weight"]
    folder = folder_of(tmp_path / "h", config, tensors)
    read = load_head(folder, target())
    assert read.config == head.config
    assert torch.equal(read.draft_ids, head.draft_ids)
    torch.testing.assert_close(blocks(read), blocks(head))
    assert parse(f"head:{folder}").as_dict()["method"] == "dflash"


@pytest.mark.parametrize(("changes", "name"), [
    ({"speculators_model_type": "dflash2", "selector_rank": 8}, "dflash2, with a selector of paths"),
    ({"speculators_model_type": "jetspec", "kd_temperature": 1.0}, "jetspec, whose rows"),
    ({"speculators_model_type": "dflash3"}, "'dflash3'"),
    ({"sample_from_anchor": True}, "sample_from_anchor"),
    ({"causal": True}, "causal"),
    ({"markov_rank": 8}, "markov_rank"),
    ({"aux_hidden_state_layer_ids": [2, 4, 8]}, "states that the target lacks"),
], ids=str)  # fmt: skip
def test_what_speculators_has_beyond_it_is_refused_by_name(changes, name, tmp_path):
    config, tensors = speculators(dflash())
    with pytest.raises(IncompatibleModels, match=name):
        load_head(folder_of(tmp_path / "h", config | changes, tensors), target())


@pytest.mark.parametrize("name", ["DSparkDraftModel", "Gemma4DSparkModel", "DFlash2DraftModel", "DominoDraftModel"])
def test_kin_without_a_dflash_config_are_refused_by_name(name, tmp_path):
    config = config_of(architectures=[name]) | {"target_layer_ids": [1, 3, 5], "mask_token_id": 11, "markov_rank": 8}
    del config["dflash_config"]
    with pytest.raises(IncompatibleModels, match=f"architecture {name}"):
        load_head(folder_of(tmp_path / "h", config, tensors_of(dflash(VOCAB))), target())


@pytest.mark.parametrize("change", [
    lambda config, tensors: tensors.update({"markov_head.w1.weight": torch.zeros(VOCAB, 4)}),
    lambda config, tensors: tensors.pop("d2t"),
    lambda config, tensors: tensors.update(d2t=tensors["d2t"] + torch.arange(DRAFT)),
    lambda config, tensors: tensors["embed_tokens.weight"].neg_(),
    lambda config, tensors: config.pop("aux_hidden_state_layer_ids"),
    lambda config, tensors: config.update(target_layer_ids=[1, 3, 5]),
    lambda config, tensors: config.update(target_hidden_size=64),
    lambda config, tensors: config.pop("transformer_layer_config"),
])  # fmt: skip
def test_a_speculators_folder_is_read_whole_or_not_at_all(change, tmp_path):
    config, tensors = speculators(dflash())
    change(config, tensors)
    with pytest.raises((ConfigError, IncompatibleModels)):
        load_head(folder_of(tmp_path / "h", config, tensors), target())


@pytest.mark.parametrize("changes", [
    {"block_size": 1}, {"dflash_config": {"mask_token_id": VOCAB}}, {"dflash_config": {"target_layer_ids": "x"}},
    {"num_hidden_layers": 3}, {"dflash_config": {"target_layer_ids": [1, 3]}}, {"head_dim": 6}, {"hidden_size": None},
], ids=str)  # fmt: skip
def test_damaged_configs_are_refused(changes, tmp_path):
    folder = folder_of(tmp_path / "h", config_of(**changes), tensors_of(dflash(VOCAB)))
    with pytest.raises(ConfigError):
        load_head(folder, target())


def test_a_dflash_config_that_is_none_is_refused(tmp_path):
    config = {**config_of(), "dflash_config": 3}
    with pytest.raises(ConfigError):
        load_head(folder_of(tmp_path / "h", config, tensors_of(dflash(VOCAB))), target())
