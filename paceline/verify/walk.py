"""A token tree as Python lists, the walk down one path, and p and q at the nodes it visits."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.nn import functional

from ..core.draft import Draft
from ..core.tree import TokenTree
from ..core.walk import TargetDistribution, Walk
from ..errors import DraftError


def to_list(values: Tensor) -> list[Any]:
    """The tensor as nested Python lists; waits for the device."""
    return values.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


class Branches(NamedTuple):
    """One row's tree as lists: the token of every node, and its candidate children in drafted order."""

    tokens: list[int]
    children: list[list[int]]

    def child(self, node: int, token: int) -> int | None:
        for child in self.children[node]:
            if self.tokens[child] == token:
                return child
        return None

    @staticmethod
    def read(tree: TokenTree) -> "list[Branches]":
        rows = list[Branches]()
        for tokens, parents, probes in zip(*tree.lists, strict=True):
            children: list[list[int]] = [[] for _ in tokens]
            for node in range(1, len(tokens)):
                if not probes[node]:
                    children[parents[node]].append(node)
            rows.append(Branches(tokens, children))
        return rows


Decide = Callable[[int, int, list[int]], tuple[int | None, int]]
"""(node, its depth, its children) -> (the accepted child, any token), or (None, the token instead)."""


def descend(branches: Branches, decide: Decide) -> Walk:
    """Walk from the root until `decide` emits a token of its own. One decision per position, top down."""
    node, path = 0, list[int]()
    while True:
        child, token = decide(node, len(path), branches.children[node])
        if child is None:
            return Walk(path, token, is_bonus=not branches.children[node])
        path.append(node := child)


def p_at(distribution: TargetDistribution, row: int, node: int) -> Float64[Tensor, " V"] | None:
    """The target's distribution after a node; None where the scores give none."""
    scores = distribution.at([row], [node])[0]
    if not bool(scores.max().isfinite()):  # NaN passes through max
        return None
    if distribution.is_greedy[row]:
        return functional.one_hot(scores.argmax(), len(scores)).double().cpu()
    return torch.softmax(scores.double(), dim=-1).cpu()


def q_at(draft: Draft, row: int, node: int) -> Float64[Tensor, " V"]:
    """The distribution of a node's children, renormalised, since rows in half precision only sum to about 1.

    Errors: DraftError where the row is not a distribution.
    """
    assert draft.q is not None
    q = draft.q[row, node].double().cpu()
    mass = float(q.sum())
    if not (abs(mass - 1) < 0.01 and float(q.min()) >= 0):
        raise DraftError(
            f"q of drafter {draft.source!r} is not a distribution at node {node}",
            got=f"sum {mass:.6g}, least {float(q.min()):.6g}",
            expected="probabilities that sum to 1",
            fix="pass softmax(logits), with the temperature and the filters the tokens were drawn with",
        )
    return q / mass
