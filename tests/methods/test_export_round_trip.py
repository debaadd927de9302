"""Every head for every engine: what is written reads back as the same head, or is refused by name."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import ConfigError, IncompatibleModels, NotExportable
from paceline.methods.heads import exchange
from paceline.methods.heads.exchange import check_written, export_head
from paceline.methods.heads.folder import load_head
from paceline.methods.heads.published import TargetFacts
from paceline.zoo import ZooModel, registry

from .exchange_common import DRAFT, LAYERS, STATES, VOCAB, WIDTH, dflash, eagle, medusa, saved, target

HEADS = {
    "eagle": lambda: eagle(1),
    "eagle whole": lambda: eagle(1, VOCAB),
    "eagle layers": lambda: eagle(1, num_hidden_layers=2),
    "eagle zero bias": lambda: _zero_bias(eagle(1, fc_bias=True)),
    "eagle bias": lambda: eagle(1, fc_bias=True),
    "eagle qkv bias": lambda: eagle(1, attention_bias=True),
    "eagle own rows": lambda: eagle(1, own_lm_head=True),
    "eagle3": eagle,
    "eagle3 own rows": lambda: eagle(own_lm_head=True),
    "eagle3 normed": lambda: eagle(norm_before_residual=True),
    "eagle3 own table": lambda: eagle(own_embeddings=True),
    "eagle3 bias": lambda: eagle(attention_bias=True),
    "eagle3 last": lambda: eagle(states=(2, 4, LAYERS)),
    "eagle3 embeddings": lambda: eagle(states=(0, 4, 5)),
    "peagle": lambda: eagle(mask_token_id=5, num_speculative_tokens=3),
    "eagle3 layers": lambda: eagle(num_hidden_layers=2),
    "eagle3.1": lambda: eagle(fc_norm=True, norm_output=True),
    "eagle3 qwen3": lambda: eagle(qk_norm=True),
    "eagle3 norm before fc": lambda: eagle(norm_before_fc=True),
    "dflash": dflash,
    "dflash whole": lambda: dflash(VOCAB),
    "dflash own rows": lambda: dflash(own_lm_head=True),
    "dflash llama": lambda: dflash(qk_norm=False),
    "dflash embeddings": lambda: dflash(states=(0, 3)),
    "dflash last": lambda: dflash(states=(2, LAYERS)),
    "jetspec": lambda: dflash(VOCAB, causal=True),
    "medusa": medusa,
    "medusa own rows": lambda: medusa(VOCAB, own_lm_head=True, bias=True, num_layers=2),
    "medusa own rows of a part": lambda: medusa(own_lm_head=True),
}
REFUSED = {
    "vllm": {"eagle bias", "eagle3 qwen3", "eagle own rows", "eagle3 bias", "eagle3 last", "medusa own rows of a part",
             "dflash own rows", "dflash llama", "dflash embeddings", "dflash last"},
    "sglang": {"eagle qkv bias", "eagle own rows", "eagle3 normed", "eagle3 own table", "eagle3 bias", "eagle3 last",
               "eagle3 embeddings", "peagle", "eagle3 qwen3", "eagle3 layers", "eagle3 norm before fc",
               "dflash own rows", "dflash llama", "dflash embeddings", "dflash last", "jetspec",
               *(name for name in HEADS if "medusa" in name)},
    "speculators": {"eagle3 bias", "eagle3 qwen3", "eagle3 last", *(name for name in HEADS if "medusa" in name),
                    "dflash llama", "dflash embeddings", "dflash last", "jetspec", *list(HEADS)[:7]},
    "llama.cpp": {*list(HEADS)[:7], "eagle3 bias", "eagle3 last", "peagle", "eagle3 layers", "eagle3.1", "eagle3 qwen3",
                  "dflash llama", "dflash last", "jetspec", *(name for name in HEADS if "medusa" in name)},
}  # fmt: skip


def _zero_bias(head):
    torch.nn.init.zeros_(head.fc.bias)
    return head


@pytest.mark.diagonal
@pytest.mark.parametrize("engine", REFUSED)
@pytest.mark.parametrize("name", HEADS)
def test_every_head_for_every_engine(name, engine, tmp_path):
    head = HEADS[name]()
    source = saved(tmp_path / "head", head)
    if name in REFUSED[engine]:
        with pytest.raises(NotExportable, match=engine):
            export_head(source, engine, tmp_path / "out", target())
        assert not (tmp_path / "out").exists()
        return
    done = export_head(source, engine, tmp_path / "out", target())
    assert done.largest_difference < 1e-5
    out = tmp_path / "out" / ("draft.gguf" if engine == "llama.cpp" else "")
    assert "{" not in done.serve.replace('{"', "")
    again = load_head(out, target())
    assert again.config.states == head.config.states
    if "medusa" not in name:
        assert again.config.num_hidden_layers == head.config.num_hidden_layers
    if name == "peagle":
        assert again.config.method == "peagle"
        assert again.config.num_speculative_tokens == 3
        assert torch.equal(again.mask_hidden, head.mask_hidden)
        assert ('"parallel_drafting": true' in done.serve) == (engine == "vllm")
    card = (tmp_path / "out" / "README.md").read_text()
    assert done.serve.replace(str(tmp_path / "out"), "out") in card


def test_eagle3_for_both_engines(tmp_path):
    """Each engine finds its own count of the layers in its own place, and d2t holds offsets."""
    head = eagle()
    export_head(saved(tmp_path / "head", head), "vllm", tmp_path / "out", target())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert config["eagle_aux_hidden_state_layer_ids"] == list(STATES)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [state - 1 for state in STATES]
    assert config["norm_before_residual"] is False
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert torch.equal(tensors["d2t"] + torch.arange(DRAFT), head.draft_ids)
    assert tensors["d2t"].dtype == torch.int64
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], head.draft_ids)
    rows = target().model.get_output_embeddings().weight
    assert torch.equal(tensors["lm_head.weight"].float(), rows[head.draft_ids])
    assert tensors["fc.weight"].dtype == torch.bfloat16


def test_eagle1_for_sglang_has_a_bias_and_a_file_of_tokens(tmp_path):
    head = eagle(1)
    done = export_head(saved(tmp_path / "head", head), "sglang", tmp_path / "out", target())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert not tensors["fc.bias"].any()
    ids = torch.load(tmp_path / "out" / "hot_tokens.pt", weights_only=True)
    assert ids == head.draft_ids.tolist()
    assert "--speculative-token-map" in done.serve


def test_eagle1_for_vllm_says_that_it_drafts_over_everything(tmp_path):
    done = export_head(saved(tmp_path / "head", eagle(1)), "vllm", tmp_path / "out", target())
    assert any("all 97 tokens" in note for note in done.notes)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "fc.bias" not in tensors
    assert "lm_head.weight" not in tensors


def test_medusa_for_vllm_has_all_output_rows(tmp_path):
    """VLLM 0.32 loads no file with a token_map."""
    done = export_head(saved(tmp_path / "head", medusa()), "vllm", tmp_path / "out", target())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "token_map" not in tensors
    assert torch.equal(tensors["lm_head.weight"].float(), target().model.get_output_embeddings().weight)
    assert any(f"only the {DRAFT} of" in note for note in done.notes)


def test_speculators_names_its_target_and_leaves_nothing_out(tmp_path):
    head = saved(tmp_path / "head", eagle(norm_before_residual=True))
    export_head(head, "speculators", tmp_path / "out", target(), "org/t", 5)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["norm_before_residual"] is True
    verifier = config["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "org/t", "architectures": ["LlamaForCausalLM"]}
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert "layers.0.hidden_norm.weight" in load_file(tmp_path / "out" / "model.safetensors")


def test_other_engines_are_told_names_that_they_can_open(tmp_path, monkeypatch):
    known = ZooModel("tiny", "", "tiny-model==1.0", "", "", 1, 1, 1, 1, hub_id="org/tiny")
    monkeypatch.setattr(registry, "ZOO", {"tiny": known})
    head = saved(tmp_path / "head", eagle())
    done = export_head(head, "speculators", tmp_path / "out", target())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/tiny"
    assert any("org/tiny is the original of tiny" in note and "fingerprint is another" in note for note in done.notes)
    assert "vllm serve org/tiny " in export_head(head, "vllm", tmp_path / "two", target()).serve
    other = replace(target(), fingerprint="0" * 64, name="official")
    with pytest.raises(IncompatibleModels, match="org/tiny is the original of tiny"):
        load_head(head, other)
    (tmp_path / "plain").write_text("")
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert modes == {(tmp_path / "plain").stat().st_mode}


def test_rows_of_the_target_need_the_target(tmp_path):
    with pytest.raises(NotExportable, match="--model"):
        export_head(saved(tmp_path / "head", eagle()), "vllm", tmp_path / "out")
    done = export_head(saved(tmp_path / "own", eagle(own_lm_head=True)), "vllm", tmp_path / "out")
    assert done.largest_difference == 0.0


def test_a_folder_that_is_there_is_kept(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(ConfigError, match="exists already"):
        export_head(saved(tmp_path / "head", eagle()), "vllm", tmp_path / "out", target())
    assert (tmp_path / "out" / "mine").read_text() == "x"


def _as_absolute_ids(config, tensors):
    tensors["d2t"] = tensors["d2t"] + torch.arange(DRAFT)


def _without_vocabulary(config, tensors):
    tensors["d2t"] = torch.zeros(DRAFT, dtype=torch.int64)
    del tensors["t2d"]


def _shifted_layers(config, tensors):
    config["eagle_aux_hidden_state_layer_ids"] = [state - 1 for state in STATES]


def _without_norm(config, tensors):
    del config["norm_before_residual"]


def _swapped(config, tensors):
    tensors["midlayer.hidden_norm.weight"] = tensors["midlayer.input_layernorm.weight"].clone()


@pytest.mark.parametrize("mutant", [_as_absolute_ids, _without_vocabulary, _shifted_layers, _without_norm, _swapped])
def test_a_wrong_export_is_noticed(mutant, tmp_path):
    head = eagle(own_lm_head=True, norm_before_residual=True)
    export_head(saved(tmp_path / "head", head), "vllm", tmp_path / "out", target())
    file, weights = tmp_path / "out" / "config.json", tmp_path / "out" / "model.safetensors"
    config, tensors = json.loads(file.read_text()), load_file(weights)
    facts = TargetFacts("tiny", LAYERS, WIDTH, VOCAB)
    assert check_written(tmp_path / "out", head, facts, "vllm") == 0.0
    mutant(config, tensors)
    file.write_text(json.dumps(config))
    save_file(tensors, weights)
    with pytest.raises((NotExportable, ConfigError)):
        check_written(tmp_path / "out", head, facts, "vllm")


def test_sglang_is_checked_by_its_own_count(tmp_path):
    head = eagle(own_lm_head=True)
    export_head(saved(tmp_path / "head", head), "sglang", tmp_path / "out", target())
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(STATES)
    file.write_text(json.dumps(config))
    facts = TargetFacts("tiny", LAYERS, WIDTH, VOCAB)
    assert check_written(tmp_path / "out", head, facts, "vllm") == 0.0
    with pytest.raises(NotExportable, match="other states"):
        check_written(tmp_path / "out", head, facts, "sglang")


def test_an_export_that_differs_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(exchange, "largest_difference", lambda *_: float("nan"))
    with pytest.raises(NotExportable, match="reads back as another head"):
        export_head(saved(tmp_path / "head", eagle()), "vllm", tmp_path / "out", target())
    assert [path.name for path in tmp_path.iterdir()] == ["head"]
