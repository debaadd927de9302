"""Several drafters behind one interface: the same answers, the right laws, everyone in step."""

from dataclasses import replace

import pytest
import torch

from paceline import Choose, Coupled, DraftModel, Plain, PromptLookup, Ratio, SamplingParams, SelfQuantized
from paceline.core.draft import Draft, Law
from paceline.core.interfaces import DraftBudget, DraftPolicy
from paceline.core.tree import TokenTree
from paceline.errors import ConfigError
from paceline.methods import choose
from paceline.target import ModelRunner
from tests.adversaries import Constant
from tests.exactness import test_ratio as ratio
from tests.exactness.drafters import small_draft, twin
from tests.helpers import REPEATING, Budgets, changed, loaded, run, runner, sequence

TARGET = loaded()


class Rotating(DraftPolicy):
    """Another member for every row and round, now and then nobody; some rows stop early."""

    def __init__(self, members: int, depth: int = 4):
        self.members, self.depth = members, depth

    def budgets(self, seqs):
        turns = [len(seq.rounds) + seq.slot for seq in seqs]
        depths = [0 if turn % 5 == 4 else self.depth - turn % 3 for turn in turns]
        stops = [(lambda sure: sure[-1] > 0.012) if turn % 2 else None for turn in turns]
        return [
            DraftBudget(depth, depth, turn % self.members, stop)
            for turn, depth, stop in zip(turns, depths, stops, strict=True)
        ]


def members():
    return [PromptLookup(), DraftModel(twin(TARGET)), SelfQuantized(lm_head="shared"), Constant(), Plain()]


def decode(drafter, policy, seqs):
    return run(runner(TARGET, 3), drafter, seqs, policy=policy)


def test_every_token_says_who_drafted_it():
    seqs = decode(Choose(members()), Rotating(5), [sequence(TARGET, REPEATING, SamplingParams(max_tokens=40))])
    assert {"draft_model", "self-int4"} <= set(seqs[0].sources)
    assert {r.source for r in seqs[0].rounds if r.num_drafted} >= {"lookup", "draft_model", "self-int4", "adversary"}
    assert any(r.hint > 0 for r in seqs[0].rounds)


def test_the_draft_model_stays_in_step():
    """After rounds that others drafted a twin is still always right: its cache holds what it should."""
    drafter = Choose([DraftModel(twin(TARGET)), Constant(), PromptLookup()])
    (seq,) = decode(drafter, Rotating(3), [sequence(TARGET, REPEATING, SamplingParams(temperature=1.0, max_tokens=60))])
    mine = [r for r in seq.rounds if r.source == "draft_model"]
    assert len(mine) > 3
    assert all(r.num_accepted == r.num_drafted for r in mine)


def test_refusals_and_names():
    with pytest.raises(ConfigError, match="nothing to choose"):
        Choose([])
    with pytest.raises(ConfigError, match="among the members"):
        Choose([PromptLookup(), Choose([PromptLookup()])])
    assert Choose([PromptLookup(), Plain()]).labels == ("lookup", "none")
    assert Choose([PromptLookup(), PromptLookup(2), Plain()]).labels == ("lookup-0", "lookup-1", "none")


def test_outlook_of_all_members():
    drafter = Choose([PromptLookup(), DraftModel(small_draft()), Plain()])
    drafter.bind(ModelRunner(TARGET, 2), Coupled())
    seq = sequence(TARGET, REPEATING, SamplingParams(), slot=0)
    looks = drafter.draft_options(seq)
    assert [(look.source, look.hint, look.uncached_tokens) for look in looks] == [
        ("lookup", -1, 0), ("draft_model", 0, len(REPEATING) - 1), ("none", -1, 0)]  # fmt: skip


def part(tokens, law=Law.POINT_MASS, parents=None, vocab=5) -> tuple[Draft, int]:
    tree = TokenTree.from_lists([tokens], [parents or list(range(-1, len(tokens) - 1))])
    q = None if law is Law.POINT_MASS else torch.full((1, len(tokens), vocab), 1 / vocab)
    return Draft(tree, law, q, source=law.value), 0


