"""`check` must be able to fail: each fault of `planted_faults` is planted in an engine and reported as a bug.

The faults lie where every engine passes: the native one, whose bits are invariant by construction, and that of
transformers' layers in both numerics. The models are float32, where rounding is small. In 16 bits and with fast
numerics a fault that moves scores by less than rounding does cannot be told from it, see `paceline.measure.reference`.
"""

from dataclasses import replace

import pytest
import torch

from paceline import LLM, Fixed, PromptLookup
from paceline.attention.masks import PassLayout
from paceline.core.tree import TokenTree
from paceline.measure.check import check
from paceline.target import ModelRunner, SlotCache
from tests.adversaries import Scripted
from tests.measure import planted_faults as faults
from tests.measure.test_check import twins
from tests.tiny import UNDESCRIBED, tiny_model

PROMPTS = [[5, 9, 31, 7, 5, 9, 31], [3, 3, 3, 3, 3]]
NATIVE, FAST, INVARIANT = ("llama", "invariant"), (UNDESCRIBED, "fast"), (UNDESCRIBED, "invariant")
"""Engines: an architecture, native or not, and its numerics."""


def engine(kind, dtype=torch.float32):
    name, numerics = kind
    llm = LLM(tiny_model(name, dtype), drafter=PromptLookup(), policy=Fixed(4), numerics=numerics)
    assert llm.loaded.is_native == (kind == NATIVE)
    return llm


class Trees(Scripted):
    """Right tokens among wrong siblings, read off plain answers as they are asked for."""

    def __init__(self, plain, script):
        super().__init__({}, script, branching=True)
        self.plain = plain

    def right(self, seq, count):
        key = tuple(seq.prompt_ids)
        if key not in self.future:
            params = replace(seq.params, seed=seq.seed, max_tokens=40, ignore_eos=True, logprobs=None)
            self.future[key] = [*key, *self.plain.generate([list(key)], params)[0].token_ids]
        return super().right(seq, count)


def tree_engine(kind, dtype=torch.float32):
    name, numerics = kind
    model = tiny_model(name, dtype)
    drafter = Trees(LLM(model, numerics=numerics), [None, 1, 2])
    return LLM(model, drafter=drafter, policy=Fixed(4, 12), numerics=numerics)


def run(llm):
    return check(llm, PROMPTS[:1], max_tokens=16, with_distribution_test=False)


EVERY = pytest.mark.parametrize("kind", [NATIVE, FAST, INVARIANT], ids=["native", "fast", "invariant"])
HARD = pytest.mark.parametrize("kind", [NATIVE, FAST], ids=["native", "fast"])
"""Transformers' layers in fast numerics: in invariant ones every difference is a bug, as in native passes."""


@pytest.mark.diagonal
@EVERY
@pytest.mark.parametrize("make", [engine, tree_engine])
def test_without_a_fault_it_passes(make, kind):
    llm = make(kind, torch.bfloat16)
    report = run(llm)
    assert report.passed
    assert report.verdicts["identical"] == 2 or kind == FAST
    assert llm.numerics == kind[1]
    assert all(one.measured is not None for one in report.comparisons)


@pytest.mark.diagonal
@HARD
@pytest.mark.parametrize("mutant", faults.MUTANTS)
def test_a_fault_is_a_bug(mutant, kind, monkeypatch):
    llm = engine(kind)
    mutant(monkeypatch)
    report = run(llm)
    assert report.verdicts["bug"] >= 1
    assert report.verdicts["near_tie"] == 0
    assert not report.passed
    if mutant in faults.OF_BOTH_SIDES:  # which only the reference sees
        found = [one.measured for one in report.comparisons if one.measured is not None]
        assert any(not one.plain.is_rounding and not one.speculative.is_rounding for one in found)
    if mutant is faults.rounds_accepted_keys_to_float16:  # too small to change a token of every answer
        assert any(one.position is None and one.verdict.value == "bug" for one in report.comparisons)


