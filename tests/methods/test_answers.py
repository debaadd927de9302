"""Suffix decoding from earlier answers against a slow dictionary; what fades, what one answer can do, what is kept."""

from collections import Counter
from random import Random

import pytest
import torch

from paceline import Suffix
from paceline.config import parse
from paceline.core.interfaces import DraftBudget
from paceline.core.request import SamplingParams
from paceline.core.walk import Walk
from paceline.errors import ConfigError
from paceline.methods.suffix.answers import HALF_LIFE, SHORTEST, Answers, WeightedAutomaton
from paceline.methods.suffix.automaton import TOP_K
from tests.helpers import loaded, sequence
from tests.methods.test_suffix import nodes_of

LONGEST = 4
"""Tokens of the longest context in the comparison with the oracle."""


class Slow:
    """The oracle: every context of every answer with what followed it, weights faded at every answer.

    counts: how often each context with a follower occurred, repetitions too.
    """

    def __init__(self):
        self.weights: dict[tuple[int, ...], dict[int, float]] = {}
        self.counts = Counter[tuple[int, ...]]()

    def add(self, answer: list[int]) -> None:
        for followers in self.weights.values():
            followers.update({token: weight * 0.5 ** (1 / HALF_LIFE) for token, weight in followers.items()})
        places = [(i, j) for j in range(len(answer)) for i in range(max(0, j - LONGEST), j)]
        self.counts.update(tuple(answer[i : j + 1]) for i, j in places)
        for context, token in {(tuple(answer[i:j]), answer[j]) for i, j in places}:
            followers = self.weights.setdefault(context, {})
            followers[token] = followers.get(token, 0.0) + 1

    def reject(self, tokens: list[int]) -> None:
        """Also in a longer context, if the longest that occurs never did without it."""
        known = [part for i in range(len(tokens) - 1) if (part := tuple(tokens[i:])) in self.counts]
        longer = [part for part in self.counts if part[-len(known[0]) :] == known[0]]
        for part in {*known, *(part for part in longer if self.counts[part] == self.counts[known[0]])}:
            followers = self.weights[part[:-1]]
            followers[part[-1]] = max(0.0, followers[part[-1]] - 1)

    def after(self, tokens: list[int]) -> tuple[int, dict[int, float]]:
        for n in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            followers = self.weights.get(tuple(tokens[-n:]), {})
            if left := {token: weight for token, weight in followers.items() if weight > 0}:
                return n, left
        return 0, {}


def disagreements(kind: type[WeightedAutomaton], seed: int) -> int:
    """How often contexts or weights differ along random answers, some of which are drafted from and rejected."""
    rng, fast, slow, wrong = Random(seed), kind(LONGEST), Slow(), 0
    for now in range(1, 40):
        text = rng.choices(range(2 + seed % 3), k=rng.randrange(1, 14))
        fast.now = now
        fast.add(text)
        slow.add(text)
        for _ in range(8):
            tokens = rng.choices(range(2 + seed % 3), k=rng.randrange(1, 8))
            length, expected = slow.after(tokens)
            context = fast.context(tokens)
            total, found = fast.following(context) if context.length else (0.0, [])
            wrong += context.length != length or dict(found) != pytest.approx(expected)
            wrong += total != pytest.approx(sum(expected.values()))
            if found and not wrong and rng.random() < 0.3:
                token = rng.choice(found)[0]
                fast.reject([*tokens, token])
                slow.reject([*tokens[-LONGEST:], token])
    return wrong


@pytest.mark.parametrize("seed", range(6))
def test_contexts_and_weights_are_those_of_a_dictionary(seed):
    assert not disagreements(WeightedAutomaton, seed)


class NeverFades(WeightedAutomaton):
    def _weight(self, state):
        return self._counts[state]


class CountsRepeats(WeightedAutomaton):
    """An answer counts as often as it says something."""

    def _count(self, at):
        while at > 0:
            self._counts[at], self._newest[at] = self._weight(at) + 1, self.now
            at = self._links[at]


class RejectsTheLongest(WeightedAutomaton):
    """Shorter contexts go on as if nothing had been rejected."""

    def reject(self, tokens):
        at, _ = self._match(tokens[-self.longest - 1 :])
        self._counts[at], self._newest[at] = max(0.0, self._weight(at) - 1), self.now


