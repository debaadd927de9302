"""A branching tree cut into calls of the attention kernel, each of them on keys laid out as plain decoding has them."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from .kv_cache import BLOCK, round_up


@dataclass(frozen=True)
class Turn:
    """Some nodes of one path, whose attention is one call of the kernel.

    nodes: which of `Branching.order`. column: of the first of them, where plain decoding has it. width: columns read.
    """

    nodes: slice
    column: int
    width: int


@dataclass(frozen=True)
class Branching:
    """A branching tree as its chains, each node computed once; see `branching`.

    order: the nodes as they are computed. place: for each node of the pass where in `order` its result stands.
    """

    order: Tensor
    place: Tensor
    turns: list[Turn]


def branching(start: int, parents: list[int], tokens: list[int], num_nodes: int, device: torch.device) -> Branching:
    """Cut a tree into turns: depth first, and in each turn the keys of one path lie where plain decoding has them.

        0 ── 1 ── 3        columns   start  +1  +2
          └─ 2 ── 4                  0      1   3       turn 1 computes nodes 0, 1, 3
               └─ 5                  0      2   4       turn 2 puts 2 and 4 in their places and computes them
                                     0      2   5       turn 3: node 5

    A turn is cut before a node that begins a block, since that node reads more columns. A leaf that repeats a sibling
    (mostly the padding of a batch) has that one's result; nodes beyond `parents` only pad and have the root's.
    """
    inner, first = set(parents), dict[tuple[int, int], int]()
    paths: list[list[int]] = []
    twin = list(range(len(parents)))
    for node, parent in enumerate(parents):
        paths.append([*paths[parent], node] if node else [0])
        if node not in inner:
            twin[node] = first.setdefault((parent, tokens[node]), node)
    order, turns, before = list[int](), list[Turn](), list[int]()
    for path in sorted(paths[node] for node in range(len(parents)) if node not in inner and twin[node] == node):
        shared = sum(1 for one, other in zip(before, path, strict=False) if one == other)
        edges = [d for d in range(shared + 1, len(path)) if (start + d) % BLOCK == 0]
        for depth, end in itertools.pairwise([shared, *edges, len(path)]):
            nodes = slice(len(order), len(order) + end - depth)
            turns.append(Turn(nodes, start + depth, round_up(start + end)))
            order += path[depth:end]
        before = path
    where = {node: index for index, node in enumerate(order)}
    place = [where[one] for one in twin] + [0] * (num_nodes - len(parents))
    return Branching(torch.tensor(order, device=device), torch.tensor(place, device=device), turns)