@pytest.mark.diagonal
@pytest.mark.parametrize("mutant", [faults.hides_a_column_from_drafts, faults.rounds_accepted_keys_to_8_bits])
@pytest.mark.parametrize("kind", [NATIVE, INVARIANT], ids=["native", "invariant"])
def test_in_16_bits_a_fault_is_no_tie_where_bits_count(mutant, kind, monkeypatch):
    """These move scores about as far as rounding does in bfloat16, where fast numerics may take them for it."""
    llm = engine(kind, torch.bfloat16)
    mutant(monkeypatch)
    report = run(llm)
    assert report.verdicts["near_tie"] == 0
    assert not report.passed


@HARD
def test_rows_of_a_tree_that_stay_where_they_were_are_a_bug(kind, monkeypatch):
    llm = tree_engine(kind)
    right = SlotCache.commit
    monkeypatch.setattr(
        SlotCache, "commit", lambda cache, slot, nodes: right(cache, slot, list(range(1, len(nodes) + 1)))
    )
    assert run(llm).verdicts["bug"] >= 1


@HARD
def test_siblings_that_see_each_other_are_a_bug(kind, monkeypatch):
    """Each node but the root takes the one before it for its parent."""
    llm = tree_engine(kind)

    def damage(layout, cache):
        if faults.verifies(layout) and not layout.tree.is_chain:
            layout.tree = TokenTree.chain(layout.tree.lists.token_ids)

    faults.at_pass(monkeypatch, damage)
    assert run(llm).verdicts["bug"] >= 1


def test_siblings_that_are_seen_from_their_own_places_are_a_bug(monkeypatch):
    """Of masks alone, which only transformers' layers read."""
    llm = tree_engine(FAST)
    right = PassLayout._visible

    def leaking(layout, row, window):
        mask, start = right(layout, row, window), layout.starts[row]
        if layout.tree is not None and not layout.tree.is_chain:
            mask[2:, start + 1] = True
        return mask

    monkeypatch.setattr(PassLayout, "_visible", leaking)
    assert run(llm).verdicts["bug"] >= 1


def test_a_pass_of_many_rows_cannot_excuse_itself(monkeypatch):
    """Noise added to wide passes alone, ten times what rounding does: none of it counts as rounding."""
    llm = engine(FAST)
    right = ModelRunner.forward

    def noisy(runner, slots, tree, *rest, **options):
        logits = right(runner, slots, tree, *rest, **options)
        if tree.num_nodes > 1:
            rng = torch.Generator().manual_seed(tree.num_nodes)
            logits = logits + 3e-5 * torch.randn(logits.shape, generator=rng)
        return logits

    monkeypatch.setattr(ModelRunner, "forward", noisy)
    report = run(llm)
    assert report.verdicts["bug"] >= 1
    before = [one.measured.noise for one in report.comparisons if one.measured is not None]
    monkeypatch.setattr(ModelRunner, "forward", right)
    after = [one.measured.noise for one in run(llm).comparisons if one.measured is not None]
    assert before == pytest.approx(after, rel=0.5)


@pytest.mark.parametrize("kind", [FAST, INVARIANT], ids=["fast", "invariant"])
def test_rounding_that_turns_a_tie_is_a_near_tie_only_where_bits_do_not_count(kind, monkeypatch):
    """Tokens in pairs of equal weights; wide passes round the second of each pair up by the last bit."""
    numerics = kind[1]
    llm = twins(*kind)
    right = ModelRunner.forward

    def rounds_up(runner, slots, tree, *rest, **options):
        logits = right(runner, slots, tree, *rest, **options).clone()
        logits[..., 48:96] = logits[..., :48]
        if tree.num_nodes > 1:
            logits[..., 48:96] += logits.abs().max() * 2e-7
        return logits

    monkeypatch.setattr(ModelRunner, "forward", rounds_up)
    report = check(llm, PROMPTS, max_tokens=24, temperatures=[0.0], with_distribution_test=False)
    ties, bugs = (report.verdicts[verdict] for verdict in ("near_tie", "bug"))
    assert (ties >= 1, bugs >= 1) == (numerics == "fast", numerics == "invariant")
    parted = [one.measured for one in report.comparisons if one.measured is not None and one.position is not None]
    assert all(one.gap == 0 for one in parted)
