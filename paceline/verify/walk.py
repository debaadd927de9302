"""From a token tree to Python lists, down one path, and back to a verdict.

       ── 1:a ── 3:c        children of row 0: [[1, 2], [3], [], []]
0:root                      accepting 1 and stopping there:  path [1], the next token is the child of node 1
       ── 2:b               that the target wanted instead of c
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ..core.outputs import VerifyOutput
from ..core.tree import TokenTree
from ..errors import DraftError


def to_list(values: Tensor) -> list[Any]:
    """The tensor as nested Python lists; waits for the device."""
    return values.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


@dataclass(frozen=True)
class Branches:
    """One row's tree as lists: the token of every node, and its candidate children in drafted order."""

    tokens: list[int]
    children: list[list[int]]

    @staticmethod
    def read(tree: TokenTree, *columns: Int[Tensor, "B N"]) -> "tuple[list[Branches], list[list[list[int]]]]":
        """Every row's branches, and the `columns` as lists: all in one copy from the device.

        Errors: DraftError where a candidate does not come after its parent.
        """
        fields = [tree.token_ids, tree.parents, tree.is_probe.long(), *columns]
        tokens, parents, probes, *rest = to_list(torch.stack([field.long() for field in fields]))
        return [_branches(*row) for row in zip(tokens, parents, probes, strict=True)], rest


def _branches(tokens: list[int], parents: list[int], probes: list[int]) -> Branches:
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


@dataclass(frozen=True)
class Walk:
    """One row's way down: the accepted nodes, then the target's own token."""

    path: list[int]
    next_token: int  # -1: the last node of the path has no law
    is_bonus: bool  # stopped where nothing more was drafted


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


def verdict(walks: Sequence[Walk], device: torch.device) -> VerifyOutput:
    """The walks of a batch as tensors, paths padded with -1 to the longest."""
    counts = [len(walk.path) for walk in walks]
    longest = max(counts, default=0)
    table = [
        [count, walk.next_token, int(walk.is_bonus), *walk.path, *[-1] * (longest - count)]
        for count, walk in zip(counts, walks, strict=True)
    ]
    packed = torch.tensor(table, dtype=torch.long, device=device).reshape(len(table), 3 + longest)
    return VerifyOutput(packed[:, 3:], packed[:, 0], packed[:, 1], packed[:, 2].bool())
