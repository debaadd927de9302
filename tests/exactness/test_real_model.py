"""The default model with its real weights: plain decoding is that of transformers, speculation changes nothing."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline import LLM, Fixed, SamplingParams, SelfQuantized
from paceline.measure.prompts import EXAMPLES, user_prompt
from tests.helpers import needs_invariance
from tests.real_models import default_model

pytestmark = pytest.mark.slow  # the commands of the README, which are tested, decode with it too
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def folder():
    return str(default_model())


def test_plain_decoding_is_that_of_transformers(folder):
    """In float32, where rounding ties are rare: token for token."""
    llm = LLM(folder, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = llm.encode(user_prompt(llm.loaded, EXAMPLES[-2].prompt))
    theirs = model.generate(torch.tensor([ids]), max_new_tokens=NUM_TOKENS, do_sample=False)[0, len(ids) :].tolist()
    assert llm.generate([ids], SamplingParams(max_tokens=NUM_TOKENS))[0].token_ids == theirs


def test_speculation_changes_nothing_in_bfloat16(folder):
    """Greedy and sampled answers in one batch."""
    llm = LLM(folder, drafter=SelfQuantized(), policy=Fixed(4), max_num_seqs=2)
    needs_invariance(llm.numerics)
    prompts = [user_prompt(llm.loaded, prompt.prompt) for prompt in EXAMPLES[-2:]]
    params = [SamplingParams(temperature=t, max_tokens=NUM_TOKENS, seed=5) for t in (0.0, 1.0)]
    answers = llm.generate(prompts, params)
    assert [a.token_ids for a in answers] == [a.token_ids for a in llm.plain().generate(prompts, params)]
    assert any(a.outputs[0].num_accepted for a in answers)
