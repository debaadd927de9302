"""Suffix decoding against a search of the whole text, and what it must not hold or draft."""

from collections import Counter
from fractions import Fraction
from itertools import product
from random import Random

import pytest
import torch

from paceline import CostModel, Coupled, Suffix
from paceline.core.draft import Draft
from paceline.core.interfaces import DraftBudget
from paceline.core.request import SamplingParams
from paceline.methods.suffix.automaton import MAX_CONTEXT, TOP_K, Context, SuffixAutomaton
from tests.helpers import NO_EOS, loaded, sequence
from tests.policy.simulator import Member, simulate

PARAMS = SamplingParams(max_tokens=64)
SHORT = 5
"""Tokens of the longest context here, so that small texts have longer repeats."""


def texts() -> list[list[int]]:
    """Random texts over small alphabets, copies of their own parts, runs, periods and Fibonacci's word."""
    made = [[chance.randrange(2 + seed % 3) for _ in range(30)] for seed in range(8) for chance in [Random(seed)]]
    made += [one[:20] + one[3:15] + one[8:14] for one in made[2:6]]
    word, longer = [0], [0, 1]
    while len(longer) < 34:
        word, longer = longer, longer + word
    return [*made, longer, [7] * 25, [1, 2, 3] * 8, [1, *[0] * 20, 1, 0, 0], [4], []]


def followers(text: list[int], path: list[int], longest: int = SHORT) -> tuple[int, Counter[int]]:
    """The oracle: how long an end of text and path occurs in the text with a token after it, and how often each did."""
    whole = text + path
    for n in range(min(longest, len(whole)), 0, -1):
        starts = [i for i in range(len(text) - n) if text[i : i + n] == whole[len(whole) - n :]]
        if starts:
            return n, Counter(text[i + n] for i in starts)
    return 0, Counter()


def chances(text: list[int], path: list[int], longest: int = SHORT) -> dict[int, Fraction]:
    """Of every token that may come next: c / (n + 1 / L)."""
    length, found = followers(text, path, longest)
    return {token: count / (found.total() + Fraction(1, length)) for token, count in found.items()}


def best_nodes(text: list[int], depth: int, nodes: int) -> list[Fraction]:
    """The probabilities of the most probable paths, by trying all of them."""
    level, found = {(): Fraction(1)}, list[Fraction]()
    for _ in range(depth):
        level = {
            (*path, token): chance * own
            for path, chance in level.items()
            for token, own in chances(text, list(path), MAX_CONTEXT).items()
        }
        found += level.values()
    return sorted(found, reverse=True)[:nodes]


def automaton_of(text: list[int], kind: type[SuffixAutomaton] = SuffixAutomaton) -> SuffixAutomaton:
    made = kind(SHORT)
    for token in text:
        made.append(token)
    return made


def differences(kind: type[SuffixAutomaton]) -> list[object]:
    """Where contexts or counts differ from the oracle's, after every token and along every path of up to three."""
    wrong = list[object]()
    for text in texts():
        for end in (*range(len(text) % 4, len(text), 4), len(text)):
            automaton = automaton_of(text[:end], kind)
            walk = {(): automaton.context()}
            for path, context in walk.copy().items():
                _compare(automaton, text[:end], list(path), context, wrong)
            for depth in (1, 2):
                for path in product(range(4), repeat=depth):
                    above = walk.get(path[:-1])
                    if above is None or path[-1] not in dict(automaton.following(above)[1]) or not above.length:
                        continue
                    walk[path] = automaton.step(above, path[-1])
                    _compare(automaton, text[:end], list(path), walk[path], wrong)
    return wrong


def _compare(automaton, text, path, context, wrong) -> None:
    length, expected = followers(text, path)
    total, found = automaton.following(context) if context.length else (0, [])
    if (context.length, total, dict(found)) != (length, expected.total(), dict(expected)):
        wrong.append((text, path))


def test_contexts_and_counts_are_those_of_a_search():
    assert not differences(SuffixAutomaton)


class NeverSplits(SuffixAutomaton):
    """Takes parts that end at different places for one."""

    def _split(self, at: int, token: int) -> int:
        return self._edges[at][token]


class ForgetsCounts(SuffixAutomaton):
    """A split begins to count anew."""

    def _split(self, at: int, token: int) -> int:
        states = len(self._edges)
        found = super()._split(at, token)
        if len(self._edges) > states:
            self._counts[found] = 0
        return found


class KeepsLong(SuffixAutomaton):
    """Never shortens a context to `longest`."""

    def _of_length(self, state: int, length: int) -> int:
        return state


class EndsWithText(SuffixAutomaton):
    """Has no shorter context where the text ends."""

    def context(self) -> Context:
        return Context(self._whole, min(self.num_tokens, self.longest))


@pytest.mark.parametrize("mutant", [NeverSplits, ForgetsCounts, KeepsLong, EndsWithText])
def test_the_search_finds_mutants(mutant):
    try:
        found = differences(mutant)
    except (KeyError, IndexError):
        return
    assert found


def draft(drafter: Suffix, text: list[int], budget: DraftBudget, slot: int = 0, eos_ids=NO_EOS) -> Draft:
    seq = sequence(loaded(), text, PARAMS, eos_ids=eos_ids, slot=slot)
    return drafter.propose([seq], [budget])


