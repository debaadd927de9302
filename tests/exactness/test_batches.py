"""A request's answer depends on its prompt, its parameters and its seed; never on who shares the batch."""

import random
from functools import cache

import pytest

from paceline import DraftModel, PromptLookup, SamplingParams, SelfQuantized, Suffix, TokenRecycling
from paceline.core.interfaces import Drafter
from paceline.core.request import Sequence
from paceline.methods import Space
from tests.adversaries import RandomTrees, Scripted, Sometimes
from tests.exactness.drafters import small_draft
from tests.helpers import NO_EOS, REPEATING, assert_identical, loaded, oracle, prompt, runner
from tests.space.common import adapter

TARGET = loaded()
ENDS = frozenset({2, 40, 41, 42})


def requests() -> list[tuple[list[int], SamplingParams, int, frozenset[int]]]:
    """Ragged prompts, lengths and temperatures; some end early, one is a single token."""
    made = []
    for row, length in enumerate([1, 40, 7, 66, 13, 2, 130, 9]):
        ids = REPEATING if length == 13 else prompt(length, row)
        params = SamplingParams(temperature=[0.0, 1.0, 0.7][row % 3], max_tokens=[20, 3, 11, 1][row % 4], top_p=0.95)
        made.append((ids, params, 100 + row, ENDS if row % 2 else NO_EOS))
    return made


REQUESTS = requests()


@cache
def future() -> dict[tuple[int, ...], list[int]]:
    return {
        tuple(ids): oracle(
            TARGET, ids, SamplingParams(temperature=p.temperature, max_tokens=40, top_p=0.95), seed
        ).token_ids
        for ids, p, seed, _ in REQUESTS
    }


DRAFTERS = {
    "lookup": PromptLookup,  # finds nothing in most rows: a mix of drafts and none
    "suffix": Suffix,
    "recycling": TokenRecycling,
    "draft model": lambda: DraftModel(small_draft()),
    "self int4": lambda: SelfQuantized(lm_head="shared"),
    "space": lambda: Space(adapter(num_masks=3), 2),
    "random trees": RandomTrees,
    "some rows": lambda: Sometimes(Scripted(future(), [None, 1], branching=True)),
    "ragged acceptance": lambda: Scripted(future(), [0, None, 2, 1], branching=True),
}


def decode(drafter: Drafter, order: list[int], slots: int) -> list[Sequence]:
    return assert_identical(runner(TARGET, slots), drafter, [REQUESTS[i] for i in order])


@pytest.mark.diagonal
@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_rows_equal_their_own_slow_decoding(drafter, slots):
    """With 1 slot requests queue; with 3 a finished row makes room for the next in the middle of the others."""
    order = list(range(len(REQUESTS)))
    random.Random(slots).shuffle(order)
    decode(DRAFTERS[drafter](), order, slots)


def test_finished_rows_neither_draft_nor_take_rounds():
    for seq in decode(Scripted(future(), [None]), list(range(len(REQUESTS))), 8):
        assert sum(not one.with_prompt for one in seq.rounds) <= -(-seq.params.max_tokens // 5)


def test_the_same_drafter_serves_one_batch_after_another():
    """Slots are reused by other texts; state of the last tenant must be gone."""
    for name in ("lookup", "draft model", "self int4"):
        drafter = DRAFTERS[name]()
        for order in ([6, 1], [0, 3], [4, 2, 7]):
            decode(drafter, order, 2)
