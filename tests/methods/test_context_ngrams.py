"""What followed the same tokens earlier in the text: against the whole text, with mutants, and where it is off."""

import math

import pytest

from paceline import Coupled, SamplingParams
from paceline.config import parse
from paceline.core.interfaces import DraftBudget
from paceline.core.nodes import Tree
from paceline.methods import Eagle, Medusa
from paceline.methods.heads.context_ngrams import ContextNgrams, _Index
from paceline.methods.heads.trees import DynamicTree, grow
from paceline.target import ModelRunner
from tests.helpers import sequence
from tests.methods.heads import DTYPES, MASKS, differing, random_head, target, with_copies
from tests.methods.test_heads import medusa

TEXT = [5, 9, 31, 5, 9, 40, 5, 9, 31, 7, 5, 9]
LAW = {31: 0.5, 8: 0.25, 40: 0.125}


def of(text, temperature=0.0):
    return sequence(target(), list(text), SamplingParams(temperature=temperature, max_tokens=20))


def ranked(seq, path=(), law=LAW, banned=(), ngrams=None):
    """The law after this path, best first."""
    rerank = (ngrams or ContextNgrams(banned)).rerank(seq)
    if rerank is None:
        return law
    tokens, logps = rerank(path, list(law), [math.log(p) if p else -math.inf for p in law.values()])
    return dict(zip(tokens, map(math.exp, logps), strict=True))


@pytest.mark.parametrize("path", [[], [31], [31, 7, 5], [8], [5, 9, 31]])
@pytest.mark.parametrize("temperature", [0.0, 0.25, 1.0, 1.7])
def test_the_law_is_that_of_the_whole_text(path, temperature):
    found, want = ranked(of(TEXT, temperature), path), with_copies(LAW, TEXT, path, 1 - temperature)
    assert found == pytest.approx(want)
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_what_followed_counts_beside_the_head():
    found = ranked(of(TEXT))  # 31 came twice, 40 once
    assert list(found) == [31, 40, 8]
    assert found == pytest.approx({31: 2.5 / 4, 40: 1.125 / 4, 8: 0.25 / 4})
    assert ranked(of([5])) == pytest.approx(LAW), "a text of one token"


def test_tokens_that_must_not_be_drafted_are_not_copied():
    assert ranked(of(TEXT), law={8: 1.0}, banned=[31]) == pytest.approx({8: 0.5, 40: 0.5})


def test_children_without_a_probability_are_dropped_or_copied():
    assert ranked(of(TEXT), law={8: 0.0, 40: 0.0}) == pytest.approx({31: 2 / 4, 40: 1 / 4})


@pytest.mark.parametrize("logp", [-744.0, -800.0])
def test_children_whose_probability_is_no_float_are_dropped(logp):
    tokens, logps = ContextNgrams().rerank(of(TEXT))([], [8, 31], [logp, 0.0])
    assert tokens == [31, 40]
    assert logps == pytest.approx([math.log(3 / 4), math.log(1 / 4)])


def test_texts_that_grow_and_slots_that_are_used_again():
    ngrams, seq, other = ContextNgrams(), of(TEXT[:7]), of([9, 5, 9, 5])
    seq.slot, other.slot = 0, 1
    for token in TEXT[7:]:
        ngrams.rerank(seq)
        seq.token_ids.append(token)
    assert ranked(seq, ngrams=ngrams) == ranked(of(TEXT))
    assert ranked(other, law={3: 1.0}, ngrams=ngrams) == pytest.approx({3: 0.5, 9: 0.5})
    ngrams.release([0])
    other.slot = 0
    assert ranked(other, law={3: 1.0}, ngrams=ngrams) == pytest.approx({3: 0.5, 9: 0.5})


def path_unread(self, seq):
    """Copies after every node what followed the end of the text."""
    found = RERANK(self, seq)
    return found and (lambda path, *best: found([], *best))


def texts_mixed(self, seq):
    """The n-grams of all texts are those of one."""
    self._indexes = dict.fromkeys(range(3), self._indexes.get(0) or _Index())
    return RERANK(self, seq)


RERANK = ContextNgrams.rerank


@DTYPES
@pytest.mark.parametrize("mutant", [path_unread, texts_mixed])
@pytest.mark.parametrize("masks", [{}, MASKS], ids=["EAGLE", "P-EAGLE"])
def test_mutants_are_caught(mutant, masks, dtype, monkeypatch):
    head = random_head(target(dtype), 3, **masks)
    assert not differing(Eagle(head), head)
    monkeypatch.setattr(ContextNgrams, "rerank", mutant)
    assert differing(Eagle(head), head)


@pytest.mark.parametrize("make", [lambda **how: Eagle(random_head(target(), 3), **how),
                                  lambda **how: Medusa(medusa(target()), **how)], ids=["EAGLE", "Medusa"])  # fmt: skip
def test_without_them_the_head_alone_decides(make):
    drafts = []
    for ngrams in (True, False):
        drafter, runner = make(ngrams=ngrams), ModelRunner(target(), 1)
        drafter.bind(runner, Coupled())
        seq = of([60, 61, 95] * 4)
        seq.slot = runner.admit(seq.token_ids)
        runner.extend_cache(seq.slot, seq.token_ids[:-1])
        drafts.append(drafter.propose([seq], [DraftBudget(3, 3)]).tree.token_ids[0].tolist())
    assert drafts[0] == [95, 60, 61, 95]
    assert drafts[1] != drafts[0]


@pytest.mark.parametrize("levels", [0, 1, 2, 5])
def test_below_the_levels_of_a_head_trees_go_on_along_copies(levels):
    """After 5 9 came 31 5 9 40 or 31 7 5 9; a head that says 8 at every level is heard as deep as it has levels."""

    def grown(rerank) -> DynamicTree:
        tree = DynamicTree(0, DraftBudget(3, 50), 4, levels, 50, rerank)
        half = [math.log(0.5)]
        grow([tree], lambda rows, level: ([[[8]] * len(tree.frontier)], [[half] * len(tree.frontier)]))
        return tree

    tree = grown(ContextNgrams().rerank(of(TEXT)))
    expected, paths = dict[tuple[int, ...], float](), {(): 1.0}
    for level in range(3):
        law = {8: 0.5} if level < levels else {}
        paths = {
            (*path, token): chance * prob
            for path, chance in paths.items()
            for token, prob in with_copies(law, TEXT, list(path), 1.0).items()
        }
        expected |= paths
    made = Tree.of(tree.tokens, tree.parents)
    found = {tuple(made.tokens_to(node)): math.exp(tree.scores[node]) for node in range(1, len(made))}
    assert found == pytest.approx(expected)
    assert grown(None).level == min(levels, 3)


@pytest.mark.parametrize("method", ["eagle", "medusa", "space"])
def test_the_option_in_json(method):
    given = {"method": method, "model": f"smollm2-135m-{method}", "ngrams": False}
    assert parse(given).drafter.ngrams is False
