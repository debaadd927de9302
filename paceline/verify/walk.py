"""From a token tree to Python lists, and down one path.

       ── 1:a ── 3:c        children of row 0: [[1, 2], [3], [], []]
0:root                      accepting 1 and stopping there:  path [1], the next token is the child of node 1
       ── 2:b               that the target wanted instead of c
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..core.outputs import Walk
from ..core.tree import TokenTree
from ..errors import DraftError


def to_list(values: Tensor) -> list[Any]:
    """The tensor as nested Python lists; waits for the device."""
    return values.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


class Branches(NamedTuple):
    """One row's tree as lists: the token of every node, and its candidate children in drafted order."""

    tokens: list[int]
    children: list[list[int]]

    def child(self, node: int, token: int) -> int | None:
        """The first child of a node that holds this token."""
        for child in self.children[node]:
            if self.tokens[child] == token:
                return child
        return None

    @staticmethod
    def read(tree: TokenTree) -> "list[Branches]":
        """Every row's branches. Errors: DraftError where a candidate does not come after its parent."""
        return [_branches(*row) for row in zip(*tree.lists, strict=True)]


def _branches(tokens: list[int], parents: list[int], probes: list[bool]) -> Branches:
    children: list[list[int]] = [[] for _ in tokens]
    for node in range(1, len(tokens)):
        if probes[node]:
            continue
        if not 0 <= parents[node] < node:
            raise DraftError(
                "a drafted node does not come after its parent", got=f"node {node}, parent {parents[node]}"
            )
        children[parents[node]].append(node)
    return Branches(tokens, children)


Decide = Callable[[int, int, list[int]], tuple[int | None, int]]
"""(node, its depth, its children) -> (the index of the child that stands, -1), or (None, the token instead)."""


def descend(branches: Branches, decide: Decide) -> Walk:
    """Walk from the root until `decide` emits a token of its own. One decision per position, top down."""
    node, path = 0, list[int]()
    while True:
        children = branches.children[node]
        index, token = decide(node, len(path), children)
        if index is None:
            return Walk(path, token, is_bonus=not children)
        node = children[index]
        path.append(node)
