"""What every policy keeps to: budgets that a drafter can meet, and nothing of a slot's last tenant."""

import copy
from collections.abc import Callable

import pytest

from paceline import CostModel, Coupled, Dynamic, Fixed, SamplingParams
from paceline.core.interfaces import DraftPolicy
from paceline.engine.loop import SpeculativeDecoder
from paceline.target import ModelRunner
from tests.adversaries import Constant
from tests.exactness.drafters import DRAFTERS, runner_for
from tests.helpers import REPEATING, admit, generate, loaded, oracle, prompt, sequence

POLICIES: dict[str, Callable[[], DraftPolicy]] = {
    "fixed": lambda: Fixed(4, 9),
    "nothing": lambda: Fixed(0),
    "dynamic": Dynamic,
    "cost model": CostModel,
}
PARAMS = SamplingParams(temperature=1.0, max_tokens=30)


@pytest.mark.parametrize("name", ["lookup recent", "draft model", "eagle3", "five", "space + eagle3", "all right"])
@pytest.mark.parametrize("policy", POLICIES)
def test_budgets_that_a_drafter_can_meet(policy, name):
    target, made, asked = loaded(), POLICIES[policy](), []
    future = {tuple(ids): oracle(target, ids, PARAMS).token_ids for ids in (REPEATING, prompt(9))}
    drafter, real = DRAFTERS[name](target, future), made.budgets
    members = len(getattr(drafter, "members", [drafter]))

    def budgets(seqs):
        found = real(seqs)
        asked.append(len(seqs))
        assert len(found) == len(seqs)
        for seq, one in zip(seqs, found, strict=True):
            assert 0 <= one.depth <= max(one.nodes, 0)
            assert 0 <= one.drafter_index < members
            assert list(one.min_probs) == sorted(one.min_probs)
            option = drafter.draft_options(seq)[one.drafter_index]
            assert option.hint >= 0 or one.depth == 0 or policy in ("fixed", "dynamic")
        return found

    made.budgets = budgets
    decoder = SpeculativeDecoder(runner_for(name), drafter, Coupled(), made)
    for _ in generate(decoder, [sequence(target, ids, PARAMS) for ids in future]):
        pass
    assert sum(asked) > 2


def after_a_tenant(make: Callable[[], DraftPolicy]) -> list[tuple[object, ...]]:
    """The first budgets in the slot of a text for which all drafts were wrong, and in a slot that nobody had."""
    drafter, policy = Constant(), make()
    on = ModelRunner(loaded(), 2)
    decoder = SpeculativeDecoder(on, drafter, Coupled(), policy)
    for _ in range(3):
        seq = sequence(loaded(), REPEATING * 2, SamplingParams(max_tokens=40))
        admit(decoder, seq)
        for _ in range(12):
            decoder.step([seq])
        last = seq.slot
        decoder.release(seq)
        decoder.release(seq)  # twice is harmless
    found = []
    for slot in (last, 1 - last):
        other = copy.deepcopy(policy, {id(one): one for one in (on, drafter)})
        (one,) = other.budgets([sequence(loaded(), REPEATING * 2, PARAMS, slot=slot)])
        found.append((one.depth, one.nodes, one.drafter_index, list(one.min_probs)))
    return found


@pytest.mark.parametrize("policy", ["fixed", "nothing", "dynamic"])  # the cost model plans by the clock
def test_nothing_of_a_slot_outlives_its_tenant(policy):
    used, unused = after_a_tenant(POLICIES[policy])
    assert used == unused


def test_what_outlives_it_is_noticed(monkeypatch):
    monkeypatch.setattr(Dynamic, "release", lambda self, slots: None)
    used, unused = after_a_tenant(Dynamic)
    assert used != unused
