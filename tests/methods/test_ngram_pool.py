"""The pool of n-grams against lists that are searched from end to end, and its bound."""

import random

import pytest

from paceline import SamplingParams
from paceline.core.request import TokenSequence
from paceline.methods.ngram_pool import NgramPool, add_branches


class Slow:
    """All n-grams in one list, the newest last."""

    def __init__(self, guesses: int, size: int):
        self.guesses, self.size, self.grams = guesses, size, list[tuple[int, ...]]()

    def add(self, gram: tuple[int, ...]) -> None:
        self.grams = [one for one in self.grams if one != gram] + [gram]
        same = [one for one in self.grams if one[0] == gram[0]]
        if len(same) > self.guesses:
            self.grams.remove(same[0])
        if len(self.grams) > self.size:  # the token that came up longest ago loses its oldest
            first = min({one[0] for one in self.grams}, key=lambda token: max(self.places(token)))
            self.grams.pop(self.places(first)[0])

    def places(self, first: int) -> list[int]:
        return [place for place, one in enumerate(self.grams) if one[0] == first]

    def after(self, token: int) -> list[tuple[int, ...]]:
        return [one[1:] for one in reversed(self.grams) if one[0] == token]


class NoRefresh(NgramPool):
    """What is seen again keeps its age."""

    def add(self, tokens):
        if tuple(tokens[1:]) not in self.after(tokens[0]):
            super().add(tokens)


class Unbounded(NgramPool):
    """The bound of a token alone."""

    def __init__(self, ngram, guesses, size):
        super().__init__(ngram, guesses, 1 << 20)


def agrees(kind: type[NgramPool], guesses: int, size: int) -> bool:
    rng, pool, slow = random.Random(0), kind(3, guesses, size), Slow(guesses, size)
    for _ in range(400):
        gram = tuple(rng.choices(range(4), k=3))
        pool.add(gram)
        slow.add(gram)
        if len(pool) != len(slow.grams) or any(pool.after(token) != slow.after(token) for token in range(4)):
            return False
    return len(pool) <= size


@pytest.mark.parametrize(("guesses", "size"), [(1, 2), (3, 5), (4, 100), (16, 10)])
def test_it_holds_the_newest(guesses, size):
    assert agrees(NgramPool, guesses, size)


@pytest.mark.parametrize("mutant", [NoRefresh, Unbounded])
def test_mutants_are_caught(mutant):
    assert not agrees(mutant, 3, 5)


def test_a_long_text_fills_no_more_than_the_bound():
    pool, text = NgramPool(3, 8, 50), random.Random(0).choices(range(1000), k=10_000)
    assert pool.read(text, 0) == len(text) - 2
    assert len(pool) == 50
    assert pool.after(text[-3])[0] == (text[-2], text[-1])
    assert pool.read(text, len(text) - 2) == len(text) - 2
    assert pool.read([1, 2], 0) == 0


def test_a_banned_token_is_not_kept():
    pool = NgramPool(3, 4, 10, frozenset({7}))
    assert pool.read([1, 2, 7, 3, 4, 5], 0) == 4
    assert len(pool) == 1
    assert pool.after(3) == [(4, 5)]


def branches(phrases, depth, nodes, stem=(), eos_ids=frozenset()):
    seq = TokenSequence([9], SamplingParams(), 0, eos_ids, 100)
    ids, parents = [9, *stem], list(range(-1, len(stem)))
    add_branches(ids, parents, phrases, seq, len(ids), depth - len(stem), nodes)
    return ids, parents


def test_what_begins_alike_is_added_once():
    assert branches([(1, 2, 3), (1, 2, 4), (5, 2)], 3, 9) == ([9, 1, 2, 3, 4, 5, 2], [-1, 0, 1, 2, 2, 0, 5])
    assert branches([(3, 4), (3, 5)], 4, 9, (1, 2)) == ([9, 1, 2, 3, 4, 5], [-1, 0, 1, 2, 3, 3])


def test_branches_keep_to_the_budget_and_stop_at_the_end():
    assert branches([(1, 2, 3), (4, 5, 6)], 2, 3) == ([9, 1, 2, 4], [-1, 0, 1, 0])
    assert branches([(3, 4)], 2, 9, (1, 2)) == ([9, 1, 2], [-1, 0, 1])
    assert branches([(1, 2, 3), (1, 4)], 3, 9, (), frozenset({2})) == ([9, 1, 2, 4], [-1, 0, 1, 1])
