"""What SPACE drafts: where masks hang, which of them are read, and how what they say becomes candidates."""

from collections import Counter
from dataclasses import replace
from itertools import takewhile

import pytest
import torch

from paceline import Choose, PromptLookup, SamplingParams
from paceline.core.draft import Draft
from paceline.core.interfaces import DraftBudget
from paceline.core.nodes import Tree
from paceline.core.tree import TokenTree
from paceline.core.walk import Walk
from paceline.engine.loop import SpeculativeDecoder
from paceline.methods import Space
from paceline.methods.space import drafter as space
from paceline.methods.space.adapter import SpaceAdapter
from paceline.target import ModelRunner
from paceline.verify import Coupled
from tests.helpers import REPEATING, VOCAB, Budgets, admit, loaded, prompt, run, sequence
from tests.methods.space.common import adapter
from tests.methods.space.foresight import KNOWN, SAMPLED, SHORT, accepted, decreed, errs, future, knows, overfitted

V = VOCAB
FULL = 15
"""Nodes of a chain of three with three masks below each and below the root."""


def bound(given: SpaceAdapter, top_k: int = 1, target=None, says=None, slots: int = 1, **options):
    """A drafter, its runner, and a sequence in slot 0 that has decoded nothing yet."""
    on = decreed(target or loaded(), says or (lambda ids, place: [3 + place % 90, 2]), slots, **options)
    drafter = Space(given, top_k)
    drafter.bind(on, Coupled())
    seq = sequence(on.loaded, REPEATING, SamplingParams(max_tokens=12))
    seq.slot = on.admit(seq.token_ids)
    on.extend_cache(seq.slot, seq.token_ids[:-1])
    return drafter, on, seq


def lists(draft, row: int = 0) -> tuple[list[int], list[int], list[bool]]:
    tree = draft.tree
    return tree.token_ids[row].tolist(), tree.parents[row].tolist(), tree.is_probe[row].tolist()


def test_where_masks_hang():
    """First masks alone; then all candidates, then the masks of root, a, b."""
    drafter, on, seq = bound(adapter(num_masks=3))
    decoder = SpeculativeDecoder(on, drafter, Coupled(), Budgets(depth=2, nodes=8))
    first = drafter.propose([seq], [DraftBudget(2, 8)])
    root = seq.token_ids[-1]
    assert lists(first) == ([root, V, V + 1], [-1, 0, 1], [False, True, True])
    decoder.step([seq])
    root, after = seq.token_ids[-1], len(seq.token_ids)
    draft = drafter.propose([seq], [DraftBudget(2, 8)])
    a, b = 3 + after % 90, 3 + (after + 1) % 90
    assert lists(draft) == (
        [root, a, b, V, V + 1, V, V + 1, V, V + 1],
        [-1, 0, 1, 0, 3, 1, 5, 2, 7],
        [False] * 3 + [True] * 6,
    )
    assert draft.confidence[0, 1:3].min() > 0.9
    assert draft.confidence[0, 3:].isnan().all()
    assert draft.tree.is_chain
    assert drafter.propose([seq], [DraftBudget(0, 0)]).tree.num_nodes == 1
    assert drafter.propose([seq], [DraftBudget(9, 99)]).tree.num_nodes == 3 * 4  # two were predicted, three can be
    assert drafter.propose([seq], [DraftBudget(2, 8, min_probs=[2.0])]).tree.num_nodes == 3
    assert drafter.propose([seq], [DraftBudget(2, 8, should_continue=lambda sure: False)]).tree.num_nodes == 6


