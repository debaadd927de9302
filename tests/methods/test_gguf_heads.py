"""EAGLE-3 and DFlash heads as llama.cpp's draft models."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGUFReader

from bench.peers.workers.llamacpp_worker import kind_of
from paceline import LLM, Fixed, SamplingParams
from paceline.config import parse
from paceline.errors import ConfigError, IncompatibleModels, NotExportable
from paceline.methods.dflash.drafter import DFlash
from paceline.methods.eagle.drafter import Eagle
from paceline.methods.heads.exchange import export_head, read_published
from paceline.methods.heads.folder import load_head, save_head
from paceline.methods.heads.published import facts_of
from tests.gguf_files import write_gguf
from tests.gguf_raw import INT32, RawGGUF
from tests.helpers import assert_identical, prompt, runner
from tests.tiny import tiny_model

from .exchange_common import DRAFT, STATES, VOCAB, WIDTH, dflash, eagle, saved, target

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def written(path, head):
    export_head(saved(path / "head", head), "llama.cpp", path / "out", target())
    return path / "out" / "draft.gguf"


def test_eagle3_has_the_layout_of_llama_cpp(tmp_path):
    """As its converter writes it: absolute ids, rotary pairs, states counted as inputs of layers."""
    head = eagle(norm_before_residual=True, rope_scaling=LLAMA3, rope_theta=5e5)
    file = written(tmp_path, head)
    assert kind_of(str(file)) == "DRAFT_EAGLE3"
    reader = GGUFReader(file)
    tensors = {one.name: torch.from_numpy(np.array(one.data)) for one in reader.tensors}
    about = {name: field.contents() for name, field in reader.fields.items()}
    assert about["general.architecture"] == "eagle3"
    assert about["eagle3.target_layers"] == list(STATES)
    assert about["eagle3.norm_before_residual"] is True
    assert (about["eagle3.target_hidden_size"], about["eagle3.block_count"]) == (WIDTH, 1)
    assert len(about["tokenizer.ggml.tokens"]) == VOCAB
    norms = {"blk.0.attn_norm.weight", "blk.0.attn_norm_2.weight", "blk.0.ffn_norm.weight", "output_norm.weight"}
    layer = {f"blk.0.{name}.weight" for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    layer |= {f"blk.0.ffn_{name}.weight" for name in ("gate", "up", "down")}
    assert tensors.keys() == norms | layer | {"fc.weight", "output.weight", "d2t", "rope_freqs.weight"}
    assert torch.equal(tensors["d2t"], head.draft_ids)
    assert {tensors[name].dtype for name in norms} == {torch.float32}
    rows = tensors["blk.0.attn_q.weight"].view(torch.bfloat16).float()
    ours = head.layers[0].self_attn.q_proj.weight
    assert torch.equal(rows[:8], ours[[0, 4, 1, 5, 2, 6, 3, 7]])
    assert torch.equal(tensors["blk.0.attn_norm_2.weight"], head.layers[0].hidden_norm.weight)
    lm_head = target().model.get_output_embeddings().weight
    assert torch.equal(tensors["output.weight"].float(), lm_head[head.draft_ids])


def test_dflash_has_the_layout_of_llama_cpp(tmp_path):
    head = dflash()
    reader = GGUFReader(written(tmp_path, head))
    tensors = {one.name: torch.from_numpy(np.array(one.data)) for one in reader.tensors}
    about = {name: field.contents() for name, field in reader.fields.items()}
    assert about["dflash.target_layers"] == [2, 4, 6]
    assert (about["dflash.block_size"], about["tokenizer.ggml.mask_token_id"]) == (6, 11)
    assert torch.equal(tensors["enc.output_norm.weight"], head.hidden_norm.weight)
    assert torch.equal(tensors["blk.1.attn_q_norm.weight"], head.layers[1].self_attn.q_norm.weight)
    rows = tensors["blk.1.attn_k.weight"].view(torch.bfloat16).float()
    assert torch.equal(rows, head.layers[1].self_attn.k_proj.weight)  # halves, as in Qwen3
    assert tensors["output.weight"].shape == (DRAFT, WIDTH)


@pytest.mark.parametrize(("kind", "make"), [(Eagle, eagle), (DFlash, dflash)])
def test_what_is_read_back_drafts_the_same(kind, make, tmp_path):
    head = make(rope_scaling=LLAMA3, rope_theta=5e5) if make is eagle else make()
    file = written(tmp_path, head)
    ids = prompt(9)
    drafted = []
    for given in (head, str(file)):
        (seq,) = assert_identical(runner(target()), kind(given, tree="chain"), [(ids, PARAMS)], 3)
        drafted.append([(one.num_drafted, one.num_accepted) for one in seq.rounds])
    assert drafted[0] == drafted[1]
    assert sum(many for many, _ in drafted[0]) > 0
    again = load_head(file, target())
    assert again.config == head.config
    assert parse(f"head:{file}").drafter.method == head.config.method


def test_rows_of_another_target_are_kept(tmp_path):
    """A target in other blocks has other output rows; the file's are the head's then."""
    for head in (eagle(), dflash()):
        file = written(tmp_path / head.config.method, head)
        facts = facts_of(target())
        changed = facts.__class__(**{**vars(facts), "lm_head": torch.randn(VOCAB, WIDTH)})
        again = read_published(file, changed)
        assert again.config.own_lm_head
        assert torch.equal(again.lm_head.weight, facts.lm_head[again.draft_ids])


@pytest.mark.parametrize(
    ("kind", "key", "value", "what"),
    [
        ("eagle3", "attention.sliding_window", 16, "sliding"),
        ("eagle3", "rope.scaling.factor", 2, "rope.scaling.factor"),
        ("eagle3", "vocab_size", VOCAB - 1, "its tokens"),
        ("eagle3", "attention.value_length", 4, "as of keys"),
        ("dflash", "selector_rank", 4, "selector_rank"),
        ("dflash", "attention.sliding_window", 16, "sliding"),
    ],
)
def test_what_is_not_understood_is_refused(kind, key, value, what, tmp_path):
    raw = RawGGUF.read(written(tmp_path, eagle() if kind == "eagle3" else dflash()))
    raw.put(f"{kind}.{key}", INT32, value)
    with pytest.raises((IncompatibleModels, ConfigError), match=what):
        load_head(raw.write(tmp_path / "x.gguf"), target())


def test_a_draft_model_in_a_file(tmp_path):
    """It drafts as the same model in a folder does."""
    model = tiny_model("llama", vocab_size=262)
    file, other = (write_gguf(tmp_path / f"{name}.gguf", model) for name in ("target", "draft"))
    llm = LLM(file, drafter=f"model:{other}", policy=Fixed(3))
    result = llm.generate(prompt_ids := {"prompt_token_ids": prompt(9)}, PARAMS)[0]
    assert result.token_ids == llm.plain().generate(prompt_ids, PARAMS)[0].token_ids
    assert result.outputs[0].mean_acceptance_length > 2


def test_other_files_are_refused_by_name(tmp_path):
    model = write_gguf(tmp_path / "model.gguf", tiny_model("llama", vocab_size=262))
    with pytest.raises(ConfigError, match="unknown method"):
        parse(f"head:{model}")
    with pytest.raises(ConfigError, match="architecture 'llama'"):
        load_head(model, target())
    file = written(tmp_path, eagle())
    with pytest.raises(ConfigError, match="--drafter head:"):
        LLM(file)
    raw = RawGGUF.read(file)
    raw.tensors[0].name = "blk.0.nextn.eh_proj.weight"
    with pytest.raises(IncompatibleModels, match="nextn"):
        load_head(raw.write(tmp_path / "x.gguf"), target())


def test_a_head_for_a_file_is_exported_with_the_target_that_is_named(tmp_path):
    """The file that it was trained for may lie elsewhere."""
    place = save_head(tmp_path / "head", eagle(), replace(target(), name="elsewhere.gguf"), {})
    with pytest.raises(NotExportable, match="--model"):
        export_head(place, "llama.cpp", tmp_path / "a")
    assert "elsewhere.gguf" in export_head(place, "llama.cpp", tmp_path / "b", target()).serve
