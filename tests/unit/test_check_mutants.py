"""`check` must be able to fail: each fault below is planted in an engine, in both numerics, and reported as a bug.

The models are float32, where rounding is small. In 16 bits and with fast numerics a fault that moves scores by less
than rounding does cannot be told from it, see `paceline.checks.reference`.
"""

from dataclasses import replace

import pytest
import torch

from paceline import LLM, Fixed, PromptLookup
from paceline.check import check
from paceline.core.outputs import TargetOutput
from paceline.runner import ModelRunner, SlotCache
from paceline.runner.layout import PassLayout
from tests.adversaries import Scripted
from tests.tiny import tiny_model

PROMPTS = [[5, 9, 31, 7, 5, 9, 31], [3, 3, 3, 3, 3]]
HIDDEN = 4
"""The cached column that mutants hide."""


def engine(numerics, dtype=torch.float32):
    return LLM(tiny_model("llama", dtype=dtype), drafter=PromptLookup(), policy=Fixed(4), numerics=numerics)


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


def tree_engine(numerics, dtype=torch.float32):
    model = tiny_model("llama", dtype=dtype)
    drafter = Trees(LLM(model, numerics=numerics), [None, 1, 2])
    return LLM(model, drafter=drafter, policy=Fixed(4, 12), numerics=numerics)


def run(llm):
    return check(llm, PROMPTS, max_tokens=24, with_law_test=False)


def verifies(layout) -> bool:
    """Whether the pass holds a draft, and not a prompt or the one node of plain decoding (and what pads it)."""
    return layout.tree is not None and (layout.num_given or layout.num_nodes) > 1


def hide(monkeypatch, hides):
    """Rows of passes for which `hides` holds miss one committed column."""
    right = PassLayout._visible

    def hidden(layout, row, window):
        mask = right(layout, row, window)
        if hides(layout) and layout.starts[row] > HIDDEN:
            mask[:, HIDDEN] = False
        return mask

    monkeypatch.setattr(PassLayout, "_visible", hidden)


def hides_a_column_from_drafts(monkeypatch):
    hide(monkeypatch, verifies)


def hides_a_column_from_plain_decoding_too(monkeypatch):
    """Both sides are wrong alike: their tokens and bits agree."""
    hide(monkeypatch, lambda layout: layout.tree is not None)


def at_commit(monkeypatch, damage):
    """damage(cache, slot, start, nodes) after each commit; start: the column of the root."""
    right = SlotCache.commit

    def commit(cache, slot, nodes):
        start = cache.lengths[slot]
        right(cache, slot, nodes)
        damage(cache, slot, start, nodes)

    monkeypatch.setattr(SlotCache, "commit", commit)


def round_keys(cache, slot, first, dtype=torch.bfloat16):
    for keys in cache.keys:
        kept = keys[slot, :, first : cache.lengths[slot]]
        kept.copy_(kept.to(dtype).to(kept.dtype))


def rounds_accepted_keys_to_bfloat16(monkeypatch):
    at_commit(monkeypatch, lambda cache, slot, start, nodes: round_keys(cache, slot, start + 1))


def rounds_accepted_keys_to_float16(monkeypatch):
    at_commit(monkeypatch, lambda cache, slot, start, nodes: round_keys(cache, slot, start + 1, torch.float16))


def rounds_every_key(monkeypatch):
    """Those of plain decoding too: both sides are wrong alike."""
    at_commit(monkeypatch, lambda cache, slot, start, nodes: round_keys(cache, slot, start))


def keeps_a_rejected_column(monkeypatch):
    """The last accepted column is overwritten by the one behind it, a rejected guess or a leftover."""

    def damage(cache, slot, start, nodes):
        if nodes:
            last = start + len(nodes)
            for layer in (*cache.keys, *cache.values):
                layer[slot, :, last] = layer[slot, :, last + 1]

    at_commit(monkeypatch, damage)


def shifts_the_second_token_of_a_chain(monkeypatch):
    right = PassLayout.position_ids.func

    def shifted(layout):
        positions = right(layout)
        if verifies(layout):
            positions = positions.clone()
            positions[..., 1] += 1
        return positions

    monkeypatch.setattr(PassLayout, "position_ids", property(shifted))


def keeps_the_rows_behind_the_accepted_ones(monkeypatch):
    right = SlotCache.commit
    monkeypatch.setattr(SlotCache, "commit", lambda cache, slot, nodes: right(cache, slot, [n + 1 for n in nodes]))


MUTANTS = [
    hides_a_column_from_drafts,
    hides_a_column_from_plain_decoding_too,
    rounds_accepted_keys_to_bfloat16,
    rounds_accepted_keys_to_float16,
    rounds_every_key,
    keeps_a_rejected_column,
    shifts_the_second_token_of_a_chain,
    keeps_the_rows_behind_the_accepted_ones,
]
BOTH = pytest.mark.parametrize("numerics", ["fast", "invariant"])


