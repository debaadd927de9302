"""What followed the same tokens earlier in the text: against the whole text, with mutants, and where it is off."""

import math

import pytest
import torch

from paceline import Coupled, SamplingParams
from paceline.config import parse
from paceline.core.interfaces import DraftBudget
from paceline.drafters import Eagle
from paceline.drafters.context_ngrams import ContextNgrams, Counts, _Index
from paceline.runner import ModelRunner
from tests.drafters.heads import random_head
from tests.drafters.test_eagle import DTYPES, MASKS, is_right, target
from tests.helpers import sequence

TEXT = [5, 9, 31, 5, 9, 40, 5, 9, 31, 7, 5, 9]


def of(text, temperature=0.0):
    return sequence(target(), list(text), SamplingParams(temperature=temperature, max_tokens=20))


def known(seq, path=(), vocabulary=range(97), banned=()):
    ids = list(vocabulary)
    counts = ContextNgrams(torch.tensor(ids), banned).counts(seq, path)
    return {ids[column]: count for column, count in counts.columns.items()}, counts.others


def test_counts():
    assert known(of(TEXT)) == ({31: 2.0, 40: 1.0}, {})
    assert known(of(TEXT), [31]) == ({5: 1.0, 7: 1.0}, {}), "after a drafted token"
    assert known(of(TEXT), [31, 7, 5]) == ({9: 1.0}, {}), "after drafted tokens alone"
    assert known(of(TEXT), [8]) == known(of([5])) == known(of([5, 9])) == ({}, {})
    assert known(of(TEXT), vocabulary=[40, 5, 7]) == ({40: 1.0}, {31: 2.0}), "what the head cannot draft"
    assert known(of(TEXT), vocabulary=[40, 5, 7], banned=[31]) == ({40: 1.0}, {})


def test_sampled_text_repeats_itself_less():
    assert known(of(TEXT, 0.25)) == ({31: 1.5, 40: 0.75}, {})
    assert known(of(TEXT, 1.0)) == known(of(TEXT, 1.7)) == ({}, {})


def test_texts_that_grow_and_slots_that_are_used_again():
    ngrams, seq, other = ContextNgrams(torch.arange(97)), of(TEXT[:7]), of([9, 5, 9, 5])
    seq.slot, other.slot = 0, 1
    for token in TEXT[7:]:
        ngrams.counts(seq)
        seq.token_ids.append(token)
    assert ngrams.counts(seq).columns == {31: 2.0, 40: 1.0}
    assert ngrams.counts(other).columns == {9: 1.0}
    ngrams.release([0])
    other.slot = 0
    assert ngrams.counts(other).columns == {9: 1.0}


def test_others_take_their_place_among_the_best_tokens():
    best = [7, 8], [math.log(0.5), math.log(0.25)]
    assert Counts({1: 1.0}, {}).complete(*best) == best
    tokens, logps = Counts({1: 1.0}, {40: 2.0}).complete(*best)  # half of all
    assert tokens == [40, 7]
    assert [math.exp(logp) for logp in logps] == pytest.approx([0.5, 0.25])
    tokens, _ = Counts({}, {40: 0.1}).complete(*best)
    assert tokens == [7, 8], "no more than were asked for"


class PathUnread(Eagle):
    """Copies after every node what followed the end of the text."""

    def _counts(self, seq, tree):
        return [self._ngrams.counts(seq) for _ in tree.frontier]


class OthersForgotten(Eagle):
    """What the head cannot draft is not drafted."""

    def _counts(self, seq, tree):
        return [Counts(one.columns, {}) for one in super()._counts(seq, tree)]


class TextsMixed(Eagle):
    """The n-grams of all texts are those of one."""

    def _counts(self, seq, tree):
        self._ngrams._indexes = dict.fromkeys(range(3), self._ngrams._indexes.get(0) or _Index())
        return super()._counts(seq, tree)


@DTYPES
@pytest.mark.parametrize("mutant", [PathUnread, OthersForgotten, TextsMixed])
@pytest.mark.parametrize("masks", [{}, MASKS], ids=["EAGLE", "P-EAGLE"])
def test_mutants_are_caught(mutant, masks, dtype):
    head = random_head(target(dtype), 3, **masks)
    assert is_right(Eagle(head), head)
    assert not is_right(mutant(head), head)


def test_without_them_the_head_alone_decides():
    drafts = []
    for ngrams in (True, False):
        drafter, runner = Eagle(random_head(target(), 3), ngrams=ngrams), ModelRunner(target(), 1)
        drafter.bind(runner, Coupled())
        seq = of([60, 61, 95] * 4)
        seq.slot = runner.admit(seq.token_ids)
        runner.extend_cache(seq.slot, seq.token_ids[:-1])
        drafts.append(drafter.propose([seq], [DraftBudget(3, 3)]).tree.token_ids[0].tolist())
    assert drafts[0] == [95, 60, 61, 95]
    assert drafts[1] != drafts[0]


def test_the_option_in_json():
    given = {"method": "eagle", "model": "smollm2-135m-eagle", "ngrams": False}
    assert parse(given).drafter.ngrams is False
