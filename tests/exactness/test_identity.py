"""Token for token the slow decoder's answer, whoever drafts.

Every drafter with another policy and number of slots; every row of its batch with another prompt, temperature, option
and end. `test_mutants.py` has the faults that these comparisons see.
"""

import random
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch

from paceline import CostModel, Dynamic, Fixed, SamplingParams
from paceline.core.interfaces import DraftBudget, DraftPolicy
from paceline.core.request import TokenSequence
from paceline.methods import Space
from paceline.target import LoadedModel, ModelRunner
from tests.adversaries import Scripted
from tests.exactness.drafters import DRAFTERS, END, runner_for
from tests.helpers import NO_EOS, REPEATING, SEED, assert_identical, loaded, oracle, prompt, runner
from tests.methods.space.common import adapter
from tests.methods.space.foresight import KNOWN
from tests.tiny import ARCHITECTURES

TARGET = loaded()
ENDS = frozenset({END, 30, 31, 40, 41, 42})
Request = tuple[list[int], SamplingParams, int, frozenset[int]]


def halve_odd(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor of the user's, which depends on the whole past and on its length."""
    scores = scores.clone()
    scores[:, int(ids.sum()) % 2 :: 2] /= 2
    return scores - ids.shape[1]


OPTIONS = {
    "none": {},
    "none, cold": {},
    "repetition": {"repetition_penalty": 1.3},
    "no repeat": {"no_repeat_ngram_size": 3},
    "presence": {"presence_penalty": 0.5},
    "frequency": {"frequency_penalty": 0.5},
    "bias": {"logit_bias": {7: 4.0, 9: -8.0, 5: 2.5}},
    "bad words": {"bad_words": ("ab", "c", "5")},
    "min tokens": {"min_tokens": 9},
    "top k": {"top_k": 5},
    "top p": {"top_p": 0.7},
    "min p": {"min_p": 0.1},
    "user's": {"logits_processors": (halve_odd,)},
    "stop tokens": {"stop_token_ids": tuple(range(9, 90, 9))},
    "all": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 4,
        "frequency_penalty": 0.3,
        "logit_bias": {8: 1.5},
        "bad_words": ("xy", "z"),
        "min_tokens": 5,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
        "logits_processors": (halve_odd,),
    },
}
LENGTHS = 1, 40, 7, 66, 13, 2, 100
TEMPERATURES = 1.0, 0.0, 0.7
MAX_TOKENS = 20, 12, 3, 16, 1


def requests() -> list[Request]:
    """Ragged prompts, of which some repeat themselves; one of a text that `overfitted` knows."""
    made: list[Request] = [(KNOWN, SamplingParams(1.0, max_tokens=20), SEED, NO_EOS)]
    for row, options in enumerate(OPTIONS.values()):
        length = LENGTHS[row % len(LENGTHS)]
        ids = [*(REPEATING if length == len(REPEATING) else prompt(length, row)), 3 + row]
        most = 16 if "min_tokens" in options else MAX_TOKENS[row % len(MAX_TOKENS)]
        params = SamplingParams(TEMPERATURES[row % len(TEMPERATURES)], max_tokens=most, **options)
        made.append((ids, params, 100 + row, ENDS if row % 2 else NO_EOS))
    return made


REQUESTS = requests()


@cache
def future() -> dict[tuple[int, ...], list[int]]:
    """How each text goes on, and on behind its end."""
    return {tuple(one[0]): [*oracle(TARGET, *one).token_ids, *[17] * 60] for one in REQUESTS}


class Varying(DraftPolicy):
    """Another budget for every row and round: none, chains, trees, of one member or another, some that stop early."""

    def __init__(self, members: int = 1, seed: int = 0):
        self.rng, self.members = random.Random(seed), members

    def budgets(self, seqs: Sequence[TokenSequence]) -> list[DraftBudget]:
        return [self.budget() for _ in seqs]

    def budget(self) -> DraftBudget:
        draw, depth = self.rng, self.rng.choice([0, 1, 2, 3, 5])
        last = draw.randint(1, 9)
        return DraftBudget(
            depth,
            draw.choice([depth, 2 * depth, 20]),
            draw.randrange(self.members),
            draw.choice([None, lambda sure: len(sure) < last]),
            draw.choice([(), (0.001,), (0.0, 0.0, 0.01, 0.05)]),
        )


