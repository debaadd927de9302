"""A branching tree has the bits of its chains, and of plain decoding, though no prefix is copied for them."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from paceline.core.tree import TokenTree
from paceline.runner import attention, branching
from paceline.runner import layout as layout_module
from paceline.runner.attention import attend
from paceline.runner.layout import PassLayout

CASES = [  # groups, width, committed length: around blocks of 64 columns, short rests of rows, several kernel blocks
    (1, 128, 4090),
    (1, 64, 2045),
    (1, 64, 63),
    (3, 64, 1),
    (3, 64, 60),
    (3, 64, 250),
    (3, 64, 1021),
    (6, 128, 316),
    (8, 64, 640),
]
DTYPES = [torch.float32, torch.bfloat16]
HEADS, SLOTS = 2, 5
PLAIN_ROWS = 2


class Case:
    """Random trees over random keys: one row for each of `slots`, whose committed lengths lie near `start`."""

    def __init__(self, groups: int, width: int, start: int, dtype: torch.dtype, batch: int, seed: int):
        rng, noise = random.Random(seed), torch.Generator().manual_seed(seed)
        self.slots = rng.sample(range(SLOTS), batch)
        self.starts = [max(1, start - rng.randrange(4)) for _ in self.slots]
        self.given = rng.randint(4, 14)
        nodes = self.given + rng.randrange(3)
        parents = [[-1, 0, 0, *(max(0, i - rng.randint(1, 4)) for i in range(3, self.given))] for _ in self.slots]
        tokens = [[rng.randrange(6) for _ in range(self.given)] for _ in self.slots]
        self.tree = TokenTree.from_lists(tokens, parents).padded(nodes)
        columns = layout_module.round_up(start + nodes + 1)
        self.key, self.value = (torch.randn(SLOTS, HEADS, columns, width, generator=noise).to(dtype) for _ in range(2))
        self.query = torch.randn(batch, HEADS * groups, nodes, width, generator=noise).to(dtype)
        for row in range(batch):
            self._same_states_for_twins(row)
        self.scale = width**-0.5

    def _same_states_for_twins(self, row: int) -> None:
        """Nodes with the same path of tokens have the same states, as in a model."""
        parents, seen = self.tree.parents[row].tolist(), {}
        for node in range(self.given):
            path = tuple(int(self.tree.token_ids[row, i]) for i in [0, *self.tree.path_to(row, node)])
            first = seen.setdefault((path, parents[node] < 0), node)
            for states in (self.key, self.value):
                held = states[self.slots[row], :, self.starts[row] :]
                held[:, node] = held[:, first]
            self.query[row, :, node] = self.query[row, :, first]

    def layout(self) -> PassLayout:
        nodes = self.tree.num_nodes
        return PassLayout(self.starts, nodes, self.tree, True, 2, slots=self.slots, num_given=self.given)

    def attended(self, window: int | None) -> torch.Tensor:
        """[B, given, Hq, d]."""
        out = attend(self.query, self.key, self.value, self.layout(), self.scale, window)
        return out[:, : self.given]

    def one_by_one(self, window: int | None) -> torch.Tensor:
        """Each node decoded plainly: its ancestors are cached, and a row of padding shares its pass."""
        rows = []
        for row, (slot, start) in enumerate(zip(self.slots, self.starts, strict=True)):
            for node in range(self.given):
                path = [0, *self.tree.path_to(row, node)]
                key, value = self.key[slot, None].clone(), self.value[slot, None].clone()
                for states, source in ((key, self.key), (value, self.value)):
                    states[0, :, start : start + len(path)] = source[slot][:, [start + i for i in path]]
                alone = TokenTree.chain([[0]]).padded(PLAIN_ROWS)
                at = PassLayout([start + len(path) - 1], PLAIN_ROWS, alone, True, 2, slots=[0], num_given=1)
                query = self.query[row, None][:, :, [node, 0]]
                rows.append(attend(query, key, value, at, self.scale, window)[0, 0])
        return torch.stack(rows).view(len(self.slots), self.given, *rows[0].shape)


def every_case(shapes=CASES):
    for number, (shape, dtype) in enumerate(itertools.product(shapes, DTYPES)):
        yield Case(*shape, dtype, 1 + number % 4, number)


def differs(shapes=CASES) -> bool:
    """Whether a random tree has a node whose bits are not those of plain decoding."""
    return any(not torch.equal(case.attended(None), case.one_by_one(None)) for case in every_case(shapes))


def test_random_trees_have_the_bits_of_plain_decoding():
    assert not differs()


@pytest.mark.parametrize("window", [5, 70])
def test_windows(window):
    for case in every_case(CASES[2:6]):
        assert torch.equal(case.attended(window), case.one_by_one(window))


def test_the_slow_way_says_the_same_and_the_keys_are_put_back():
    for case in every_case():
        before = case.key.clone(), case.value.clone()
        fast = case.attended(None)
        slow = attention._attend_chains(case.query, case.key, case.value, case.layout(), case.scale, None, None, None)
        assert torch.equal(fast, slow[:, : case.given])
        assert torch.equal(case.key, before[0])
        assert torch.equal(case.value, before[1])


def test_each_node_is_computed_once():
    split = branching.branching(62, [-1, 0, 0, 1, 2, 2], [9, 1, 2, 3, 4, 4], 8, torch.device("cpu"))
    assert split.order.tolist() == [0, 1, 3, 2, 4]  # node 5 repeats its sibling 4
    assert split.place.tolist() == [0, 1, 3, 2, 4, 4, 0, 0]  # nodes 6 and 7 only pad
    turns = [(turn.nodes.start, turn.nodes.stop, turn.column, turn.width) for turn in split.turns]
    assert turns == [(0, 2, 62, 64), (2, 3, 64, 128), (3, 4, 63, 64), (4, 5, 64, 128)]


def wrong_columns(monkeypatch) -> None:
    """Keys one column too far on: the right ones in the right order, in other places."""
    right = branching.Turn
    monkeypatch.setattr(branching, "Turn", lambda nodes, column, width: right(nodes, column + 1, width))


def tree_order(monkeypatch) -> None:
    """As with fast numerics: the keys stay where the pass wrote them."""
    right = Case.layout
    monkeypatch.setattr(Case, "layout", lambda case: replace(right(case), canonical=False))


def no_cut(monkeypatch) -> None:
    """A turn that crosses a block is not cut there."""
    monkeypatch.setattr(branching, "BLOCK", 1 << 20)


def no_padding(monkeypatch) -> None:
    """Rests of one to three rows."""
    monkeypatch.setattr(layout_module, "_sound", lambda rows: rows)


def twins_by_token(monkeypatch) -> None:
    """Leaves with the same token are taken for one, whatever their parents."""
    right = layout_module.branching

    def blind(start, parents, tokens, num_nodes, device):
        split = right(start, parents, tokens, num_nodes, device)
        place, inner = split.place.tolist(), set(parents)
        first: dict[int, int] = {}
        for node, token in enumerate(tokens[: len(parents)]):
            if node not in inner:
                place[node] = first.setdefault(token, place[node])
        return branching.Branching(split.order, torch.tensor(place), split.turns)

    monkeypatch.setattr(layout_module, "branching", blind)


@pytest.mark.parametrize("mutant", [wrong_columns, twins_by_token])
def test_mutants_change_bits(monkeypatch, mutant):
    mutant(monkeypatch)
    assert differs(CASES[2:6])


@pytest.mark.parametrize("mutant", [tree_order, no_cut, no_padding])
def test_mutants_change_bits_on_some_machines(monkeypatch, mutant):
    mutant(monkeypatch)
    if not differs():
        pytest.skip("the kernel of this machine does not depend on that")
