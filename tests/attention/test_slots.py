"""Slots: rollback, reuse, running out, and what an interrupted round leaves behind."""

from contextlib import suppress

import pytest
import torch

from paceline import LLM, PromptLookup, SamplingParams
from paceline.attention.kv_cache import SlotCache
from paceline.core.tree import TokenTree
from paceline.errors import CacheFull, DraftError, NumericsError
from paceline.policy import Fixed
from paceline.target import ModelRunner
from tests.adversaries import Constant, RandomTrees
from tests.exactness.drafters import DRAFTERS
from tests.helpers import REPEATING, all_free, loaded, prompt
from tests.tiny import tiny_model

PARAMS = SamplingParams(temperature=1.0, max_tokens=12, seed=3, ignore_eos=True)


def test_slots_run_out_and_come_back():
    on = ModelRunner(loaded(), 2)
    first, second = on.admit([1, 2]), on.admit([1, 2])
    with pytest.raises(CacheFull, match=r"no cache slot.*max_num_seqs"):
        on.admit([1, 2])
    on.cache.release(first)
    on.cache.release(first)  # twice is harmless
    assert on.admit([1]) == first
    assert second != first


def test_prompt_that_fills_the_context():
    on = ModelRunner(loaded(), 1, 16)
    assert on.admit([1] * 15) == 0
    with pytest.raises(CacheFull, match="at most 15"):
        on.admit([1] * 16)


def test_commit_past_the_context_is_refused():
    on = ModelRunner(loaded(), 1, 16)
    slot = on.admit([1])
    on.extend_cache(slot, prompt(14))
    on.forward([slot], TokenTree.chain([[3, 4, 5]]))
    with pytest.raises(CacheFull, match="outgrew"):
        on.commit([slot], [[1, 2]])


def test_layers_may_come_in_any_order():
    """As in models that pass through some of their layers again."""
    cache = SlotCache(1, 16)
    cache.begin([cache.allocate()], 1)
    keys = torch.ones(1, 2, 1, 4)
    for layer in (0, 2, 1):
        assert cache.update(keys, keys, layer)[0].shape[1] == 2
    assert [layer[0, 0, 0, 0] for layer in cache.keys] == [1.0] * 3


class Fails(RandomTrees):
    """Raises from its n-th round on, before or after it was verified."""

    def __init__(self, error: BaseException, place: str):
        super().__init__()
        self.error, self.place, self.left = error, place, 3

    def propose(self, seqs, budgets):
        self.left -= 1
        if self.place == "propose" and self.left <= 0:
            raise self.error
        return super().propose(seqs, budgets)

    def observe(self, seqs, draft, logits, walks):
        if self.place == "observe" and self.left <= 0:
            raise self.error


def test_errors_leave_slots_free_and_the_next_answer_right():
    model = loaded()
    right = LLM(model).generate([REPEATING, prompt(30)], PARAMS)
    for place in ("propose", "observe"):
        for error in (RuntimeError("broken"), KeyboardInterrupt()):
            drafter = Fails(error, place)
            llm = LLM(model, drafter=drafter, policy=Fixed(3), max_num_seqs=2)  # drafts in every round
            with pytest.raises(DraftError if isinstance(error, Exception) else KeyboardInterrupt):
                llm.generate([REPEATING, prompt(30), prompt(4)], PARAMS)
            assert all_free(llm.runner)
            drafter.place = "mended"
            again = llm.generate([REPEATING, prompt(30)], PARAMS)
            assert [a.token_ids for a in again] == [r.token_ids for r in right]


@pytest.mark.diagonal
@pytest.mark.parametrize("drafter", ["draft model", "self int4"])
@pytest.mark.parametrize("call", [1, 2, 5, 9])
def test_an_error_inside_a_pass(drafter, call, monkeypatch):
    """Of the target or of the draft, in prefill or later; both caches must be usable afterwards."""
    target = loaded()
    llm = LLM(loaded(), drafter=DRAFTERS[drafter](target, {}), max_num_seqs=1)
    right = llm.generate(REPEATING, PARAMS)[0].token_ids
    count = 0
    real = ModelRunner.forward

    def forward(self, *given, **options):
        nonlocal count
        count += 1
        out = real(self, *given, **options)
        if count == call:
            raise MemoryError("no room")
        return out

    monkeypatch.setattr(ModelRunner, "forward", forward)
    with suppress(MemoryError):  # of the target; without a draft, the answer goes on
        assert llm.generate(REPEATING, PARAMS)[0].token_ids == right
    assert count >= call
    assert all_free(llm.runner)
    assert llm.generate(REPEATING, PARAMS)[0].token_ids == right


def test_streams_that_nobody_finishes():
    llm = LLM(loaded(), drafter=PromptLookup(), max_num_seqs=1)
    right = llm.generate(REPEATING, PARAMS)[0].token_ids
    stream = llm.stream(REPEATING, PARAMS)
    next(stream)
    with pytest.raises(CacheFull):  # the only slot is taken: refused, and the stream is not disturbed
        llm.generate(REPEATING, PARAMS)
    stream.close()
    assert all_free(llm.runner)
    for _ in llm.stream(REPEATING, PARAMS):
        break
    assert all_free(llm.runner)

    def interrupted():
        for _ in llm.stream(REPEATING, PARAMS):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all_free(llm.runner)
    assert [t for c in llm.stream(REPEATING, PARAMS) for t in c.token_ids] == right


def test_two_streams_side_by_side():
    llm = LLM(loaded(), drafter=PromptLookup(), max_num_seqs=2)
    right = [r.token_ids for r in llm.generate([REPEATING, prompt(30)], PARAMS)]
    streams = [llm.stream(REPEATING, PARAMS), llm.stream(prompt(30), PARAMS)]
    got: list[list[int]] = [[], []]
    while streams[0] or streams[1]:
        for index, stream in enumerate(streams):
            chunk = next(stream, None) if stream else None
            if chunk is None:
                streams[index] = None
            else:
                got[index] += chunk.token_ids
    assert got == right


def test_an_overflow_does_not_outlive_its_round():
    """Masked columns weigh 0, and 0 * NaN would be NaN: a rejected row, or a last tenant, must not reach others."""
    model = tiny_model("llama")
    right = LLM(model, max_num_seqs=1).generate(REPEATING, PARAMS)[0].token_ids
    bad = next(token for token in range(3, 97) if token not in REPEATING + right)
    with torch.no_grad():
        model.model.embed_tokens.weight[bad] = float("nan")
    llm = LLM(model, drafter=Constant(bad), policy=Fixed(3), max_num_seqs=1)
    answer = llm.generate(REPEATING, PARAMS)[0]
    assert answer.token_ids == right
    assert answer.outputs[0].num_drafted > 0
    with pytest.raises(NumericsError, match="not finite"):
        llm.generate([5, 6, bad, 7], PARAMS)
    assert llm.generate(REPEATING, PARAMS)[0].token_ids == right