def nodes_of(made: Draft) -> dict[tuple[int, ...], float]:
    """Each drafted path and the confidence of its last token."""
    assert made.confidence is not None
    paths, found = [()], dict[tuple[int, ...], float]()
    ids, parents = made.tree.token_ids[0].tolist(), made.tree.parents[0].tolist()
    for node in range(1, made.tree.num_nodes):
        paths.append((*paths[parents[node]], ids[node]))
        assert paths[-1] not in found
        found[paths[-1]] = made.confidence[0, node].item()
    return found


@pytest.mark.parametrize("nodes", [1, 3, TOP_K])
def test_the_most_probable_nodes_are_drafted(nodes):
    for text in texts():
        if text:
            found = nodes_of(draft(Suffix(), text, DraftBudget(4, nodes)))
            for path, confidence in found.items():
                expected = chances(text, list(path[:-1]), MAX_CONTEXT)[path[-1]]
                assert confidence == pytest.approx(float(expected))
            products = [torch.tensor([found[path[: i + 1]] for i in range(len(path))]).prod() for path in found]
            best = [float(one) for one in best_nodes(text, 4, nodes)]
            assert sorted(map(float, products), reverse=True) == pytest.approx(best)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], [4, 8, 3]),  # the newer of equals first, then what follows it
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 1, 2], [3]),  # twice against once; then 8 or 9
        ([1, 2, 3, 4], []),
        ([7], []),
        ([5, 5], [5, 5, 5]),  # a copy that runs into its own start goes on periodically
        ([3, 4, 3, 4], [3, 4, 3]),
        ([6, 1, 2, 3, 7, 2, 3, 8, 1, 2, 3], [7, 2, 3]),  # three tokens tell more than two
    ],
)
def test_the_first_nodes(tokens, expected):
    ids = draft(Suffix(), tokens, DraftBudget(3, 3)).tree.token_ids[0].tolist()
    assert ids[: 1 + len(expected)] == [tokens[-1], *expected]
    assert len(ids) == 1 or expected


def test_drafting_after_every_token_equals_a_fresh_drafter():
    grown = Suffix()
    for text in texts():
        for end in range(1, len(text) + 1):
            one, other = (draft(each, text[:end], DraftBudget(4, 8)) for each in (grown, Suffix()))
            assert one.tree.lists == other.tree.lists
            assert one.hints == other.hints
        grown.release([0])  # else the next text would be drafted from this one


def test_rows_have_their_own_texts_and_hints():
    seqs = [sequence(loaded(), ids, PARAMS) for ids in ([1, 2, 3, 1, 2], [4, 4], [1, 2, 3])]
    for slot, seq in enumerate(seqs):
        seq.slot = slot
    drafter = Suffix()
    made = drafter.propose(seqs, [DraftBudget(2, 2), DraftBudget(0, 0), DraftBudget(2, 2)])
    assert made.hints == (2, 1, -1)
    assert [one.hint for seq in seqs for one in drafter.draft_options(seq)] == [2, 1, -1]
    assert made.tree.lists.is_probe == [[False] * 3, [False, True, True], [False, True, True]]
    drafter.release([0, 1, 2, 9])
    assert nodes_of(draft(drafter, [1, 2, 9, 1], DraftBudget(1, 1))) == {(2,): pytest.approx(0.5)}


def test_an_improbable_path_is_not_drafted():
    text = [1, 2, 3, 4, 5, 6, 7, 1]  # one token matches: the path of d tokens has the probability 1 / (1 + d)
    assert len(nodes_of(draft(Suffix(), text, DraftBudget(6, 6, min_probs=[0.24])))) == 3
    seen = list[list[float]]()
    stopped = draft(
        Suffix(), text, DraftBudget(6, 6, should_continue=lambda path: seen.append([*path]) or len(path) < 2)
    )
    assert len(nodes_of(stopped)) == 2
    assert seen[-1] == pytest.approx([1 / 2, 2 / 3])


def test_nothing_follows_an_end_or_a_banned_token():
    text = [5, 9, 31, 7, 2, 11, 12, 13, 5, 9, 31]
    budget = DraftBudget(6, 6)
    assert [*nodes_of(draft(Suffix(), text, budget, eos_ids=frozenset([2])))] == [(7,), (7, 2)]
    drafter = Suffix()

    class Sees:
        banned_token_ids = frozenset([2])

    drafter.bind(Sees(), Coupled())  # pyright: ignore[reportArgumentType]
    assert [*nodes_of(draft(drafter, text, budget))] == [(7,)]


def test_memory_is_bounded():
    for text in [*texts(), [0] * 400, [0, *[1] * 300], [*range(300)]]:
        automaton = automaton_of(text)
        assert len(automaton._edges) <= 2 * len(text) + 1
        assert sum(map(len, automaton._edges)) <= 3 * len(text)


def test_after_short_matches_the_policy_takes_another_member():
    """Acceptance is learnt by the hint, so that short matches are tried now and then, and long ones are taken."""

    def hint(request: int, position: int) -> int:
        return 8 if position // 20 % 2 else 1

    def chance(request: int, position: int, i: int) -> float:
        return 0.95 if hint(request, position) == 8 else 0.15

    members = [Member("suffix", chance, hint=hint), Member("head", lambda request, position, i: 0.7, token=0.001)]
    outcome = simulate(lambda clock: CostModel(clock=clock), members, requests=8)
    drafted = Counter((one.source, one.hint) for request, one in outcome.rounds if request > 1 and one.num_drafted)
    assert drafted["suffix", 8] > 2 * drafted["suffix", 1]
    assert drafted["head", 0] > 5 * drafted["suffix", 1]
