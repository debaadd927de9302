"""Heads as others publish them, written by hand: every layout, and what must not be read as something else."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.config import parse
from paceline.errors import ConfigError, IncompatibleModels
from paceline.methods.heads.exchange import export_head
from paceline.methods.heads.folder import load_head

from .exchange_common import (
    DRAFT,
    LAYERS,
    STATES,
    VOCAB,
    WIDTH,
    agree,
    eagle,
    folder_of,
    medusa,
    plain_config,
    published,
    saved,
    target,
)

AUX = "eagle_aux_hidden_state_layer_ids"


def eagle3_config(**changes):
    return plain_config(**{"draft_vocab_size": DRAFT, AUX: list(STATES), **changes})


def speculators_config(**changes):
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT,
        AUX: list(STATES),
        "transformer_layer_config": plain_config(architectures=None),
        "speculators_config": {"verifier": {"name_or_path": "org/target"}},
    }
    return {**config, **changes}


def test_peagle_layouts(tmp_path):
    """A vector of masks of any shape; the token by its three names; no norm before the residual where none is named."""
    head = eagle(own_lm_head=True, mask_token_id=11, num_speculative_tokens=6)
    tensors = published(head) | {"mask_hidden": head.mask_hidden.detach().clone().view(1, 1, -1)}
    spec = {"speculators_model_type": "peagle", "mask_token_id": 11}
    methods = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 6}]}
    configs = (
        (eagle3_config(ptd_token_id=11), 4),
        (eagle3_config(pard_token=11, parallel_drafting=True), 4),
        (speculators_config(**spec, speculators_config=methods), 6),
    )
    for number, (config, tokens) in enumerate(configs):
        read = load_head(folder_of(tmp_path / str(number), config, tensors), target())
        assert (read.config.method, read.config.mask_token_id) == ("peagle", 11)
        assert read.config.num_speculative_tokens == tokens
        assert not read.config.norm_before_residual
        assert torch.equal(read.mask_hidden, head.mask_hidden)
    with pytest.raises(ConfigError, match="no mask token"):
        load_head(folder_of(tmp_path / "without", eagle3_config(), tensors), target())
    with pytest.raises(ConfigError, match="no P-EAGLE head"):
        load_head(folder_of(tmp_path / "beyond", eagle3_config(ptd_token_id=VOCAB), tensors), target())
    bare = published(eagle(own_lm_head=True))
    with pytest.raises(IncompatibleModels, match="parallel_drafting without mask_hidden"):
        load_head(folder_of(tmp_path / "bare", eagle3_config(parallel_drafting=True), bare), target())


def test_eagle_repository(tmp_path):
    """A pickle with the target's embeddings and a bias, as EAGLE-1 and -2 were published; no d2t, no output rows."""
    head = eagle(1, VOCAB, fc_bias=True)
    tensors = {name: t for name, t in head.state_dict().items() if "draft" not in name}
    tensors["embed_tokens.weight"] = target().model.get_input_embeddings().weight.detach().half()
    config = plain_config(architectures=["LlamaForCausalLM"], bias=True)
    read = load_head(folder_of(tmp_path / "h", config, tensors, "pytorch_model.bin"), target())
    assert (read.config.version, read.config.states, read.config.fc_bias) == (1, (LAYERS,), True)
    assert not read.config.own_embeddings
    assert agree(head, read)


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    class Runs:
        def __reduce__(self):
            return (print, ("code",))

    folder = folder_of(tmp_path / "h", plain_config(), {"fc.weight": Runs()}, "pytorch_model.bin")
    with pytest.raises(ConfigError, match="more than tensors"):
        load_head(folder, target())


@pytest.mark.parametrize("layer", ["midlayer.", "layers.0.", "model.layers.0.", "model.midlayer."])
def test_eagle3_names(layer, tmp_path):
    head = eagle(own_lm_head=True)
    read = load_head(folder_of(tmp_path / "h", eagle3_config(), published(head, layer)), target())
    assert read.config.states == STATES
    assert read.config.norm_before_residual is False
    assert torch.equal(read.draft_ids, head.draft_ids)
    assert agree(head, read)


