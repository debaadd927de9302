"""Rounds tell how many experts their pass read, and the default policy learns from them."""

import pytest

from paceline import LLM, CostModel, Fixed, PromptLookup, SamplingParams
from paceline.core.round import Round, experts_per_pass
from tests.helpers import REPEATING, prompt
from tests.tiny import tiny_model

PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
COUNT, OF_ROW = 8, 4  # of two layers, each with 2 of 4


def test_rounds_tell_the_experts_of_their_pass():
    llm = LLM(tiny_model("qwen3_moe"), drafter=PromptLookup(), policy=Fixed(3), max_num_seqs=2)
    assert llm.runner.experts is not None
    assert llm.runner.experts.count == COUNT
    rounds = [one for result in llm.generate([REPEATING, prompt(9), prompt(30)], PARAMS) for one in result.rounds]
    assert {one.num_experts for one in rounds if one.with_prompt} == {0}, "some of these passes read prompts"
    read = {one.number: one.num_experts for one in rounds if one.num_nodes and not one.with_prompt}
    assert OF_ROW < max(read.values()) <= COUNT
    plain = llm.using(drafter=None).generate([REPEATING], PARAMS)[0].rounds
    assert {one.num_experts for one in plain if not one.with_prompt} == {OF_ROW}


def test_experts_per_pass_count_a_batch_once():
    shared, other, unknown = (Round("", 0, 0, 1, number=n, num_experts=e) for n, e in ((1, 6), (2, 9), (3, 0)))
    assert experts_per_pass([shared, shared, other, unknown]) == pytest.approx(7.5)
    assert experts_per_pass([unknown]) == 0


@pytest.mark.parametrize("architecture", ["qwen3_moe", "llama"])
def test_the_default_policy_learns_them(architecture):
    policy = CostModel()
    llm = LLM(tiny_model(architecture), drafter=PromptLookup(), policy=policy, max_num_seqs=1)
    plain = llm.using(drafter=None)
    for _ in range(2):
        assert llm.generate([REPEATING], PARAMS)[0].token_ids == plain.generate([REPEATING], PARAMS)[0].token_ids
    profile = policy.profile()
    if architecture == "llama":
        assert llm.runner.experts is None
        assert (profile.pass_experts, profile.novelty, profile.expert_seconds) == ({}, {}, 0.0)
    else:
        assert profile.pass_experts[1] == OF_ROW
        assert profile.pass_experts.keys() == profile.pass_seconds.keys()
        assert profile.novelty.keys() == policy.odds.counts.keys()


class Early(Fixed):
    """Of a user, from before policies were told of experts."""

    def bind(self, drafter, pass_seconds, pads_trees=True):
        self.bound = pads_trees
        super().bind(drafter, pass_seconds, pads_trees)


class Passes(Fixed):
    def bind(self, *given):
        self.bound = given[-1].count
        super().bind(*given)


@pytest.mark.parametrize(("policy", "bound"), [(Early(2), False), (Passes(2), COUNT)])
def test_policies_are_given_what_they_take(policy, bound):
    llm = LLM(tiny_model("qwen3_moe"), drafter=PromptLookup(), policy=policy)
    assert llm.generate([REPEATING], PARAMS)[0].rounds
    assert policy.bound == bound
