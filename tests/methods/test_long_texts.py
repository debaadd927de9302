"""Matching over a whole text costs the same for each further token, however long the text is: counted, not timed."""

import sys
from random import Random

import pytest

from paceline import PromptLookup, SamplingParams, Suffix
from paceline.core.interfaces import DraftBudget, Drafter
from paceline.methods.draft_window import DraftWindow
from paceline.methods.heads.context_ngrams import ContextNgrams
from tests.helpers import loaded, sequence

ROUNDS = 50


class Window:
    """`DraftWindow` as far as it is asked in a round."""

    def __init__(self):
        self._window = DraftWindow(64)

    def ask(self, seq):
        self._window.follow([seq])
        self._window.spans(0, len(seq.token_ids) - 1)


class Asked:
    """A drafter asked in a round."""

    def __init__(self, drafter: Drafter):
        self._drafter = drafter

    def ask(self, seq):
        self._drafter.draft_options(seq)
        self._drafter.propose([seq], [DraftBudget(6, 6)])


class Searches:
    """What searches the whole text for each token."""

    def ask(self, seq):
        end = seq.token_ids[-2:]
        for place in range(len(seq.token_ids) - 2):
            if seq.token_ids[place : place + 2] == end:
                return


class Ngrams:
    """The counts beside heads."""

    def __init__(self):
        self._ngrams = ContextNgrams()

    def ask(self, seq):
        self._ngrams.rerank(seq)


def lines(make, length: int) -> int:
    """How many lines of Python a round takes behind a text of this length, in the mean of `ROUNDS`."""
    rng, asked, count = Random(length), make(), 0
    phrases = [[rng.randrange(3, 97) for _ in range(rng.randrange(3, 9))] for _ in range(40)]
    text = [token for _ in range(length) for token in rng.choice(phrases)][:length]
    seq = sequence(loaded(), text, SamplingParams(0.0), max_length=1 << 20, slot=0)
    asked.ask(seq)

    def tracer(frame, event, _):
        nonlocal count
        count += event == "line"
        return tracer

    before = sys.gettrace()
    for _ in range(ROUNDS):
        seq.token_ids.append(rng.choice(phrases)[0])
        sys.settrace(tracer)
        try:
            asked.ask(seq)
        finally:
            sys.settrace(before)
    return count // ROUNDS


MAKERS = {
    "lookup": lambda: Asked(PromptLookup()),
    "first": lambda: Asked(PromptLookup(match="first")),
    "suffix": lambda: Asked(Suffix()),
    "ngrams": Ngrams,
    "window": Window,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_token_takes_no_longer_in_a_long_text(make):
    short, long = lines(make, 500), lines(make, 8000)
    assert long < 1.5 * short + 20


def test_a_search_is_told():
    assert lines(Searches, 8000) > 1.5 * lines(Searches, 500) + 20
