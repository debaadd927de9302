"""Answers on a GPU are those of plain decoding: SmolLM2's weights on a device, a tiny model in the interpreter."""

import pytest
import torch

from paceline import LLM, Fixed, PromptLookup, SamplingParams, SelfQuantized
from paceline.methods import DFlash, Eagle, Medusa
from paceline.target import load_model, wrap_model
from tests.adversaries import RandomTrees
from tests.methods.heads import medusa, random_head
from tests.real_models import DEFAULT, default_model

CHATS = ["Name three rivers of Europe.", "Write the word ice cream five times.", "What is 17 times 3?"]
HEADS = {
    "eagle": (Eagle, lambda target: random_head(target, 1)),
    "dflash": (DFlash, lambda target: random_head(target, "dflash")),
    "medusa": (Medusa, medusa),
}
DRAFTERS = {"lookup": PromptLookup, "trees": RandomTrees, "self-int4": SelfQuantized}


@pytest.fixture
def asked(device, model):
    """The model, prompts, and how many tokens of an answer are compared."""
    if device.type == "cpu":
        return wrap_model(model()), [[5, 9, 5, 9], [7]], 3
    default_model()  # or skip
    return load_model(DEFAULT, device=device, dtype=torch.bfloat16), CHATS, 64


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", [*DRAFTERS, *HEADS])
def test_answers_are_those_of_plain_decoding(device, sized, asked, name, temperature):
    target, prompts, count = asked
    if name in DRAFTERS:
        drafter = DRAFTERS[name]()
    else:
        kind, random = HEADS[name]
        drafter = kind(random(target) if device.type == "cpu" else f"{DEFAULT}-{name}")
    llm = LLM(target, drafter=drafter, policy=Fixed(*sized((4, 16), (2, 3))), max_num_seqs=len(prompts))
    assert llm.numerics == "invariant"
    params = SamplingParams(temperature=temperature, max_tokens=count, seed=3, ignore_eos=True)
    drafted, plain = (one.generate(prompts, params) for one in (llm, llm.plain()))
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    rounds = [record for answer in drafted for record in answer.rounds]
    assert sum(record.num_drafted for record in rounds) > 0
    if device.type == "cuda" and name != "trees":
        assert sum(record.num_accepted for record in rounds) > 0
