"""Builds trees of drafted tokens level by level, for one sequence at a time.

A drafter finds the children of the `frontier`, adds them in descending probability, and continues with the next one:

    level 1   root's children          a .6   b .3   c .1        score of a node: log of the product along its path
    level 2   frontier a, b            aa .5  ab .1  ba .2       (.3, .06, .06)
    finish    the best nodes overall   a .6   aa .3   b .3       depth first

A child scores no higher than its parent, and ties go to the shallower, then the earlier node. So the best nodes form a
tree.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from ...core.draft import Draft
from ...core.interfaces import DraftBudget
from ...core.nodes import Tree, path_to
from ...core.request import TokenSequence
from ...core.tree import TokenTree

MC_SIM_7B_63: tuple[tuple[int, ...], ...] = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip
"""EAGLE-1's tree of 25 nodes as paths of ranks: (0, 1) is the second best child of the best child of the root."""

_RANK_PROBS = (0.6, 0.2, 0.1, 0.05)
"""The assumed probability of a child by its rank, which decides what paths of the table a small budget keeps."""


Rerank = Callable[[Sequence[int], Sequence[int], Sequence[float]], tuple[Sequence[int], Sequence[float]]]
"""From a path of drafted tokens, the tokens after it and their log-probabilities to better ones, best first."""


Grown = tuple[Tree, list[float]]
"""A tree, and the drafter's confidence in each node below the root."""


class DynamicTree:
    """The tree of EAGLE-2 (Li et al. 2024, arXiv 2406.16858): expand the best nodes of a level, keep the best of all.

    A node that cannot be among the best `budget.nodes` any more, or is less likely than `budget.min_probs` asks of its
    rank, is neither kept nor expanded: its children score no higher. So a small budget needs few rows. Until `finish`,
    nodes are numbered in the order in which they were added.

    root: the last token of the text, node 0.
    top_k: the most children of a node; 1 makes a chain.
    levels: how many levels the drafter ranks; None for all. Below them `rerank` alone says what may follow.
    width: the most nodes of a level that get children; None for `top_k`. As many as the budget has nodes gives the best
        tree of all where the distribution of a level does not depend on the path (DDTree, arXiv 2604.12989).
    rerank: what else is known about the children of a node, see `context_ngrams`.
    frontier: the nodes whose children are to be added next.
    """

    def __init__(
        self, root: int, budget: DraftBudget, top_k: int, levels: int | None = None, width: int | None = None,
        rerank: Rerank | None = None,
    ):  # fmt: skip
        self.top_k, self.width = top_k, top_k if width is None else width
        self._rerank = rerank
        deepest = min(budget.depth, budget.nodes)
        self.levels = deepest if levels is None else min(deepest, levels)
        self.depth = self.levels if rerank is None else deepest
        self.level, self.frontier = 0, [0] if self.depth > 0 else list[int]()
        self.tokens, self.parents = [root], [-1]
        self.logps, self.scores = [0.0], [0.0]
        self._should_continue = budget.should_continue
        self._first = 1  # of the newest level
        self._best: list[float] = []  # heap of the scores that are kept so far
        least = (budget.min_prob(n) for n in range(max(0, budget.nodes)))
        # What all scores must reach if one more is kept, by the number that is kept.
        self._floors = [math.log(p) if p > 0 else -math.inf for p in least] + [math.inf]

    def add(self, tokens: Sequence[Sequence[int]], logps: Sequence[Sequence[float]]) -> None:
        """Add the children of each node of the frontier, best first, with log-probabilities given their parents.

        Children without a probability (-inf or NaN) are skipped. Then `should_continue` of the budget is called with
        the probabilities along the best path.
        """
        self.level += 1
        self._first = len(self.tokens)
        for place, parent in enumerate(self.frontier):
            children = tokens[place], logps[place]
            if self._rerank is not None:
                children = self._rerank([self.tokens[node] for node in path_to(self.parents, parent)], *children)
            for rank, (token, logp) in enumerate(zip(*children, strict=True)):
                score = self.scores[parent] + logp
                if not score > -math.inf or not self.takes(parent, rank, score):
                    break  # the next ones are even less likely
                self.tokens.append(token)
                self.parents.append(parent)
                self.logps.append(logp)
                self.scores.append(score)
        self.frontier = self.next_frontier() if self.level < self.depth else []
        if self.frontier and self._should_continue is not None and not self._should_continue(self.best_path()):
            self.frontier = []

    def takes(self, parent: int, rank: int, score: float) -> bool:
        """Whether this child is among the best so far. If not, no later sibling is; ties go to earlier nodes."""
        best = self._best
        if rank >= self.top_k:
            return False
        if min([*best[:1], score]) >= self._floors[len(best)]:
            heapq.heappush(best, score)
        elif best and score > best[0]:
            heapq.heapreplace(best, score)
        else:
            return False
        return True

    def next_frontier(self) -> list[int]:
        """The best nodes of the newest level whose children can still be kept."""
        least = self._best[0] if self._best else math.inf
        full = least < self._floors[len(self._best)]
        newest = range(self._first, len(self.tokens))
        able = [n for n in newest if self.scores[n] > least or (self.scores[n] == least and not full)]
        return sorted(able, key=lambda node: -self.scores[node])[: self.width]

    def kept(self) -> list[int]:
        """The best nodes below the root, including all their parents; ties go to the earlier node, not deeper."""
        return sorted(sorted(range(1, len(self.tokens)), key=lambda node: -self.scores[node])[: len(self._best)])

    def best_path(self) -> list[float]:
        """Probabilities along the best path to the newest level, each given its parent; empty if no node was added."""
        node = max(range(self._first, len(self.tokens)), key=lambda index: self.scores[index], default=0)
        return [math.exp(self.logps[on_path]) for on_path in path_to(self.parents, node)]

    def finish(self) -> Grown:
        """The kept nodes depth first, best children first: so the cache need not move those of the likeliest path."""
        kept = [0, *self.kept()]
        best, order, waiting = Tree.of(self.tokens, self.parents).part(kept), list[int](), [0]
        while waiting:
            order.append(node := waiting.pop())
            waiting += reversed(best.children[node])
        return best.part(order), [math.exp(self.logps[kept[node]]) for node in order[1:]]


