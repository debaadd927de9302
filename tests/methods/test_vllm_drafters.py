"""Our drafters behind vLLM's interface, in a batch as vLLM keeps it: rows move, prompts come in pieces."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.integrations.vllm_drafters import Lookup, Proposer, Suffix

END, LENGTH = 9, 400
PERIOD = [3, 4, 5, 6, 7]


class Clock:
    """Seconds that pass only where the test lets them."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """vLLM's part: a greedy model whose next token is `target(text)`, a batch of rows, and chains that it verifies.

    A step takes `base` seconds, and `each` more for every drafted token.
    """

    def __init__(self, kind: type[Proposer], target, k: int = 6, base: float = 0.02, each: float = 0.0):
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=k),
            model_config=SimpleNamespace(max_model_len=LENGTH, hf_config=SimpleNamespace(eos_token_id=END)),
        )
        self.clock, self.target, self.k, self.base, self.each = Clock(), target, k, base, each
        self.proposer = kind(config, clock=self.clock)
        self.proposer.load_model(None)
        self.texts, self.drafts = list[list[int]](), list[list[int]]()
        self.drafted = self.steps = 0

    def add(self, prompt: list[int]) -> None:
        self.texts.append(list(prompt))
        self.drafts.append([])

    def drop(self, row: int) -> None:
        """A request ends: vLLM moves the last row to its place."""
        for rows in (self.texts, self.drafts):
            last = rows.pop()
            if row < len(rows):
                rows[row] = last

    def step(self) -> list[list[int]]:
        sampled = []
        for text, draft in zip(self.texts, self.drafts, strict=True):
            fresh = []
            for token in [*draft, None]:
                fresh.append(self.target(text + fresh))
                if fresh[-1] != token:
                    break
            sampled.append(fresh)
            text += fresh
        rows = np.zeros((8, LENGTH), dtype=np.int32)
        for row, text in enumerate(self.texts):
            rows[row, : len(text)] = text
        num = sum(map(len, self.drafts))
        self.clock.now += self.base + self.each * num
        self.drafted, self.steps = self.drafted + num, self.steps + 1
        lengths = np.array([len(text) for text in self.texts] + [0] * (8 - len(self.texts)))
        self.drafts = self.proposer.propose(sampled, lengths, rows, slot_mappings=None)
        assert len(self.drafts) == len(self.texts)
        assert all(len(one) <= self.k for one in self.drafts)
        return sampled


def periodic(text: list[int]) -> int:
    return PERIOD[(PERIOD.index(text[-1]) + 1) % len(PERIOD)] if text[-1] in PERIOD else PERIOD[0]


@pytest.mark.parametrize("kind", [Lookup, Suffix])
def test_repeated_text_takes_fewer_steps(kind):
    engine = Engine(kind, periodic)
    engine.add(PERIOD * 2)
    for _ in range(40):
        engine.step()
    emitted = len(engine.texts[0]) - 2 * len(PERIOD)
    assert emitted > 3 * engine.steps, "drafts were accepted"
    assert engine.texts[0] == (PERIOD * LENGTH)[: len(engine.texts[0])]


@pytest.mark.parametrize("kind", [Lookup, Suffix])
def test_nothing_is_drafted_where_it_does_not_pay(kind):
    """Drafts that are as often wrong as right, and make a step dearer: the cost model gives up."""
    engine = Engine(kind, lambda text: 3 + random.Random(len(text)).randrange(2), each=0.02)
    engine.add([3, 4] * 10)
    for _ in range(120):
        engine.step()
    late = engine.drafted
    for _ in range(100):
        engine.step()
    assert engine.drafted - late < 50


@pytest.mark.parametrize("kind", [Lookup, Suffix])
def test_rows_that_move_keep_their_texts(kind):
    """Each draft continues the text of its own row, whatever came and went."""
    engine = Engine(kind, periodic)
    engine.add(PERIOD)
    for step in range(60):
        if step in (8, 12):
            engine.add([40 + step, *PERIOD[step % 3 :], *PERIOD])
        if step in (20, 30):
            engine.drop(0)
        engine.step()
        for text, draft in zip(engine.texts, engine.drafts, strict=True):
            assert draft == [] or draft[0] == periodic(text)
    assert engine.drafted > 30
    assert len(engine.proposer._texts) == 1, "what went is forgotten"


def test_prompts_that_are_still_read_get_no_draft():
    engine = Engine(Lookup, periodic)
    rows = np.zeros((8, LENGTH), dtype=np.int32)
    rows[0, :5], rows[1, :6] = PERIOD, [*PERIOD, 3]
    lengths = np.array([5, 6] + [0] * 6)
    assert engine.proposer.propose([[], [3]], lengths, rows) == [[], []]


def test_no_draft_goes_behind_an_end():
    engine = Engine(Lookup, lambda text: 5)
    engine.add([5] * 30)
    engine.proposer.eos_ids = frozenset({5})
    for _ in range(20):
        engine.step()
        assert all(len(one) <= 1 for one in engine.drafts)