@pytest.mark.parametrize("masks", [{}, {"mask_token_id": 11, "num_speculative_tokens": 4}], ids=str)
def test_heads_of_several_layers(masks, tmp_path):
    """As AWS publishes P-EAGLE heads, and vLLM reads EAGLE-3 heads: later layers are ordinary layers of Llama."""
    head = eagle(own_lm_head=True, num_hidden_layers=4, **masks)
    tensors, more = published(head), {"ptd_token_id": 11} if masks else {}
    assert tensors["layers.3.self_attn.q_proj.weight"].shape == (WIDTH, WIDTH)
    config = eagle3_config(num_hidden_layers=4, **more)
    read = load_head(folder_of(tmp_path / "h", config, tensors), target())
    assert (read.config.num_hidden_layers, read.config.method) == (4, "peagle" if masks else "eagle3")
    assert agree(head, read)
    for layers in (3, 5):
        with pytest.raises(ConfigError, match=r"layers\.[34]\.mlp.up_proj.weight"):
            load_head(folder_of(tmp_path / str(layers), {**config, "num_hidden_layers": layers}, tensors), target())


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHORT = {"original_max_position_embeddings": 8}
SCALINGS = [
    LLAMA3 | SHORT,
    {"type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0} | SHORT,
    {"rope_type": "yarn", "factor": 32.0, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False} | SHORT,
]


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_scaled_rotary_positions(scaling, place, tmp_path):
    """Cosines and sines are those of transformers' Llama, also in speculators' layout and after an export."""
    changes = {"rope_theta": 5000.0, place: scaling}
    nested = speculators_config(transformer_layer_config=plain_config(architectures=None, **changes))
    tensors, positions = published(eagle(own_lm_head=True)), torch.arange(40)[None]
    llama = LlamaConfig(head_dim=8, max_position_embeddings=64, rope_parameters={"rope_theta": 5000.0, **scaling})
    cos, sin = LlamaRotaryEmbedding(llama)(torch.zeros(1), positions)
    assert not torch.allclose(cos, eagle().rotation(positions)[0][:, 0], atol=0.1)
    for number, config in enumerate((eagle3_config(**changes), nested)):
        folder = folder_of(tmp_path / str(number), config, tensors)
        read = load_head(folder, target())
        exported = export_head(saved(tmp_path / f"saved {number}", read), "vllm", tmp_path / f"out {number}", target())
        for head in (read, load_head(exported.folder, target())):
            for found, expected in zip(head.rotation(positions), (cos, sin), strict=True):
                torch.testing.assert_close(found[:, 0], expected)


@pytest.mark.parametrize("scaling", [LLAMA3, {"rope_type": "yarn", "factor": 4.0}], ids=str)
def test_what_is_scaled_is_by_default_the_context_of_config_json(scaling, tmp_path):
    config = eagle3_config(rope_scaling=scaling, max_position_embeddings=8)
    read = load_head(folder_of(tmp_path / "h", config, published(eagle(own_lm_head=True))), target())
    assert read.config.rope_scaling["original_max_position_embeddings"] == 8


@pytest.mark.parametrize("scaling", [
    LLAMA3, {"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "yarn", "factor": "x"} | SHORT,
    {"type": "linear", "factor": 0}, {"rope_type": "yarn", "factor": 2.0}, {"rope_type": ["llama3"]},
], ids=str)  # fmt: skip
def test_unsound_rotary_positions_are_refused(scaling, tmp_path):
    folder = folder_of(tmp_path / "h", eagle3_config(rope_scaling=scaling), published(eagle(own_lm_head=True)))
    with pytest.raises(ConfigError, match="rope_scaling"):
        load_head(folder, target())


@pytest.mark.parametrize(
    ("changes", "states"),
    [
        ({}, STATES),
        ({AUX: None}, (2, LAYERS // 2, LAYERS - 3)),
        ({AUX: None, "eagle_config": {AUX: [0, 2, 5]}}, (1, 3, 6)),
        ({"eagle_config": {AUX: [0, 2, 5]}}, STATES),
        ({AUX: None, "eagle_config": {AUX: [2, 4, 5]}, "paceline_states": [2, 4, 5]}, (2, 4, 5)),
    ],
)
def test_which_states_a_head_reads(changes, states, tmp_path):
    folder = folder_of(tmp_path / "h", eagle3_config(**changes), published(eagle(own_lm_head=True)))
    assert load_head(folder, target()).config.states == states


def test_a_count_that_could_be_either_is_refused(tmp_path):
    config = eagle3_config(**{AUX: None, "eagle_config": {AUX: [2, 4, 5]}})
    with pytest.raises(ConfigError, match="paceline_states"):
        load_head(folder_of(tmp_path / "h", config, published(eagle(own_lm_head=True))), target())


def test_d2t_in_any_order(tmp_path):
    """The rows follow their ids."""
    head, tensors = eagle(own_lm_head=True), published(eagle(own_lm_head=True))
    order = torch.randperm(DRAFT, generator=torch.Generator().manual_seed(2))
    tensors["d2t"] = head.draft_ids[order] - torch.arange(DRAFT)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    assert agree(head, load_head(folder_of(tmp_path / "h", eagle3_config(), tensors), target()))


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (lambda ids: ids, "twice|outside|t2d"),  # absolute ids in the place of offsets
        (lambda ids: ids * 0, "t2d"),
        (lambda ids: ids * 0 - torch.arange(DRAFT), "twice"),
        (lambda ids: ids * 0 + 60, "outside"),
    ],
)
def test_a_wrong_d2t_is_refused(ids, told, tmp_path):
    tensors = published(eagle(own_lm_head=True))
    tensors["d2t"] = ids(eagle().draft_ids)
    with pytest.raises(ConfigError, match=told):
        load_head(folder_of(tmp_path / "h", eagle3_config(), tensors), target())


@pytest.mark.parametrize("said", [None, True, False])
def test_speculators(said, tmp_path):
    """norm_before_residual is true where a speculators config does not say, and false in a plain one."""
    head = eagle(own_lm_head=True, norm_before_residual=said is not False)
    config = speculators_config(**({} if said is None else {"norm_before_residual": said}))
    read = load_head(folder_of(tmp_path / "h", config, published(head, "layers.0.")), target())
    assert read.config.norm_before_residual is (said is not False)
    assert read.config.states == STATES
    assert agree(head, read)
    assert not agree(eagle(own_lm_head=True, norm_before_residual=said is False), read)


def test_other_speculators_are_refused_by_name(tmp_path):
    folder = folder_of(tmp_path / "h", speculators_config(speculators_model_type="mlp"), {"x": torch.zeros(1)})
    with pytest.raises(IncompatibleModels, match="'mlp'"):
        load_head(folder, target())


def test_tables_of_the_heads_own(tmp_path):
    head = eagle(own_lm_head=True, own_embeddings=True)
    read = load_head(folder_of(tmp_path / "h", eagle3_config(), published(head)), target())
    assert read.config.own_embeddings
    assert agree(head, read)


def test_layers_of_qwen3(tmp_path):
    head = eagle(own_lm_head=True, qk_norm=True)
    tensors = published(head)
    assert tensors["midlayer.self_attn.k_norm.weight"].shape == (8,)
    assert agree(head, load_head(folder_of(tmp_path / "h", eagle3_config(model_type="qwen3"), tensors), target()))
    with pytest.raises(ConfigError, match="q_norm"):
        load_head(folder_of(tmp_path / "other", eagle3_config(), tensors), target())


@pytest.mark.parametrize("place", ["top level", "eagle_config", "speculators"])
@pytest.mark.parametrize("norms", [{"fc_norm": True, "norm_output": True}, {"norm_before_fc": True}], ids=str)
def test_the_norms_of_eagle_3_1(norms, place, tmp_path):
    head = eagle(own_lm_head=True, norm_before_residual=place == "speculators", **norms)
    tensors, nested = published(head), place == "eagle_config"
    assert "input_norm.weight" in tensors or tensors["fc_norm.2.weight"].shape == (WIDTH,)
    made = speculators_config if place == "speculators" else eagle3_config
    config = made(**({"eagle_config": norms} if nested else norms))
    read = load_head(folder_of(tmp_path / "h", config, tensors), target())
    assert agree(head, read)
    if read.config.norm_output:
        del config["eagle_config" if nested else "norm_output"]
        if nested:
            config["fc_norm"] = True
        assert not agree(head, load_head(folder_of(tmp_path / "other", config, tensors), target()))
    else:
        with pytest.raises(ConfigError, match=r"input_norm\.weight"):
            load_head(folder_of(tmp_path / "other", made(), tensors), target())


@pytest.mark.parametrize("change", [
    {"hidden_act": "gelu"}, {"model_type": "gemma3"}, {"quantization_config": {"bits": 4}},
    {"eagle_config": {"use_aux_hidden_state": False}}, {"target_hidden_size": 64}, {"vocab_size": 98},
    {AUX: [2, 4, LAYERS]}, {"logit_scale": 0.5}, {"layer_types": ["sliding_attention"]},
])  # fmt: skip
def test_what_the_module_lacks_is_refused(change, tmp_path):
    tensors = published(eagle(own_lm_head=True))
    if "vocab_size" in change:
        tensors["t2d"] = torch.cat([tensors["t2d"], torch.zeros(1, dtype=torch.bool)])
    with pytest.raises(IncompatibleModels):
        load_head(folder_of(tmp_path / "h", eagle3_config(**change), tensors), target())


def test_all_tensors_that_do_not_fit_are_listed(tmp_path):
    tensors = published(eagle(own_lm_head=True))
    del tensors["norm.weight"], tensors["midlayer.mlp.up_proj.weight"]
    tensors |= {"bias_hidden": torch.zeros(1), "fc.weight": torch.zeros(WIDTH, WIDTH)}
    with pytest.raises(ConfigError) as error:
        load_head(folder_of(tmp_path / "h", eagle3_config(), tensors), target())
    for name in ("norm.weight", "layers.0.mlp.up_proj.weight", "bias_hidden", "mismatch for fc.weight"):
        assert name in str(error.value)


def test_a_biased_output_projection(tmp_path):
    tensors = published(eagle(own_lm_head=True))
    tensors["midlayer.self_attn.o_proj.bias"] = torch.zeros(WIDTH)
    load_head(folder_of(tmp_path / "zero", eagle3_config(), tensors), target())
    tensors["midlayer.self_attn.o_proj.bias"] = torch.ones(WIDTH)
    with pytest.raises(IncompatibleModels, match="o_proj"):
        load_head(folder_of(tmp_path / "one", eagle3_config(), tensors), target())


def test_medusa_of_the_original_repository(tmp_path):
    head = medusa(VOCAB, own_lm_head=True, bias=True, num_layers=2)
    tensors = {}
    for name, tensor in head.state_dict().items():
        parts = name.split(".")
        if parts[0] == "blocks":
            tensors[f"{parts[1]}.{parts[3]}.linear.{parts[4]}"] = tensor
        elif parts[0] == "lm_heads":
            tensors[f"{parts[1]}.2.weight"] = tensor
    config = {"medusa_num_heads": 5, "medusa_num_layers": 2, "base_model_name_or_path": "org/target"}
    read = load_head(folder_of(tmp_path / "h", config, tensors, "medusa_lm_head.pt"), target())
    assert (read.config.num_heads, read.config.num_layers, read.config.bias) == (3, 2, True)
    assert agree(head, read)


def test_medusa_rows_shared_with_the_target(tmp_path):
    head = medusa()
    rows = target().model.get_output_embeddings().weight.detach()
    tensors = {name: t for name, t in head.state_dict().items() if name.startswith("blocks.")}
    tensors |= {"lm_head.weight": rows, "token_map": head.draft_ids}
    config = {"model_type": "medusa", "vocab_size": VOCAB, "original_lm_head": True, "truncated_vocab_size": DRAFT}
    read = load_head(folder_of(tmp_path / "copy", config, tensors), target())
    assert not read.config.own_lm_head
    assert agree(head, read)
    read = load_head(folder_of(tmp_path / "own", config, tensors | {"lm_head.weight": rows + 1}), target())
    assert read.config.own_lm_head


@pytest.mark.parametrize(
    ("config", "method"),
    [
        (plain_config(architectures=["LlamaForCausalLM"]), "eagle"),
        (plain_config(), "eagle3"),
        (eagle3_config(ptd_token_id=3), "peagle"),
        (speculators_config(speculators_model_type="peagle"), "peagle"),
        (speculators_config(), "eagle3"),
        ({"medusa_num_heads": 3, "medusa_num_layers": 1}, "medusa"),
        ({"model_type": "medusa"}, "medusa"),
    ],
)
def test_the_command_line_knows_the_method(config, method, tmp_path):
    folder = folder_of(tmp_path / "h", config, {"x": torch.zeros(1)})
    assert parse(f"head:{folder}").as_dict()["method"] == method


def test_a_target_is_needed(tmp_path):
    folder = folder_of(tmp_path / "h", eagle3_config(), published(eagle(own_lm_head=True)))
    with pytest.raises(ConfigError, match="without its target"):
        load_head(folder)
