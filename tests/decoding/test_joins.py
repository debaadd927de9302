"""When it is measured whether prompt and draft may share a pass, and which drafts may."""

import pytest

from paceline import Coupled, DraftModel, Fixed, Plain, PromptLookup
from paceline.core.tree import TokenTree
from paceline.decoding import SpeculativeDecoder, first_pass
from paceline.runner import ModelRunner, model_runner, one_pass
from tests.decoding.test_one_pass import SHORT, answers
from tests.helpers import REPEATING, loaded, sequence
from tests.lossless.drafters import twin

pytestmark = pytest.mark.usefixtures("unchecked_types")


def test_it_is_measured_once(monkeypatch):
    """Prompts have the same shapes before and after, whatever was found."""
    calls = list[int]()
    monkeypatch.setattr(model_runner, "measure_joins", lambda *given: bool(calls.append(1)))
    on = ModelRunner(loaded(), 1)
    on.invariant, on.row_multiple = True, 4

    def shape():
        return one_pass.padded_prefill(on, 0, [1] * 5)[0].shape

    assert shape() == (1, 8)
    for drafter in (Plain(), DraftModel(twin(loaded()))):
        (seq,), _ = answers(on, drafter, [REPEATING], depth=3)
        assert not any(r.with_prompt for r in seq.rounds)
    assert calls == [1]
    assert shape() == (1, 8)


def test_a_full_runner_is_measured_once_a_slot_is_free(monkeypatch):
    calls = list[int]()
    monkeypatch.setattr(model_runner, "measure_joins", lambda on, chunk: calls.append(on.cache.num_free) or True)
    on = ModelRunner(loaded(), 1)
    slot = on.cache.allocate()
    decoder = SpeculativeDecoder(on, PromptLookup(), Coupled(), Fixed(2))
    assert not calls
    on.cache.release(slot)
    decoder.admit(sequence(loaded(), REPEATING, SHORT))
    assert calls == [1]


def test_large_trees_wait_for_the_prompt():
    """Bits are measured for trees of up to `MOST_NODES` only."""
    for nodes, joined in ((one_pass.MOST_NODES, True), (one_pass.MOST_NODES + 1, False)):
        on = ModelRunner(loaded(), 1)
        seq = sequence(loaded(), REPEATING, SHORT)
        seq.slot, seq.is_unread = on.admit(seq.token_ids), True
        tree = TokenTree.from_lists([[REPEATING[-1]] * nodes], [[-1] + [0] * (nodes - 1)])
        out, joins, _ = first_pass.forward(on, [seq], tree)
        assert joins == [joined]
        assert out.logits.shape[1] == nodes
        assert on.cache.lengths[seq.slot] == len(REPEATING) - 1