POLICIES: dict[str, Callable[[int], DraftPolicy]] = {
    "varying": Varying,
    "fixed": lambda members: Fixed(4, 24),
    "dynamic": lambda members: Dynamic(),
    "cost model": lambda members: CostModel(),
}
IDLE = "plain", "jump-forward"


@pytest.mark.diagonal
@pytest.mark.parametrize(("slots", "invariant"), [(3, False), (1, True), (8, True)])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter(name, policy, slots, invariant):
    """With 1 slot requests queue; with 3 a finished row makes room for the next in the middle of the others."""
    drafter = DRAFTERS[name](TARGET, future())
    members = len(getattr(drafter, "members", [drafter]))
    order = random.Random(slots).sample(REQUESTS, len(REQUESTS))
    on = runner_for(name, slots, invariant)
    seqs = assert_identical(on, drafter, order, 16, policy=POLICIES[policy](members))
    assert policy == "cost model" or name in IDLE or any(r.num_nodes for seq in seqs for r in seq.rounds)


@pytest.mark.usefixtures("checked_types")
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_with_checked_shapes(name):
    drafter = DRAFTERS[name](TARGET, future())
    seqs = assert_identical(runner_for(name), drafter, [REQUESTS[0], REQUESTS[5]], 4, 24)
    if name == "all right":  # a perfect draft is accepted whole: 5 tokens a round, after one with the prompt
        assert [r.num_emitted for r in seqs[0].rounds] == [1, 5, 5, 5, 4]
    if name in ("draft model, same weights", "space, knows a text"):
        assert max(r.num_accepted for r in seqs[0].rounds) > 1


def test_finished_rows_neither_draft_nor_take_rounds():
    for seq in assert_identical(runner_for("all right", 8), Scripted(future(), [None]), REQUESTS):
        assert sum(not one.with_prompt for one in seq.rounds) <= -(-seq.params.max_tokens // 5)


def two(target: LoadedModel, name: str, max_tokens: int) -> None:
    """A greedy and a sampled row on another target."""
    asked = [([*REPEATING, 3 + t], SamplingParams(t, max_tokens=max_tokens), SEED, NO_EOS) for t in (0, 1)]
    future = {tuple(one[0]): oracle(target, *one).token_ids for one in asked}
    seqs = assert_identical(runner(target), DRAFTERS[name](target, future), asked)
    assert sum(r.num_nodes for seq in seqs for r in seq.rounds), "nothing was drafted"


@pytest.mark.diagonal
@pytest.mark.parametrize("drafter", ["right among wrong", "random trees"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture(name, drafter):
    """Past the sliding windows of eight, by trees that have to be gathered and by random ones."""
    two(loaded(name), drafter, 9)


WINDOWED = "mistral", "gemma3", "opt", "qwen3", "gemma2", "gemma4", "gemma3n"
BY_STATES = [("gpt2", "eagle3"), ("mixtral", "eagle3")]


@pytest.mark.parametrize(("name", "drafter"), [*((name, "self int4") for name in WINDOWED), *BY_STATES])
def test_drafters_that_read_the_target_on_other_architectures(name, drafter):
    two(loaded(name), drafter, 12)


@pytest.mark.parametrize("name", ["mistral", "gpt2", "gemma3", "gemma4", "gemma3n", "gpt_neox"])
def test_masks_on_other_architectures(name):
    """Sliding windows, learned positions, scaled embeddings, one matrix for query, key and value; the context's end."""
    rank = 0 if name in ("gpt2", "gemma4", "gemma3n") else 4  # not all of their layers have the same linear ones
    target = loaded(name)
    requests = [
        (ids, SamplingParams(t, max_tokens=12)) for ids in (REPEATING, prompt(target.context - 9)) for t in (0.0, 1.0)
    ]
    assert_identical(ModelRunner(target, 2), Space(adapter(name, rank=rank), 2), requests)


@pytest.mark.parametrize("drafter", ["self int4", "random trees", "draft model, same weights"])
def test_float64(drafter):
    two(loaded("llama", torch.float64), drafter, 16)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_many_long_answers(name):
    """200 prompts of 128 tokens would be the paper's test; the slow decoder makes this one smaller."""
    for seed in range(10):
        ids = prompt(10 + 7 * seed, seed)
        asked = [([*ids, 3 + row], SamplingParams(t, max_tokens=100)) for row, t in enumerate((0, 0.3, 0.7, 1.0, 1.5))]
        future = {tuple(one[0]): oracle(TARGET, *one).token_ids for one in asked}
        assert_identical(runner_for(name), DRAFTERS[name](TARGET, future), asked, 1 + seed)