@final
class StaticTree(DynamicTree):
    """EAGLE-1's tree of fixed shape: the table `MC_SIM_7B_63`, of which a small budget keeps a part.

    It keeps the paths with the highest acceptance probability by rank. They include all parents and earlier siblings,
    which are always more probable.
    """

    def __init__(self, root: int, budget: DraftBudget, levels: int | None = None, rerank: Rerank | None = None):
        super().__init__(root, budget, len(_RANK_PROBS), levels, len(MC_SIM_7B_63), rerank)
        fitting = [path for path in MC_SIM_7B_63 if len(path) <= self.depth]
        fitting.sort(key=lambda path: -math.prod(_RANK_PROBS[rank] for rank in path))
        self._table = set(fitting[: max(0, budget.nodes)])
        self._paths: list[tuple[int, ...]] = [()]

    def takes(self, parent: int, rank: int, score: float) -> bool:
        path = (*self._paths[parent], rank)
        taken = path in self._table and super().takes(parent, rank, score)
        if taken:
            self._paths.append(path)
        return taken

    def next_frontier(self) -> list[int]:
        return [node for node in super().next_frontier() if (*self._paths[node], 0) in self._table]


Children = tuple[Sequence[Sequence[Sequence[int]]], Sequence[Sequence[Sequence[float]]]]
"""Tokens and log-probabilities of the best children: of each row, of each of its parents, best first."""


def grow(trees: Sequence[DynamicTree], children: Callable[[list[int], int], Children]) -> None:
    """Grow the trees of a batch level by level. children: called with the unfinished rows and their level, from 0."""
    while rows := [row for row, tree in enumerate(trees) if tree.frontier and tree.level < tree.levels]:
        for row, tokens, logps in zip(rows, *children(rows, trees[rows[0]].level), strict=True):
            trees[row].add(tokens, logps)
    for tree in trees:
        while tree.frontier:
            tree.add([()] * len(tree.frontier), [()] * len(tree.frontier))


def draft_of(rows: Sequence[Grown], source: str) -> Draft:
    """The draft of a batch."""
    tree = TokenTree.of(tree for tree, _ in rows)
    return Draft(tree, source=source, confidence=padded_confidences([sure for _, sure in rows], tree.num_nodes))


def up_to_end(seq: TokenSequence, tokens: list[int]) -> list[int]:
    """A chain up to the first token that would end the answer."""
    ends = (place for place, token in enumerate(tokens, start=1) if seq.would_end(token, place))
    return tokens[: next(ends, len(tokens))]


def padded_confidences(rows: Sequence[Sequence[float]], num_nodes: int) -> Tensor:
    """Confidences [B, N], NaN at roots and padding."""
    padded = [[math.nan, *row] + [math.nan] * (num_nodes - 1 - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.float32)