class GoesOnBeyondTheEnd(WeightedAutomaton):
    def add(self, tokens):
        for token in tokens:
            self.append(token)


class DraftsTheRejected(WeightedAutomaton):
    """A continuation of no weight keeps its context alive."""

    def _goes_on(self, state):
        return bool(self._edges[state])


MUTANTS = [NeverFades, CountsRepeats, RejectsTheLongest, GoesOnBeyondTheEnd, DraftsTheRejected]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_dictionary_finds_mutants(mutant):
    assert any(disagreements(mutant, seed) for seed in range(6))


# A drafter that keeps answers

QUESTION = [5, 9, 31]
RIGHT, WRONG = [40, 41, 42, 43, 44, 45], [40, 41, 60, 61, 62, 63]
BUDGET = DraftBudget(3, 3)


def params(tenant: str = "", **extra) -> SamplingParams:
    return SamplingParams(max_tokens=64, extra_args={**extra, **({"cache_salt": tenant} if tenant else {})})


def answer(drafter: Suffix, tokens: list[int], asked: SamplingParams | None = None, question=QUESTION) -> list[int]:
    """Let a request be answered by these tokens; returns how many of each round's drafted nodes were rejected."""
    asked = asked or params()
    seq, rejected = sequence(loaded(), question, asked, slot=0), list[int]()
    while not seq.is_finished:
        made = drafter.propose([seq], [BUDGET])
        tree, path = made.tree.rows[0], list[int]()
        left = tokens[seq.num_output :]
        while len(path) < len(left) and (child := tree.child(path[-1] if path else 0, left[len(path)])) is not None:
            path.append(child)
        seq.token_ids += left[: len(path) + 1]
        seq.finish_reason = "stop" if seq.num_output == len(tokens) else None
        rejected.append(len(tree) - 1 - len(path))
        drafter.observe([seq], made, torch.empty(0), [Walk(path, [*left, -1][len(path)], False)])
    drafter.release([0])
    return rejected


def drafted(drafter: Suffix, text: list[int], asked: SamplingParams | None = None) -> dict[tuple[int, ...], float]:
    seq = sequence(loaded(), text, asked or params(), slot=0)
    made = nodes_of(drafter.propose([seq], [DraftBudget(4, 8)]))
    drafter.release([0])
    return made


def keeping(num_tokens: int = 2000) -> Suffix:
    return Suffix(answers=num_tokens)


def test_an_answer_is_drafted_from_the_first_token_when_it_is_asked_for_again():
    drafter = keeping()
    assert drafted(drafter, QUESTION) == {}
    answer(drafter, RIGHT)
    assert [*drafted(drafter, QUESTION)] == [tuple(RIGHT[: n + 1]) for n in range(4)]
    seq = sequence(loaded(), QUESTION, params(), slot=0)
    (offer,) = drafter.draft_options(seq)
    assert offer.hint == 16 + 3  # a class of its own
    assert drafted(drafter, QUESTION)[tuple(RIGHT[:1])] == pytest.approx(1 / (1 + 1 / 3))


def test_what_is_not_repeated_fades_and_its_odds_with_it():
    drafter, odds = keeping(100_000), list[float]()
    answer(drafter, RIGHT)
    for seed in range(2 * HALF_LIFE):
        odds.append(drafted(drafter, QUESTION)[tuple(RIGHT[:1])])
        answer(drafter, Random(seed).choices(range(70, 90), k=5), question=[7, 8, 20 + seed])
    assert odds == sorted(odds, reverse=True)
    assert odds[HALF_LIFE] == pytest.approx(0.5 / (0.5 + 1 / 3))


def test_one_answer_full_of_a_wrong_continuation_is_undone_by_one_rejection():
    drafter = keeping(100_000)
    for _ in range(3):
        answer(drafter, RIGHT)
    answer(drafter, WRONG * 8)  # as often as it likes
    assert sum(answer(drafter, RIGHT)) <= 2  # it was drafted beside the right one, or before
    assert sum(answer(drafter, RIGHT)) == 0
    assert max(drafted(drafter, [*QUESTION, *RIGHT[:2]]).items(), key=lambda item: item[1])[0][0] == RIGHT[2]


