"""Token recycling against the paper's algorithm in plain dictionaries, and what it must leave alone."""

import pytest
import torch

from paceline import Coupled, Fixed, Ratio, SamplingParams, TokenRecycling
from paceline.core.interfaces import DraftBudget
from paceline.engine.loop import SpeculativeDecoder
from paceline.target import ModelRunner
from tests.helpers import VOCAB, generate, loaded, memoryless, oracle, prompt, result, run, runner, sequence

PARAMS = [SamplingParams(temperature=t, max_tokens=20) for t in (0.0, 0.8, 1.5)]
KEPT = 8


class Replay(TokenRecycling):
    """Beside the drafter: what the paper keeps, as {token: its best successors}."""

    def __init__(self):
        super().__init__()
        self.kept: dict[int, list[int]] = {}
        self.faults = 0

    @property
    def matrix(self):
        return self.successors.of_tenant("")

    def propose(self, seqs, budgets):
        draft = super().propose(seqs, budgets)
        for tokens, parents, probes in zip(*draft.tree.lists, strict=True):
            used = [node for node in range(1, len(tokens)) if not probes[node]]
            self.faults += sum(tokens[node] not in self.kept.get(tokens[parents[node]], ()) for node in used)
        return draft

    def observe(self, seqs, draft, logits, walks):
        super().observe(seqs, draft, logits, walks)
        tree = draft.tree
        for row, walk in enumerate(walks):
            nodes = [node for node in range(tree.num_nodes) if not tree.lists.is_probe[row][node]]
            for node in [*nodes, 0, *walk.path]:
                best = logits[row, node].float().argsort(descending=True, stable=True)
                self.kept[tree.lists.token_ids[row][node]] = best[:KEPT].tolist()
        for token in range(VOCAB):
            self.faults += self._below(self.matrix, token) != self.kept.get(token, [-1] * KEPT)


class OfTheNextNode(Replay):
    """The successors of a token are filed under the node before it."""

    def observe(self, seqs, draft, logits, walks):
        shifted = logits.roll(1, dims=1)
        TokenRecycling.observe(self, seqs, draft, shifted, walks)
        kept = self.matrix.clone()
        super().observe(seqs, draft, logits, walks)
        self.matrix.copy_(kept)


class AcceptedOnly(Replay):
    """Rejected tokens teach nothing."""

    def observe(self, seqs, draft, logits, walks):
        before = self.matrix.clone()
        super().observe(seqs, draft, logits, walks)
        for seq, walk, tokens in zip(seqs, walks, draft.tree.lists.token_ids, strict=True):
            rejected = {*tokens} - {tokens[node] for node in (0, *walk.path)} - {*seq.token_ids}
            self.matrix[list(rejected)] = before[list(rejected)]
        self.faults += any(
            self._below(self.matrix, token) != self.kept.get(token, [-1] * KEPT) for token in range(VOCAB)
        )


def faults(drafter: Replay, dtype=torch.float32, slots: int = 3) -> int:
    target = loaded("llama", dtype)
    decoder = SpeculativeDecoder(ModelRunner(target, slots), drafter, Coupled(), Fixed(4, 20))
    for _ in generate(decoder, [sequence(target, prompt(9, row), one) for row, one in enumerate(PARAMS)]):
        pass
    assert drafter.kept
    return drafter.faults


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("slots", [1, 3])
def test_it_keeps_what_the_paper_keeps(slots, dtype):
    assert faults(Replay(), dtype, slots) == 0


@pytest.mark.parametrize("mutant", [OfTheNextNode, AcceptedOnly])
def test_mutants_keep_something_else(mutant):
    assert faults(mutant()) > 0


@pytest.mark.parametrize("verifier", [Coupled, Ratio])
def test_a_model_without_memory_is_predicted(verifier):
    """Its next token depends on the last one alone, so a greedy answer that returns to a token repeats itself."""
    target, drafter = memoryless(eps=1e-30), TokenRecycling()
    params = SamplingParams(max_tokens=60)
    seq = sequence(target, prompt(5), params)
    run(ModelRunner(target, 1), drafter, [seq], 4, 20, verifier())
    assert result(seq) == result(oracle(target, prompt(5), params))
    again = sequence(target, prompt(5), params)  # what one request taught serves the next
    run(ModelRunner(target, 1), drafter_of(drafter, target), [again], 4, 20, verifier())
    assert again.output_ids == seq.output_ids
    assert [r.num_accepted for r in again.rounds[1:-1]] == [4] * (len(again.rounds) - 2)
    assert len(again.rounds) < len(seq.rounds) <= 60


def drafter_of(known: TokenRecycling, target) -> TokenRecycling:
    """A drafter for another runner, with the same matrix."""
    made = TokenRecycling()
    made.bind = lambda *_: setattr(made, "successors", known.successors)
    return made


def filled(banned: frozenset[int] = frozenset(), last: int = 0) -> TokenRecycling:
    """Every token is followed by the next eight numbers; nothing is known of tokens above 60."""
    drafter = TokenRecycling()
    drafter.bind(runner(loaded()), Coupled())
    drafter.banned_token_ids = banned
    drafter.successors.of_tenant("")[:60] = torch.arange(60)[:, None] + 1 + torch.arange(KEPT)
    return drafter


def tree(drafter: TokenRecycling, budget: DraftBudget, last: int = 7, eos_ids=frozenset()) -> list[tuple[int, ...]]:
    """The drafted paths."""
    drafted = drafter.propose([sequence(loaded(), [5, last], PARAMS[0], eos_ids=eos_ids)], [budget]).tree.lists
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(drafted.token_ids[0][1:], drafted.parents[0][1:], strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def test_the_tree_grows_with_the_budget_best_nodes_first():
    drafter, whole = filled(), tree(filled(), DraftBudget(6, 200))
    assert len(whole) == len(set(whole)) == 80
    assert max(map(len, whole)) == 6
    for nodes in range(81):
        assert tree(drafter, DraftBudget(6, nodes)) == whole[:nodes]
    for depth in range(7):
        assert tree(drafter, DraftBudget(depth, 200)) == [path for path in whole if len(path) <= depth]
    assert whole[0] == (8,)
    assert tree(drafter, DraftBudget(3, 3, min_probs=[0.05])) == [(8,), (8, 9), (9,)]
    assert max(map(len, tree(drafter, DraftBudget(6, 200, should_continue=lambda path: len(path) < 2)))) == 2


def test_nothing_is_drafted_below_what_is_unknown_banned_or_an_end():
    budget = DraftBudget(6, 200)
    assert tree(filled(), budget, last=70) == []
    assert all(path[:-1] == () or path[-2] < 60 for path in tree(filled(), budget, last=55))
    assert not any(9 in path for path in tree(filled(frozenset({9})), budget))
    ending = tree(filled(), budget, eos_ids=frozenset({8}))
    assert (8,) in ending
    assert not any(8 in path[:-1] for path in ending)


def test_hints_tell_whether_there_is_a_draft():
    drafter = filled()
    for last, hint in ((7, 0), (70, -1)):
        assert drafter.draft_options(sequence(loaded(), [last], PARAMS[0]))[0].hint == hint


def test_rows_differ_and_some_draft_nothing():
    seqs = [sequence(loaded(), [5, last], PARAMS[0]) for last in (7, 70, 30)]
    made = filled().propose(seqs, [DraftBudget(4, 9), DraftBudget(4, 9), DraftBudget(0, 0)])
    sizes = [row.count(False) for row in made.tree.lists.is_probe]
    assert sizes == [10, 1, 1]
