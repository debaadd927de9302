"""The small mixture: what its losses and its card say, and what drafts for the packaged model."""

import json

import paceline_zoo
import pytest
import torch
from paceline_zoo.whole import read_model
from transformers import Qwen3MoeForCausalLM

from examples.tiny_hybrid.commands import PROMPTS
from examples.tiny_mixture import evaluate
from examples.tiny_mixture.model import active_parameters, load, make_config, save
from examples.tiny_mixture.package import package
from examples.tiny_mixture.train import balance, losses
from paceline import LLM, Fixed, SamplingParams
from paceline.measure.prompts import read_prompts
from paceline.measure.trials import check_trial, trials_of
from paceline.zoo import pull
from tests.helpers import tokenizer

SMALL = {"hidden_size": 32, "moe_intermediate_size": 32, "head_dim": 16}
SHIPPED = paceline_zoo.FOLDER / "tiny-mixture"


def make():
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(make_config(112, **SMALL))


def test_balance_is_least_where_experts_are_used_alike():
    scores = torch.eye(8).repeat(4, 1) + torch.eye(8).roll(1, 1).repeat(4, 1) / 2  # each is first and second as often
    assert balance(scores, 2).item() == pytest.approx(2.0)
    one_sided = scores + torch.arange(8.0)
    assert balance(one_sided, 2) > 3
    balance(one_sided.requires_grad_(), 2).backward()
    assert one_sided.grad.sum(0)[-1] > 0 > one_sided.grad.sum(0)[0]


def test_training_lowers_the_loss_and_keeps_all_experts_in_use():
    model, ids = make(), torch.arange(66).remainder(11).view(2, 33)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = losses(model, ids)
    for _ in range(40):
        sum(losses(model, ids)).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = losses(model, ids)
    assert after[0] < 0.5 * first[0]
    assert after[1] < 2.3
    found = evaluate.on_text(model.eval(), ids)
    assert found["held-out loss"] == pytest.approx(after[0].item(), abs=1e-2)
    assert len(found["use of the experts by layer"]) == 4


def test_a_token_uses_two_experts():
    model = make()
    expert = 3 * 32 * 32
    assert model.num_parameters() - active_parameters(model) == 4 * 6 * expert


def test_a_packaged_model_is_copied_and_its_card_says_what_was_measured(tmp_path):
    model = make()
    save(model, tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    suites, text = {"letters": ["some", "words"]}, torch.randint(0, 97, (2, 12))
    record = evaluate.evaluate(tmp_path / "model", suites, text)
    assert record["parameters"] == model.num_parameters()
    record["training"]["steps"] = 3
    package(tmp_path / "model", tmp_path / "tiny", record)
    made = read_model(tmp_path / "tiny")
    (tmp_path / "copy").mkdir()
    made.build(None, tmp_path / "copy")
    copied = load(tmp_path / "copy").state_dict()
    assert all(torch.equal(weight.float(), copied[name]) for name, weight in model.state_dict().items())
    card = (tmp_path / "tiny" / "README.md").read_text()
    rows = json.loads((tmp_path / "tiny" / "training.json").read_text())["acceptance"]
    assert [row["name"] for row in rows] == [f"{drafter}, letters" for drafter in evaluate.DRAFTERS]
    assert all(f"{row['result']['mean_acceptance_length']:.2f}" in card for row in rows)
    assert record["training"]["use of the experts by layer"][0] in card


@pytest.mark.parametrize(
    "drafter",
    [name if name == "self-top1" else pytest.param(name, marks=pytest.mark.more) for name in evaluate.DRAFTERS],
)
def test_drafts_for_the_packaged_model_are_accepted_as_recorded(drafter, tmp_path):
    texts, depth = read_prompts(PROMPTS), evaluate.DRAFTERS[drafter].depth
    llm = LLM(pull("tiny-mixture", tmp_path), drafter=drafter, policy=Fixed(depth), max_num_seqs=1)
    answers, plain = (one.generate(texts[:3], SamplingParams(max_tokens=24)) for one in (llm, llm.plain()))
    assert [one.token_ids for one in answers] == [one.token_ids for one in plain]
    recorded = trials_of(json.loads((SHIPPED / "training.json").read_text()))
    (trial,) = [one for one in recorded if one.name == f"{drafter}, prompts written by hand"]
    again = check_trial(llm, trial, 3, texts)
    assert again.passed, again.differences
    assert again.measured.mean_acceptance_length > 1.5