@pytest.mark.parametrize("times", [1, 5, 200])
def test_however_often_it_was_wrong_the_draft_returns(times):
    """Its weight is bounded, and each rejection takes 1 of it; the right answer is kept at its end."""
    drafter, most = keeping(100_000), 1 / (1 - 0.5 ** (1 / HALF_LIFE))
    for _ in range(times):
        answer(drafter, [*WRONG, 1])
    wrong = [sum(answer(drafter, RIGHT)) for _ in range(round(most) + 4)]
    assert wrong[-1] == 0
    assert sum(rejections > 0 for rejections in wrong) <= min(times, most) + 2


def test_a_mutant_that_forgets_rejections_stays_poisoned(monkeypatch):
    monkeypatch.setattr(WeightedAutomaton, "reject", lambda self, tokens: None)
    drafter = keeping(100_000)
    for _ in range(20):
        answer(drafter, [*WRONG, 1])
    assert all(sum(answer(drafter, RIGHT)) for _ in range(5))


# Tenants


def traces(drafter: Suffix, others: bool) -> list[object]:
    """What B is drafted, with and without the traffic of A, who says the same and other things."""
    found, rng, noise = list[object](), Random(0), Random(1)
    for number in range(12):
        said = rng.choices([RIGHT, WRONG], k=1)[0] + [number % 3 + 50]
        if others:
            answer(drafter, noise.choice([said, WRONG]), params("A"))
            answer(drafter, RIGHT[::-1], params())
        found.append(answer(drafter, said, params("B")))
        found.append(drafted(drafter, [*QUESTION, *RIGHT[:2]], params("B")))
    return found


def test_a_tenant_is_drafted_the_same_whatever_others_are_answered():
    assert traces(keeping(), others=True) == traces(keeping(), others=False)


def test_a_shared_corpus_is_caught(monkeypatch):
    monkeypatch.setattr(SamplingParams, "tenant", "")
    assert traces(keeping(), others=True) != traces(keeping(), others=False)


def test_a_private_request_reads_its_tenants_answers_and_leaves_nothing():
    drafter, private = keeping(), params("A", store=False)
    answer(drafter, RIGHT, params("A"))
    before = drafted(drafter, QUESTION, params("A"))
    assert before == drafted(drafter, QUESTION, private)
    assert drafted(drafter, QUESTION, params("B", store=False)) == {}
    assert sum(answer(drafter, WRONG, private))  # what it rejects keeps its weight, too
    assert drafted(drafter, QUESTION, params("A")) == before


def test_memory_is_bounded_by_age():
    kept = Answers(400)
    for number in range(100):
        kept.add([number, *range(200, 230)])
        assert sum(half.num_tokens for half in kept.halves) <= 400
        newest = kept.halves[0].context([number, 200])
        assert newest.length == 2
        assert any(half.context([max(0, number - 5), 200]).length for half in kept.halves)
    assert not any(half.context([50, 200]).length for half in kept.halves)
    kept.add([*range(300, 700)])  # its end
    assert sum(half.num_tokens for half in kept.halves) <= 400
    assert kept.halves[0].context([690, 691]).length == 2


def test_tenants_beyond_the_most_are_forgotten(monkeypatch):
    monkeypatch.setattr("paceline.methods.tenants.MOST_TENANTS", 3)
    drafter = keeping()
    for tenant in "ABCD":
        answer(drafter, RIGHT, params(tenant))
    assert [bool(drafted(drafter, QUESTION, params(tenant))) for tenant in "BCD"] == [True] * 3
    assert not drafted(drafter, QUESTION, params("A"))


def test_names_and_refusals():
    assert parse("suffix:answers=5000").drafter.as_dict() == {"corpus": None, "answers": 5000}
    assert parse({"method": "suffix", "answers": 5000}).drafter.name == "suffix:answers=5000"
    with pytest.raises(ConfigError, match="answers"):
        parse("suffix:answers=3")
    with pytest.raises(ConfigError, match="no answers that it could keep"):
        parse("model:some/model,inner_drafter=suffix:answers=5000").drafter.build()
    for name, value in (("cache_salt", ""), ("cache_salt", 3), ("store", 0)):
        with pytest.raises(ConfigError, match=name):
            SamplingParams(extra_args={name: value})


def test_children_are_few():
    made = WeightedAutomaton()
    for made.now in range(1, 3 * TOP_K):
        made.add([5, 6, 100 + made.now])
    total, found = made.following(made.context([5, 6]))
    assert [token for token, _ in found] == [100 + made.now - n for n in range(TOP_K)]
    assert total > sum(weight for _, weight in found)