@BOTH
@pytest.mark.parametrize("make", [engine, tree_engine])
def test_without_a_fault_it_passes(make, numerics):
    report = run(make(numerics, torch.bfloat16))
    assert report.passed
    assert report.verdicts["identical"] == 4 or numerics == "fast"
    assert report.numerics == numerics
    assert report.num_references == 4


@BOTH
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_fault_is_a_bug(mutant, numerics, monkeypatch):
    llm = engine(numerics)
    mutant(monkeypatch)
    report = run(llm)
    assert report.verdicts["bug"] >= 1
    assert report.verdicts["near_tie"] == 0
    assert not report.passed


def rounds_accepted_keys_to_8_bits(monkeypatch):
    at_commit(monkeypatch, lambda cache, slot, start, nodes: round_keys(cache, slot, start + 1, torch.float8_e4m3fn))


@pytest.mark.parametrize("mutant", [hides_a_column_from_drafts, rounds_accepted_keys_to_8_bits])
def test_in_16_bits_a_fault_is_no_tie_where_bits_count(mutant, monkeypatch):
    """These move scores about as far as rounding does in bfloat16, where fast numerics may take them for it."""
    llm = engine("invariant", torch.bfloat16)
    mutant(monkeypatch)
    report = run(llm)
    assert report.verdicts["near_tie"] == 0
    assert not report.passed


@BOTH
@pytest.mark.parametrize("mutant", [hides_a_column_from_plain_decoding_too, rounds_every_key])
def test_only_the_reference_sees_a_fault_of_both_sides(mutant, numerics, monkeypatch):
    llm = engine(numerics)
    mutant(monkeypatch)
    report = run(llm)
    found = [one.measured for one in report.comparisons if one.measured is not None]
    assert any(not one.plain.is_rounding and not one.speculative.is_rounding for one in found)


@BOTH
def test_scores_are_compared_where_the_tokens_are_the_same(numerics, monkeypatch):
    """A fault too small to change a token of these answers."""
    llm = engine(numerics)
    rounds_accepted_keys_to_float16(monkeypatch)
    report = run(llm)
    assert any(one.position is None and one.verdict.value == "bug" for one in report.comparisons)


@BOTH
def test_rows_of_a_tree_that_stay_where_they_were_are_a_bug(numerics, monkeypatch):
    llm = tree_engine(numerics)
    right = SlotCache.commit
    monkeypatch.setattr(
        SlotCache, "commit", lambda cache, slot, nodes: right(cache, slot, list(range(1, len(nodes) + 1)))
    )
    assert run(llm).verdicts["bug"] >= 1


def test_siblings_that_see_each_other_are_a_bug(monkeypatch):
    llm = tree_engine("fast")
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
    llm = engine("fast")
    right = ModelRunner.forward

    def noisy(runner, slots, tree):
        logits = right(runner, slots, tree).logits
        if tree.num_nodes > 1:
            rng = torch.Generator().manual_seed(tree.num_nodes)
            logits = logits + 3e-5 * torch.randn(logits.shape, generator=rng)
        return TargetOutput(logits)

    monkeypatch.setattr(ModelRunner, "forward", noisy)
    report = run(llm)
    assert report.verdicts["bug"] >= 1
    before = [one.measured.noise for one in report.comparisons if one.measured is not None]
    monkeypatch.setattr(ModelRunner, "forward", right)
    after = [one.measured.noise for one in run(llm).comparisons if one.measured is not None]
    assert before == pytest.approx(after, rel=0.5)


@BOTH
def test_rounding_that_turns_a_tie_is_a_near_tie_only_where_bits_do_not_count(numerics, monkeypatch):
    """Tokens in pairs of equal weights; wide passes round the second of each pair up by the last bit."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[48:96] = model.lm_head.weight[:48]
    llm = LLM(model, drafter=PromptLookup(), policy=Fixed(4), numerics=numerics)
    right = ModelRunner.forward

    def rounds_up(runner, slots, tree):
        logits = right(runner, slots, tree).logits.clone()
        logits[..., 48:96] = logits[..., :48]
        if tree.num_nodes > 1:
            logits[..., 48:96] += logits.abs().max() * 2e-7
        return TargetOutput(logits)

    monkeypatch.setattr(ModelRunner, "forward", rounds_up)
    report = check(llm, PROMPTS, max_tokens=24, temperatures=[0.0], with_law_test=False)
    ties, bugs = (report.verdicts[verdict] for verdict in ("near_tie", "bug"))
    assert (ties >= 1, bugs >= 1) == (numerics == "fast", numerics == "invariant")
    parted = [one.measured for one in report.comparisons if one.measured is not None and one.position is not None]
    assert all(one.gap == 0 for one in parted)
