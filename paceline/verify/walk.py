"""The walk down one path of a tree, and p and q at the nodes it visits."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.nn import functional

from ..core.draft import Draft
from ..core.nodes import Tree
from ..core.walk import TargetDistribution, Walk
from ..errors import DraftError


def to_list(values: Tensor) -> list[Any]:
    """The tensor as nested Python lists; waits for the device."""
    return values.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


Decide = Callable[[int, int, list[int]], tuple[int | None, int]]
"""(node, its depth, its children) -> (the accepted child, any token), or (None, the token instead)."""


def descend(tree: Tree, decide: Decide) -> Walk:
    """Walk from the root until `decide` emits a token of its own. One decision per position, top down."""
    node, path = 0, list[int]()
    while True:
        child, token = decide(node, len(path), tree.children[node])
        if child is None:
            return Walk(path, token, is_bonus=not tree.children[node])
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