def test_rows_of_different_laws_are_verified_without_one():
    made = choose.merged([part([0, 1, 2], Law.IID), part([0, 3])])
    assert (made.law, made.q) == (Law.POINT_MASS, None)
    assert made.tree.is_probe[1].tolist() == [False, False, True]
    assert choose.merged([part([0, 1]), part([0])]).law is Law.POINT_MASS
    assert choose.merged([part([0], Law.IID), part([0, 1])]).q is None  # the drawn row is empty
    made = choose.merged([part([0, 1], Law.IID), part([0, 3, 4], Law.IID), part([0])])
    assert made.law is Law.IID
    assert made.q is not None
    assert made.q.sum(-1).tolist() == [[1, 1, 0], [1, 1, 1], [0, 0, 0]]


def ratio_sample(count: int, monkeypatch):
    """The ratio tests' sample, by two members that share every batch."""
    drafter = Choose([DraftModel(ratio.draft()), Constant(4)])
    monkeypatch.setattr(ratio, "Fixed", lambda depth, nodes: Rotating(2, 3))
    return ratio.sample(drafter, Ratio(), count)


def test_law_of_mixed_batches(monkeypatch):
    assert ratio.p_value(ratio_sample(500, monkeypatch)) > ratio.FALSE_ALARM


def test_soft_law_for_a_point_mass_is_caught(monkeypatch):
    """Mutant: rows without a law get a soft q."""
    real = choose._common_law

    def soft(parts, width):
        drawn = next((draft.q for draft, _ in parts if draft.q is not None), None)
        if drawn is None:
            return real(parts, width)
        q = drawn.new_full((len(parts), width, drawn.shape[-1]), 1 / drawn.shape[-1])
        for b, (draft, row) in enumerate(parts):
            if draft.q is not None:
                q[b, : draft.q.shape[1]] = draft.q[row]
        return Law.IID, q

    monkeypatch.setattr(choose, "_common_law", soft)
    assert ratio.p_value(ratio_sample(500, monkeypatch)) < ratio.FALSE_ALARM


class Dropping(DraftModel):
    """Mutant: the token that ended the draft is taken back, so that being offered depends on being likely."""

    def propose(self, seqs, budgets):
        made = super().propose(seqs, budgets)
        probes = made.tree.is_probe
        for row, budget in enumerate(budgets):
            last = int((~probes[row]).sum()) - 1
            assert made.confidence is not None
            if last > 0 and not budget.should_continue([float(made.confidence[row, last])]):
                probes[row, last] = True
        return replace(made, tree=changed(made.tree, is_probe=probes.tolist()))


def test_keeping_the_last_token_keeps_the_law_and_dropping_it_does_not(monkeypatch):
    monkeypatch.setattr(
        ratio, "Fixed", lambda *_: Budgets(depth=3, nodes=3, should_continue=lambda sure: sure[-1] >= 0.2)
    )
    assert ratio.p_value(ratio.sample(DraftModel(ratio.draft()), Ratio(), 400)) > ratio.FALSE_ALARM
    assert ratio.p_value(ratio.sample(Dropping(ratio.draft()), Ratio(), 700)) < ratio.FALSE_ALARM


def test_confidence_is_computed_only_when_asked_for():
    for should_continue, expected in ((None, 3), (lambda sure: len(sure) < 2, 2)):
        drafter = DraftModel(small_draft())
        drafter.bind(ModelRunner(TARGET, 1), Coupled())
        seq = sequence(TARGET, REPEATING, SamplingParams(), slot=0)
        made = drafter.propose([seq], [DraftBudget(3, 3, should_continue=should_continue)])
        assert made.tree.num_nodes - 1 == expected
        if should_continue is None:
            assert made.confidence is None
        else:
            assert made.confidence is not None
            assert made.confidence[0, 0].isnan()
            assert ((made.confidence[0, 1:] > 0) & (made.confidence[0, 1:] <= 1)).all()


def test_lookup_hint_is_the_length_of_the_match():
    for tokens, hint in (([1, 2, 3], -1), ([1, 2, 1], 1), ([*range(9), 20, *range(9)], 8), ([5, 1, 2, 9, 1, 2], 2)):
        seq = sequence(TARGET, tokens, SamplingParams(), slot=0)
        lookup = PromptLookup()
        assert lookup.draft_options(seq)[0].hint == hint
        assert lookup.propose([seq], [DraftBudget(2, 2)]).hints == (hint,)
        seq.token_ids.append(77)  # the text grew: nothing is remembered that no longer holds
        assert lookup.draft_options(seq)[0].hint == -1
        assert lookup.propose([seq], [DraftBudget(2, 2)]).tree.num_nodes == 1
