"""An interrupt at any line of a call loses no slot and changes no later answer; threads take turns."""

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

import pytest

import paceline
from paceline import LLM, CostModel, DraftModel, Fixed, PromptLookup, SamplingParams
from paceline.attention.kv_cache import SlotCache
from paceline.errors import CacheFull
from tests.exactness.drafters import small_draft
from tests.helpers import REPEATING, all_free, prompt, tokenizer
from tests.tiny import tiny_model

PARAMS = SamplingParams(temperature=0.8, max_tokens=12, seed=3)
SOURCE = str(Path(paceline.__file__).parent)


def engine(drafter=None, slots: int = 1, policy=None) -> LLM:
    made = drafter or PromptLookup()
    return LLM(tiny_model("llama"), tokenizer=tokenizer(), drafter=made, policy=policy or Fixed(3), max_num_seqs=slots)


class InterruptAt:
    """Raises KeyboardInterrupt when the `line`-th line of the library is about to run, once."""

    def __init__(self, line: int, source: str = SOURCE):
        self.left, self.source = line, source

    def __enter__(self) -> "InterruptAt":
        sys.settrace(self._trace)
        return self

    def __exit__(self, *args: object) -> None:
        sys.settrace(None)

    def _trace(self, frame, event: str, argument: object):
        if not frame.f_code.co_filename.startswith(self.source):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._trace


def faults(
    llm: LLM, call: Callable[[], object], stride: int, source: str = SOURCE, ids: Sequence[int] = REPEATING
) -> int:
    """Interrupt `call` at every `stride`-th line until it runs through; how often what follows is wrong."""
    want = llm.generate(ids, PARAMS)[0].token_ids
    line, lost = 1, 0
    while True:
        at = InterruptAt(line, source)
        with suppress(KeyboardInterrupt, CacheFull), at:
            call()
        if at.left > 0:
            return lost
        try:
            lost += llm.generate(ids, PARAMS)[0].token_ids != want
        except Exception:
            lost += 1
        lost += not all_free(llm.runner)
        line += stride


@pytest.mark.parametrize(
    ("make", "policy"),
    [(lambda: DraftModel(small_draft()), lambda: Fixed(3)), (PromptLookup, CostModel)],
    ids=["draft model, fixed", "lookup, cost model"],
)
def test_an_interrupt_at_any_line_loses_nothing(make, policy):
    llm = engine(make(), policy=policy())
    short = SamplingParams(max_tokens=4)
    assert faults(llm, lambda: llm.generate(REPEATING, short), 97) == 0


def test_an_interrupt_while_the_cache_grows_loses_nothing():
    llm = engine()
    cache = llm.runner.cache

    def grow() -> None:
        for layers in (cache.keys, cache.values):
            layers[:] = [layer[:, :, :64] for layer in layers]
        cache.capacity = 64
        llm.generate(prompt(90), SamplingParams(max_tokens=1))

    assert faults(llm, grow, 3, SOURCE + "/attention/kv_cache.py", prompt(90)) == 0


def test_an_interrupted_stream_gives_its_slot_back():
    llm = engine()
    assert faults(llm, lambda: list(llm.stream(REPEATING, SamplingParams(max_tokens=4))), 113) == 0


def test_the_checker_sees_a_lost_slot(monkeypatch):
    """Mutant: nothing is reclaimed, and a release that fails gives nothing back."""
    monkeypatch.setattr(SlotCache, "reclaim", lambda self: None)
    llm = engine()
    monkeypatch.setattr(type(llm.decoder), "release", lambda self, seq: None)
    assert faults(llm, lambda: llm.generate(REPEATING, SamplingParams(max_tokens=2)), 301) > 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["drafter", "policy", "both"])
def test_a_release_that_raises_loses_nothing(where, error, monkeypatch):
    llm = engine()
    want = llm.generate(REPEATING, PARAMS)[0].token_ids
    told = list[str]()

    def broken(slots):
        told.append("asked")
        raise error("in the middle")

    with monkeypatch.context() as patch:
        for name in ("drafter", "policy") if where == "both" else (where,):
            patch.setattr(getattr(llm.decoder, name), "release", broken)
        with pytest.raises(error):
            llm.generate(REPEATING, PARAMS)
    assert told
    for _ in range(3):
        assert llm.generate(REPEATING, PARAMS)[0].token_ids == want
    assert all_free(llm.runner)


def test_open_streams_keep_their_slots():
    llm = engine(slots=2)
    want = llm.generate(REPEATING, PARAMS)[0].token_ids
    with closing(llm.stream(REPEATING, PARAMS)) as one:
        tokens = list(next(one).token_ids)
        assert [r.token_ids for r in llm.generate([REPEATING] * 3, PARAMS)] == [want] * 3
        with closing(llm.stream(REPEATING, PARAMS)) as other:
            next(other)
            with pytest.raises(CacheFull, match="streams that are open"):
                llm.generate(REPEATING, PARAMS)
        assert llm.generate(REPEATING, PARAMS)[0].token_ids == want
        tokens += [token for chunk in one for token in chunk.token_ids]
    assert tokens == want
    assert all_free(llm.runner)


@pytest.mark.parametrize("streams", [False, True])
def test_threads_take_turns(streams):
    """Four threads, each with prompts and seeds of its own, on one engine; each is told what it is told alone."""
    llm = engine(slots=4)
    asked = [(prompt(5 + 9 * i, i), SamplingParams(0.9, max_tokens=15, seed=i)) for i in range(4)]
    want = [llm.generate(*one)[0].token_ids for one in asked]
    got: list[list[list[int]]] = [[] for _ in asked]
    ready = threading.Barrier(4)

    def work(index: int) -> None:
        ids, params = asked[index]
        ready.wait()
        for turn in range(5):
            if streams and turn % 2:
                got[index].append([token for chunk in llm.stream(ids, params) for token in chunk.token_ids])
            else:
                on = llm.plain() if turn == 4 else llm
                got[index].append(on.generate(ids, params)[0].token_ids)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert got == [[one] * 5 for one in want]
    assert all_free(llm.runner)


def test_a_stream_may_be_read_by_other_threads_than_began_it():
    llm = engine()
    want = llm.generate(REPEATING, PARAMS)[0].token_ids
    stream, tokens = llm.stream(REPEATING, PARAMS), list[int]()
    while tokens != want:
        thread = threading.Thread(target=lambda: tokens.extend(next(stream).token_ids))
        thread.start()
        thread.join()
    stream.close()
    assert all_free(llm.runner)