def test_a_tree_of_candidates():
    drafter, on, seq = bound(adapter(num_masks=2), top_k=2)
    SpeculativeDecoder(on, drafter, Coupled(), Budgets(depth=2, nodes=8)).step([seq])
    tree = drafter.propose([seq], [DraftBudget(2, 20)]).tree.rows[0]
    tokens, parents, probes = tree.token_ids, tree.parents, tree.is_probe
    after = len(seq.token_ids)
    a, b = 3 + after % 90, 3 + (after + 1) % 90
    second = tokens.index(2, 4)  # the second best child of the root, behind the best child and what is below it
    assert [*zip(tokens[1:4], parents[1:4], strict=True)] == [(a, 0), (b, 1), (2, 1)]
    assert [*zip(tokens[4:7], parents[4:7], strict=True)] == [(2, 0), (b, second), (2, second)]
    assert probes == [False] * 7 + [True] * 14
    for node in range(7):
        group = space.masks_below(tree, node, V)
        assert [tokens[i] for i in group] == [V, V + 1]
        assert [parents[i] for i in group] == [node, group.start]
        assert group.start == 7 + 2 * node


@pytest.mark.parametrize("min_probs", [[0.0], [0.0, 0.0, 0.0, 0.11, 0.2], [0.0, 0.05, 0.05, 0.4], [0.5]])
@pytest.mark.parametrize("nodes", range(1, 24))
def test_candidates_and_masks_share_the_nodes(nodes, min_probs):
    """Against every number of candidates: none more leaves room for the masks that are worth more than the last one."""
    tree, sure = Tree.of([4, 5, 6, 7, 8, 9], [-1, 0, 1, 2, 0, 4]), [0.6, 0.7, 0.1, 0.3, 0.5]
    chance, below = [1.0, 0.6, 0.42, 0.042, 0.3, 0.15], {0: [1, 4], 1: [2], 2: [3], 4: [5]}
    order = [1, 2, 4, 5, 3]

    def masks(kept: list[int]) -> list[tuple[float, int]]:
        """(worth, node) of three masks below each kept node, two of depth 1, one of depth 2."""
        depth = [0, 1, 2, 3, 1, 2]
        ends = {node: chance[node] - sum(chance[c] for c in below.get(node, []) if c in kept) for node in [0, *kept]}
        found = [(space.MASK_WORTH * end, node) for node, end in ends.items() for _ in range(max(0, 3 - depth[node]))]
        return sorted(found, key=lambda one: -one[0])

    def is_worth(worth: float, before: int) -> bool:
        return before < nodes and worth >= min_probs[min(before, len(min_probs) - 1)]

    def fits(n: int) -> bool:
        least = chance[order[n - 1]]
        return is_worth(least, n - 1 + sum(worth >= least for worth, _ in masks(order[:n])))

    kept = sorted(order[: len([*takewhile(fits, range(1, 6))])])
    expected, size = Counter[int](), len(kept)
    for worth, node in masks(kept):
        if is_worth(worth, size) or (node == 0 and size < nodes):
            expected[node] += 1
            size += 1
    made, left = space.with_masks((tree, sure), DraftBudget(3, nodes, min_probs=min_probs), 3, 3, V)
    assert made.part(made.candidates) == tree.part([0, *kept])
    assert left == [sure[node - 1] for node in kept]
    assert [len(space.masks_below(made, node, V)) for node in made.candidates] == [expected[n] for n in (0, *kept)]


@pytest.mark.parametrize(("path", "nodes"), [([], [2, 3, 4]), ([1], [6, 4]), ([1, 5], [4]), ([7], [3, 4])])
def test_where_a_node_has_no_mask_those_above_it_are_read(path, nodes):
    """Root with three masks, its child 1 with one, 5 below 1 and another child 7 with none."""
    drafter, _, seq = bound(adapter(num_masks=3))
    ids, parents = [seq.token_ids[-1], 5, V, V + 1, V + 2, 6, V, 7], [-1, 0, 0, 2, 3, 1, 1, 0]
    tree = TokenTree.from_lists([ids], [parents], probes=[[token >= V for token in ids]])
    logits = torch.arange(8.0)[:, None].expand(8, V)[None]
    drafter.observe([seq], Draft(tree), logits, [Walk(path, 9, True)])
    assert drafter._predicted[seq.slot].logits[:, 0].tolist() == nodes


