"""Cached MTP drafting against the modules run over the whole text, and answers against plain decoding."""

import pytest
import torch

from paceline import SamplingParams
from paceline.core.interfaces import DraftBudget, DraftPolicy
from paceline.drafters import mtp as file
from paceline.drafters.mtp import Mtp
from paceline.errors import DraftError
from paceline.runner import ModelRunner
from tests.drafters.heads import SOME, attached, last_states, mtp, uncached_mtp, watched
from tests.helpers import loaded, prompt, run, sequence

PROMPTS = [prompt(5), prompt(2, 1), prompt(11, 2)]


def uncached(head, target, text: list[int], depth: int) -> tuple[list[int], list[float]]:
    """Greedy tokens of the modules run over the whole text, and their probabilities."""
    tokens, probs = uncached_mtp(head, last_states(target, text), text, depth)
    return tokens, [float(one.max()) for one in probs]


def is_same(made, row: int, tokens: list[int], sure: list[float]) -> bool:
    """Tokens and confidences of one row, which must be a chain."""
    end = 1 + len(tokens)
    given = made.confidence[row, 1:end].double()
    same = made.tree.token_ids[row, 1:end].tolist() == tokens and made.tree.is_chain
    return same and torch.allclose(given, torch.tensor(sure, dtype=torch.float64), atol=1e-6, rtol=1e-3)


def agrees(drafter_kind=Mtp, modules=1, ids=None, rounds=6, dtype=torch.float64, **options) -> bool:
    """Whether every draft is that of the uncached modules, which run in torch; in float32 the drafter is native."""
    target = loaded("llama", dtype)
    head = attached(mtp(target, modules, ids), target)
    seen = []

    def check(seqs, budgets, made):
        for row, (seq, budget) in enumerate(zip(seqs, budgets, strict=True)):
            drafted = int((~made.tree.is_probe[row]).sum()) - 1
            expected = uncached(head, target, seq.token_ids, drafted)
            seen.append(is_same(made, row, *expected) and (drafted == budget.depth or "policy" in options))

    watched(drafter_kind(head), target, PROMPTS, check, rounds=rounds, **options)
    assert len(seen) == rounds * len(PROMPTS)
    return all(seen)


DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


@DTYPES
@pytest.mark.parametrize(("modules", "depth"), [(1, 5), (2, 3), (3, 1)])
def test_cached_drafts_are_those_of_the_whole_text(modules, depth, dtype):
    assert agrees(modules=modules, depth=depth, dtype=dtype)
    assert agrees(modules=modules, depth=depth, ids=SOME, rounds=4, dtype=dtype)


class StopsEarly(DraftPolicy):
    """Depth 5, cut after one token in most rounds: later modules fall behind."""

    def __init__(self):
        self.rounds = 0

    def budgets(self, seqs):
        self.rounds += 1
        stops = self.rounds % 9 != 0
        return [DraftBudget(5, 5, should_continue=(lambda sure: False) if stops else None) for _ in seqs]


@DTYPES
def test_modules_that_fell_behind_catch_up(monkeypatch, dtype):
    assert agrees(modules=3, policy=StopsEarly(), rounds=20, dtype=dtype)
    monkeypatch.setattr(file, "_LAG", 0)
    assert agrees(modules=3, policy=StopsEarly(), rounds=20, dtype=dtype)


@DTYPES
def test_long_texts_are_read_in_chunks(monkeypatch, dtype):
    monkeypatch.setattr(file, "_CHUNK", 3)
    assert agrees(modules=2, dtype=dtype)
    assert agrees(modules=1, depth=2, dtype=dtype)


class KeepsTooMuch(Mtp):
    """A row that read a drafted token counts as known."""

    def propose(self, seqs, budgets):
        made = super().propose(seqs, budgets)
        for seq in seqs:
            self._cache.lengths[seq.slot] += 1
        return made


class ReadsTheStateBefore(Mtp):
    def _states(self, seq, begin, end):
        return super()._states(seq, max(0, begin - 1), end - 1 if begin else end)


class TokenOfTheState(Mtp):
    """The pair (f_t, x_t) instead of (f_t, x_{t+1})."""

    def _step(self, step, slots, tokens, hidden, starts):
        return super()._step(step, slots, [[0, *row[:-1]] for row in tokens], hidden, starts)


class ForgetsToRelease(Mtp):
    def release(self, slots): ...


@pytest.mark.diagonal
@pytest.mark.parametrize(("modules", "dtype"), [(1, torch.float64), (2, torch.float64), (2, torch.float32)])
@pytest.mark.parametrize("mutant", [KeepsTooMuch, ReadsTheStateBefore, TokenOfTheState])
def test_mutants_are_caught(mutant, modules, dtype):
    try:
        caught = not agrees(mutant, modules=modules, dtype=dtype)
    except DraftError:  # with one module, a row too many leaves none to draft from
        caught = mutant is KeepsTooMuch
    assert caught


def second_tenant_agrees(kind) -> bool:
    target = loaded("llama", torch.float64)
    head = attached(mtp(target), target)
    on, drafter = ModelRunner(target, 1), kind(head)
    right, real = [], drafter.propose

    def propose(seqs, budgets):
        made = real(seqs, budgets)
        expected = uncached(head, target, seqs[0].token_ids, made.tree.num_nodes - 1)
        right.append(is_same(made, 0, *expected))
        return made

    drafter.propose = propose
    run(on, drafter, [sequence(target, ids, SamplingParams(max_tokens=6)) for ids in (prompt(9, 3), prompt(20, 4))], 3)
    return all(right)


def test_a_slot_is_clean_for_its_next_tenant():
    assert second_tenant_agrees(Mtp)
    assert not second_tenant_agrees(ForgetsToRelease)


def test_draft_options_and_measured_times():
    target = loaded("llama", torch.float64)
    drafter = Mtp(mtp(target, 2))
    pendings = []

    def check(seqs, budgets, made):
        pendings.append([drafter.draft_options(seq)[0].uncached_tokens for seq in seqs])

    watched(drafter, target, PROMPTS, check, rounds=3)
    assert pendings == [[0, 0, 0]] * 3  # after a draft all but the window of the next one is known
    assert agrees(modules=2)
    per_token, per_pending = drafter.seconds()["mtp"]
    assert per_token > 0
    assert per_pending > 0
