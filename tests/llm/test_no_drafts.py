"""An answer for which nothing was drafted says why, as far as it is known."""

from collections.abc import Sequence

import pytest

from paceline import LLM, CostModel, Fixed, PromptLookup, SamplingParams
from paceline.core.draft import Draft
from paceline.core.interfaces import NOTHING_PROPOSED, DraftBudget, Drafter, DraftOptions
from paceline.core.request import TokenSequence
from paceline.core.tree import TokenTree
from paceline.policy.cost_model import NO_GAIN, TOO_SHORT
from tests.helpers import talking

TEXT = "abcabcabcab"
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


class Slow(Drafter):
    """Says that a token takes an hour."""

    name = "slow"

    def draft_options(self, seq: TokenSequence) -> Sequence[DraftOptions]:
        return (DraftOptions(self.name),)

    def seconds(self) -> dict[str, tuple[float, float]]:
        return {self.name: (3600.0, 0.0)}

    def propose(self, seqs: Sequence[TokenSequence], budgets: Sequence[DraftBudget]) -> Draft:
        raise AssertionError("too slow to be asked")


class Mute(Slow):
    """Is always ready, and proposes nothing."""

    name = "mute"

    def seconds(self) -> dict[str, tuple[float, float]]:
        return {}

    def propose(self, seqs: Sequence[TokenSequence], budgets: Sequence[DraftBudget]) -> Draft:
        return Draft(TokenTree.chain([[seq.token_ids[-1]] for seq in seqs]), source=self.name)


class Unready(Mute):
    """Is never ready."""

    name = "unready"

    def draft_options(self, seq: TokenSequence) -> Sequence[DraftOptions]:
        return (DraftOptions(self.name, hint=-1),)


@pytest.mark.parametrize(
    ("drafter", "policy", "params", "reason"),
    [
        (Slow, CostModel, PARAMS, NO_GAIN),
        (Slow, CostModel, SamplingParams(max_tokens=3, ignore_eos=True), TOO_SHORT),
        (Unready, CostModel, PARAMS, NOTHING_PROPOSED),
        (Mute, Fixed, PARAMS, NOTHING_PROPOSED),
        (PromptLookup, Fixed, PARAMS, None),  # something was
        (Slow, lambda: Fixed(0), PARAMS, None),  # nothing should be
    ],
)
def test_the_reason(drafter, policy, params, reason):
    llm = LLM(talking(), drafter=drafter(), policy=policy())
    for _ in range(2):  # a slot forgets what its last answer was
        (answer,) = llm.generate(TEXT, params)[0].outputs
        assert answer.no_draft_reason == answer.to_dict()["no_draft_reason"] == reason
        params = PARAMS if reason == TOO_SHORT else params
        reason = NO_GAIN if reason == TOO_SHORT else reason
    assert llm.plain().generate(TEXT, params)[0].outputs[0].no_draft_reason is None
