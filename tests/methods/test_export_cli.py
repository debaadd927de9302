"""`paceline export`, and a published head that drafts."""

import json

import torch

from paceline import SamplingParams
from paceline.methods.eagle.drafter import Eagle
from tests.cli.helpers import answer, paceline, refusal, save
from tests.helpers import assert_identical, prompt, runner
from tests.tiny import tiny_model

from .exchange_common import DRAFT, LAYERS, STATES, eagle, folder_of, plain_config, published, saved, target


def test_export_says_how_to_serve(tmp_path):
    head = str(saved(tmp_path / "head", eagle(own_lm_head=True)))
    got = answer("export", head, str(tmp_path / "out"), "--to", "vllm", "-k", "4")
    assert got["largest_difference"] == 0.0
    assert got["serve"].startswith("vllm serve tiny --speculative-config '")
    assert json.loads(got["serve"].split("'")[1])["num_speculative_tokens"] == 4
    shown = paceline("export", head, str(tmp_path / "two"), "--to", "sglang")
    assert "--speculative-algorithm EAGLE3" in shown.stdout
    assert "reads back as the same head" in shown.stderr


def test_export_with_its_target(tmp_path):
    model = save(tmp_path / "tiny", tiny_model("llama", num_hidden_layers=LAYERS))
    head = str(saved(tmp_path / "head", eagle()))
    assert "--model" in refusal("export", head, str(tmp_path / "out"), "--to", "vllm")
    got = answer("export", head, str(tmp_path / "out"), "--to", "speculators", "--model", model)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == model
    assert got["serve"] == f"vllm serve {tmp_path / 'out'}"


def test_export_refuses_in_one_line(tmp_path):
    head = str(saved(tmp_path / "head", eagle(1)))
    assert "speculators cannot hold this head" in refusal("export", head, str(tmp_path / "out"), "--to", "speculators")


def test_a_published_head_drafts(tmp_path):
    """With embeddings of its own, which must not be lent the target's."""
    head = eagle(own_lm_head=True, own_embeddings=True)
    config = plain_config(draft_vocab_size=DRAFT, eagle_aux_hidden_state_layer_ids=list(STATES))
    drafter = Eagle(str(folder_of(tmp_path / "head", config, published(head))), tree="chain")
    ids, params = prompt(9), SamplingParams(max_tokens=24, temperature=0.0)
    (seq,) = assert_identical(runner(target()), drafter, [(ids, params)], 3)
    assert any(one.num_drafted for one in seq.rounds)
    assert torch.equal(drafter.layer.head.embeddings, head.embed_tokens.weight)