@pytest.mark.diagonal
@pytest.mark.parametrize("max_tokens", range(1, 9))
@pytest.mark.parametrize("limit", [None, 18])
def test_no_mask_predicts_what_cannot_be_drafted(max_tokens, limit):
    """Below a node of depth t: not more than there is to draft after t tokens and the target's own, less the last."""
    drafter, on, seq = bound(adapter(num_masks=3), max_length=limit)
    seq.params = SamplingParams(max_tokens=max_tokens)
    seq.max_length = limit or seq.max_length
    decoder = SpeculativeDecoder(on, drafter, Coupled(), Budgets(depth=3, nodes=FULL))
    while not seq.is_finished:
        begin, remaining = len(seq.token_ids), seq.remaining
        made, real = [], drafter.propose
        drafter.propose = lambda seqs, budgets, made=made, real=real: made.append(real(seqs, budgets)) or made[-1]
        decoder.step([seq])
        drafter.propose = real
        tree = made[0].tree if made else TokenTree.chain([[0]])
        for node in tree.rows[0].candidates:
            count = len(space.masks_below(tree.rows[0], node, V))
            assert count == max(0, min(3, remaining - 1, remaining - 2 - tree.rows[0].depths[node]))
        assert begin + max(tree.rows[0].depths) <= seq.max_length


# Which masks are read


class Watched:
    """What a drafter proposed, as chains, by the place of their first token."""

    def __init__(self, drafter: Space):
        self.seen: list[tuple[int, list[int]]] = []
        real = drafter.propose

        def propose(seqs, budgets):
            made = real(seqs, budgets)
            for row, seq in enumerate(seqs):
                drafted = made.tree.token_ids[row][~made.tree.is_probe[row]].tolist()[1:]
                self.seen.append((len(seq.token_ids), drafted))
            return made

        drafter.propose = propose


def test_what_is_read_is_for_its_place():
    """After 0, 1, 2 or 3 accepted tokens alike: every candidate is what a mask said of its very place."""
    drafter = Space(adapter(num_masks=3), top_k=1)
    watch = Watched(drafter)
    counts = accepted(decreed(loaded(), errs), drafter, Budgets(depth=3, nodes=FULL))
    assert set(counts) == {0, 1, 2, 3}
    for begin, drafted in watch.seen[2:-2]:
        assert drafted == [errs(tuple(REPEATING), begin + i)[0] for i in range(3)]


def test_masks_below_any_sibling_are_read():
    """With the right token second at times, a tree finds it, and goes on from the masks below it."""
    counts = accepted(decreed(loaded(), errs), Space(adapter(num_masks=3), top_k=2), Budgets(depth=3, nodes=59))
    assert set(counts) == {3}


def test_rows_of_a_batch_read_their_own_masks():
    params = [SAMPLED, SamplingParams(temperature=1.0, max_tokens=30), SamplingParams(temperature=1.0, max_tokens=7)]
    prompts = [REPEATING, prompt(5), prompt(30, 3), prompt(2, 8)]
    on = decreed(loaded(), knows, 3)
    ragged = Budgets(lambda seq: DraftBudget(1 + (len(seq.rounds) + seq.slot) % 3, FULL))
    seqs = [sequence(on.loaded, ids, params[i % 3]) for i, ids in enumerate(prompts)]
    for seq in run(on, Space(adapter(num_masks=3), 1), seqs, policy=ragged):
        assert seq.token_ids == future(tuple(seq.prompt_ids))[: len(seq.token_ids)]
        assert all(r.num_accepted == r.num_drafted for r in seq.rounds)
        assert sum(r.num_drafted for r in seq.rounds) > seq.num_output / 2 - 2


def test_an_adapter_that_knows_the_text_is_accepted():
    """Trained over plain transformers: what the target sees of masks in a tree is what they were trained on."""
    for temperature in (SHORT.temperature, 0.0):
        wish = replace(SHORT, temperature=temperature)
        counts = accepted(ModelRunner(loaded(), 1), Space(overfitted(), 1), Budgets(depth=3, nodes=FULL), wish, KNOWN)
        assert sum(counts) / len(counts) > 2.5 if temperature else sum(counts) / len(counts) < 1
    unknowing = accepted(ModelRunner(loaded(), 1), Space(adapter(), 1), Budgets(depth=3, nodes=FULL), SHORT, KNOWN)
    assert sum(unknowing) / len(unknowing) < 1


