"""The small hybrid: chains drafted at once equal chains drafted one by one, and its module trains towards the model."""

import json

import paceline_zoo
import pytest
import torch
from paceline_zoo.whole import read_model
from transformers import Qwen3_5ForCausalLM, modeling_layers

from examples.tiny_hybrid.commands import PROMPTS
from examples.tiny_hybrid.evaluate import measure, on_text, right_drafts, rounds_of
from examples.tiny_hybrid.model import Mtp, load, make_config, save
from examples.tiny_hybrid.package import package
from examples.tiny_hybrid.train import losses
from paceline import LLM, SamplingParams
from paceline.core.round import tokens_per_pass
from paceline.measure.prompts import read_prompts
from paceline.zoo import pull

SMALL = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "linear_key_head_dim": 16}


def make():
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(make_config(61, **SMALL))
    return model, Mtp(model.config)


SHIPPED = paceline_zoo.FOLDER / "tiny-hybrid"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("hybrid")
    save(*make(), place)
    return place


@pytest.fixture(scope="module")
def small(folder):
    return load(folder)


@torch.no_grad()
def drafted(model, mtp, ids, depth):
    """The drafts after the last token, by passes over the whole row."""
    states = model.model(input_ids=torch.tensor([ids[:-1]]), use_cache=False).last_hidden_state
    row, found = list(ids[1:]), []
    for _ in range(depth):
        rotary = model.model.rotary_emb(states, torch.arange(len(row))[None])
        embeds = model.model.embed_tokens(torch.tensor([row]))
        out = mtp(embeds, states, position_embeddings=rotary, attention_mask=None)
        found.append(int(model.lm_head(out[0, -1]).argmax()))
        states, row = torch.cat([states, out[:, -1:]], 1), [*row, found[-1]]
    return found


def test_chains_from_all_positions_are_those_from_each(small):
    ids = torch.randint(0, 61, (12,)).tolist()
    for at in range(2, 12):
        text = [*ids[:at], *drafted(*small, ids[:at], 3), 5]
        assert right_drafts(*small, text, 3)[:, at - 2].all()
        for wrong in range(3):
            other = [*text]
            other[at + wrong] = (other[at + wrong] + 1) % 61
            assert right_drafts(*small, other, 3)[:, at - 2].tolist() == [step < wrong for step in range(3)]


def test_the_module_is_the_one_that_transformers_reads(small):
    model, mtp = small
    model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    theirs = modeling_layers.MtpModel.from_pretrained(model).float()
    ids, positions = torch.randint(0, 61, (1, 9)), torch.arange(1, 9)[None]
    states = model.model(input_ids=ids).last_hidden_state[:, :-1]
    rotary = model.model.rotary_emb(states, positions)
    ours = mtp(model.model.embed_tokens(ids[:, 1:]), states, position_embeddings=rotary, attention_mask=None)
    assert torch.equal(ours, theirs.forward_layer(0, states, positions, None, input_ids=ids[:, 1:]))


def test_rounds_end_with_the_answer():
    right = torch.tensor([[0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0]]).bool()
    assert rounds_of(right, 3) == {"tokens": 3, "rounds": 2, "accepted": [2, 0]}
    assert rounds_of(right[:, :5], 1) == {"tokens": 4, "rounds": 3, "accepted": [1, 0]}


def test_training_lowers_every_loss_and_teaches_the_module_what_the_model_says():
    model, mtp = make()
    ids = torch.arange(66).remainder(11).view(2, 33)
    optimizer = torch.optim.AdamW([*model.parameters(), *mtp.parameters()], lr=1e-2)
    first = losses(model, mtp, ids)
    for _ in range(60):
        sum(losses(model, mtp, ids, stride=2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(after < 0.5 * before for before, after in zip(first, losses(model, mtp, ids), strict=True))
    assert right_drafts(model.eval(), mtp.eval(), ids[0].tolist(), 2)[:, :-2].float().mean() > 0.8
    found = on_text(model, mtp, ids)
    assert found["held-out loss"] == pytest.approx(losses(model, mtp, ids)[0].item(), abs=1e-2)
    assert min(found["held-out agreement"]) > 0.8


def test_a_packaged_model_is_copied_and_its_card_says_what_was_measured(small, folder, tmp_path):
    class Tokenizer:
        def __call__(self, text):
            return {"input_ids": [ord(letter) % 61 for letter in text]}

    (row,) = measure(*small, Tokenizer(), "letters", ["some", "words"], depths=(2,), max_tokens=8)
    record = {"parameters": 10, "parameters_mtp": 2, "data": {}, "training": {"steps": 3}, "acceptance": [row]}
    package(folder, tmp_path / "tiny", record)
    made = read_model(tmp_path / "tiny")
    (tmp_path / "copy").mkdir()
    made.build(None, tmp_path / "copy")
    assert (tmp_path / "copy" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert f"{row['result']['mean_acceptance_length']:.2f}" in (tmp_path / "tiny" / "README.md").read_text()
    assert json.loads((tmp_path / "tiny" / "training.json").read_text())["acceptance"] == [row]


def test_the_packaged_model_drafts_what_it_will_say(tmp_path):
    """In the engine as many drafts are right as in the simulation, and the answers are those of plain decoding."""
    folder, prompts = pull("tiny-hybrid", tmp_path), read_prompts(PROMPTS, 6)
    chain = {"method": "mtp", "tree": "chain", "ngrams": False, "policy": "fixed", "num_speculative_tokens": 3}
    llm, params = LLM(folder, speculative_config=chain, max_num_seqs=1), SamplingParams(max_tokens=48)
    answers = llm.generate(prompts, params)
    assert [one.token_ids for one in answers] == [one.token_ids for one in llm.plain().generate(prompts, params)]
    (row,) = measure(*load(folder), llm.tokenizer, "by hand", prompts, depths=(3,), max_tokens=48)
    mean = tokens_per_pass([one for answer in answers for one in answer.rounds])
    assert mean == pytest.approx(row["result"]["mean_acceptance_length"], abs=0.05)
    recorded = json.loads((SHIPPED / "training.json").read_text())["acceptance"]
    assert all(length > 1.5 for length in (mean, *(one["result"]["mean_acceptance_length"] for one in recorded)))
