"""Trees of a given shape, drawn by a rule: as lists, as tensors, and with the path that leads to every node."""

from dataclasses import dataclass

import numpy as np
import torch
from mutants import Rule
from toy_distributions import PathDistribution

from paceline.core.draft import Draft, Law
from paceline.core.nodes import Tree
from paceline.core.tree import TokenTree
from paceline.core.walk import TargetDistribution
from paceline.verify.rejection import Chance


@dataclass(frozen=True)
class Drafted:
    """Node i is reached by `paths[i]`; every node at one depth has as many children as `shape` says, if q allows."""

    tokens: list[int]
    parents: list[int]
    paths: list[tuple[int, ...]]

    @property
    def tree(self) -> Tree:
        return Tree.of(self.tokens, self.parents)


def draw_tree(
    rule: Rule, q: PathDistribution, shape: tuple[int, ...], prefix: tuple[int, ...], chance: Chance
) -> Drafted:
    tokens, parents, paths, level = [0], [-1], [prefix], [0]
    for width in shape:
        below: list[int] = []
        for node in level:
            for token in rule.propose(q(paths[node]), width, chance):
                below.append(len(tokens))
                tokens.append(token)
                parents.append(node)
                paths.append((*paths[node], token))
        level = below
    return Drafted(tokens, parents, paths)


def tensors(
    rows: list[Drafted], p: PathDistribution, q: PathDistribution, law: Law
) -> tuple[Draft, TargetDistribution]:
    """A batch as the verifiers get it; rows of padding hold NaN, which nobody may read."""
    tree = TokenTree.of(row.tree for row in rows)
    size = len(p(()))
    scores = torch.full((len(rows), tree.num_nodes, size), torch.nan, dtype=torch.float64)
    drawn = scores.clone()
    for index, row in enumerate(rows):
        scores[index, : len(row.paths)] = torch.tensor(np.stack([p(path).astype(float) for path in row.paths])).log()
        drawn[index, : len(row.paths)] = torch.tensor(np.stack([q(path).astype(float) for path in row.paths]))
    target = TargetDistribution(scores, [False] * len(rows))
    return Draft(tree, law, None if law is Law.POINT_MASS else drawn), target


def emitted(row: Drafted, path: list[int], next_token: int) -> tuple[int, ...]:
    return (*(row.tokens[node] for node in path), next_token)