class Mutant:
    """`masks_below` of another node, or of the right one but one further."""

    def __init__(self, node=lambda node, parents: node, skip: int = 0):
        self.node, self.skip, self.real = node, skip, space.masks_below

    def __call__(self, tree, node, vocab_size):
        group = self.real(tree, self.node(node, tree.parents), vocab_size)
        return range(group.start + self.skip, group.stop)


MUTANTS = {
    "always the root's": Mutant(lambda node, parents: 0),
    "the parent's": Mutant(lambda node, parents: max(0, parents[node])),
    "the next node's": Mutant(lambda node, parents: node + 1 if node + 1 < len(parents) else node),
    "mask j + 1 for mask j": Mutant(skip=1),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("given", [None, "overfitted"])
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_wrong_groups_are_noticed(mutant, given, monkeypatch):
    """Answers stay right, `accepted` sees to it, but fewer drafts stand. After none the root's group is right."""

    def mean() -> float:
        if given is None:
            on = decreed(loaded(), knows)
            counts = accepted(on, Space(adapter(num_masks=3), 1), Budgets(depth=3, nodes=FULL))
        else:
            on, policy = ModelRunner(loaded(), 1), Budgets(depth=3, nodes=FULL)
            counts = accepted(on, Space(overfitted(), 1), policy, SHORT, KNOWN)
        return sum(counts) / len(counts)

    assert mean() > 2.5
    monkeypatch.setattr(space, "masks_below", mutant)
    assert mean() < 1.8


# What is kept


def test_laws_of_another_round_are_not_used():
    """After a plain round, a round of lookup's, or for another tenant of the slot there is nothing to draft from."""
    drafter, on, seq = bound(adapter(num_masks=3))
    decoder = SpeculativeDecoder(on, drafter, Coupled(), Budgets(depth=2, nodes=8))

    def drafts() -> int:
        count = int((~drafter.propose([seq], [DraftBudget(2, 8)]).tree.is_probe).sum()) - 1
        assert drafter.draft_options(seq)[0].ready == count
        return count

    decoder.step([seq])
    assert drafts() == 2
    decoder.policy = Budgets(depth=0, nodes=0)
    decoder.step([seq])
    assert drafts() == 0
    decoder.policy = Budgets(depth=2, nodes=8)
    decoder.step([seq])
    assert drafts() == 2
    seq.token_ids.append(7)  # moved on behind its back
    assert drafts() == 0
    seq.token_ids.pop()
    drafter.release([0])
    assert drafts() == 0
    both = Choose([PromptLookup(min_ngram=1), drafter])
    arms = iter([1, 0, 1])
    decoder = SpeculativeDecoder(on, both, Coupled(), Budgets(lambda seq: DraftBudget(2, 8, next(arms))))
    decoder.step([seq])
    assert drafts() == 2
    decoder.step([seq])
    assert drafts() == 0
    decoder.step([seq])
    assert drafts() == 2


def test_nothing_is_left_behind():
    drafter = Space(adapter(num_masks=3), 2)
    on = ModelRunner(loaded(), 2)
    decoder = SpeculativeDecoder(on, drafter, Coupled(), Budgets(depth=2, nodes=14))
    seq = sequence(on.loaded, REPEATING, SamplingParams(max_tokens=6))
    admit(decoder, seq)
    for _ in range(2):  # the first token comes with the prompt, without masks
        decoder.step([seq])
    kept = drafter._predicted[seq.slot].logits
    assert kept.shape == (2, V)
    assert kept.untyped_storage().nbytes() == kept.nbytes  # no view of the whole pass
    while not seq.is_finished:
        decoder.step([seq])
    assert not drafter._predicted
    decoder.release(seq)
    seq = sequence(on.loaded, REPEATING, SamplingParams(max_tokens=6))
    admit(decoder, seq)
    decoder.step([seq])
    decoder.release(seq)
    assert not drafter._predicted
