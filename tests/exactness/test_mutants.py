"""The identity tests must be able to fail: each fault below changes an answer, and the comparison sees it."""

import pytest
import torch

from paceline import Coupled, SamplingParams
from paceline.core.interfaces import Verifier
from paceline.core.request import TokenSequence
from paceline.engine import loop
from paceline.target import ModelRunner
from tests.adversaries import Ending, Scripted
from tests.attention.common import CACHE_MUTANTS, LAYOUT_MUTANTS, NoWindow, with_cache, with_layout
from tests.exactness.test_processors import by_the_past
from tests.helpers import (
    NO_EOS,
    REPEATING,
    SEED,
    assert_sound,
    changed,
    loaded,
    oracle,
    reading_apart,
    result,
    run,
    sequence,
)
from tests.oracle import choose_token

PARAMS = SamplingParams(temperature=1.0, max_tokens=24)


def scripted(ids=REPEATING, name: str = "llama", dtype=torch.float32) -> Scripted:
    return Scripted({tuple(ids): oracle(loaded(name, dtype), ids, PARAMS).token_ids}, [2, None], branching=True)


def is_identical(on: ModelRunner, drafter, params=PARAMS, ids=REPEATING, verifier=None, eos=NO_EOS, kind=TokenSequence):
    """The comparison that the identity tests make, as a verdict."""
    seq = sequence(on.loaded, ids, params, SEED, eos)
    seq.__class__ = kind
    try:
        run(on, drafter, [seq], 4, 40, verifier)
        assert_sound(seq, 4)
    except AssertionError:
        return False
    return result(seq) == result(oracle(on.loaded, ids, params, SEED, eos))


def test_without_a_fault_it_is_identical():
    assert is_identical(ModelRunner(loaded(), 1), scripted())


@pytest.mark.parametrize("mutant", CACHE_MUTANTS)
def test_cache_faults(mutant):
    assert not is_identical(with_cache(ModelRunner(loaded(), 1), mutant), scripted())


@pytest.mark.parametrize("mutant", LAYOUT_MUTANTS)
def test_layout_faults(mutant, monkeypatch):
    on, drafter = reading_apart(ModelRunner(loaded("llama", torch.float64), 1)), scripted(dtype=torch.float64)
    with_layout(monkeypatch, on.loaded, mutant)
    assert not is_identical(on, drafter)


def test_a_lost_window(monkeypatch):
    on, drafter = ModelRunner(loaded("mistral", torch.float64), 1), scripted(name="mistral", dtype=torch.float64)
    with_layout(monkeypatch, on.loaded, NoWindow)
    assert not is_identical(on, drafter)


class Rekeyed(Verifier):
    """`Coupled` on other noise positions."""

    name, lossless, exact = "rekeyed", True, True

    def __init__(self, key):
        self.key, self.rounds = key, 0

    def verify(self, draft, target, seeds, positions):
        self.rounds += 1
        return Coupled().verify(draft, target, seeds, self.key(self, positions))


class OneNoiseARound(Verifier):
    """The position of the root's token for every node of the tree."""

    name, lossless, exact = "one noise", True, True

    def verify(self, draft, target, seeds, positions):
        same = torch.tensor(positions)[:, None].expand(-1, draft.tree.num_nodes)
        tokens = choose_token(target, torch.tensor(seeds), same)
        forced = target.scores.new_full(target.scores.shape, -torch.inf).scatter_(-1, tokens[..., None], 0.0)
        return Coupled().verify(draft, type(target)(forced, [True] * len(seeds)), seeds, positions)


@pytest.mark.parametrize(
    "verifier",
    [
        lambda: Rekeyed(lambda v, positions: [v.rounds for _ in positions]),
        lambda: Rekeyed(lambda v, positions: [one + 1 for one in positions]),
        OneNoiseARound,
    ],
    ids=["keyed by round", "one position on", "one noise for a round"],
)
def test_noise_faults(verifier):
    assert not is_identical(ModelRunner(loaded(), 1), scripted(), verifier=verifier())


class NeverCuts(TokenSequence):
    """Goes on after the end of the text until the round is over."""

    def append(self, token, origin, source, logprob=None):
        super().append(token, origin, source, logprob)
        return False


class ForgetsTheBudget(TokenSequence):
    """Believes that one more token may be emitted than may."""

    @property
    def remaining(self):
        return super().remaining + 1


class NoMinimum(TokenSequence):
    """Stops at any end, `min_tokens` or not, and masks nothing."""

    @property
    def num_output(self):
        return super().num_output + 100 * (super().num_output > 0)


def test_ending_faults():
    answer = oracle(loaded(), REPEATING, PARAMS).output_ids
    end = next(t for i, t in enumerate(answer) if i >= 2 and t not in answer[:i])
    on = ModelRunner(loaded(), 1)
    perfect = Scripted({tuple(REPEATING): oracle(loaded(), REPEATING, PARAMS).token_ids}, [None])
    assert is_identical(on, perfect, eos=frozenset({end}))
    assert not is_identical(on, perfect, eos=frozenset({end}), kind=NeverCuts)
    assert not is_identical(on, perfect, kind=ForgetsTheBudget)
    early = SamplingParams(temperature=1.0, max_tokens=24, min_tokens=20)
    ends = frozenset(range(3, 60))
    assert is_identical(on, Ending(5), early, eos=ends)
    assert not is_identical(on, Ending(5), early, eos=ends, kind=NoMinimum)


def test_processors_on_the_row_order_instead_of_the_path(monkeypatch):
    """Penalties at a node must count its ancestors, not the siblings before it."""
    real = loop.target_distribution

    def by_rows(logits, seqs, tree):
        rows = [[*range(-1, tree.num_nodes - 1)] for _ in seqs]
        return real(logits, seqs, changed(tree, parents=rows))

    params = SamplingParams(temperature=0.7, max_tokens=24, logits_processors=(by_the_past,))
    drafter = Scripted({tuple(REPEATING): oracle(loaded(), REPEATING, params).token_ids}, [2, None], branching=True)
    on = ModelRunner(loaded(), 1)
    assert is_identical(on, drafter, params)
    monkeypatch.setattr(loop, "target_distribution", by_rows)
    assert not is_identical(on, drafter, params)
