"""Trees of drafted tokens, grown level by level or from marginals: no model, plain lists, one sequence at a time.

A drafter asks for the children of the `frontier`, hands them over likeliest first, and takes the next frontier:

    level 1   root's children          a .6   b .3   c .1        score of a node: log of the product along its path
    level 2   frontier a, b            aa .5  ab .1  ba .2       (.3, .06, .06)
    finish    the best nodes overall   a .6   b .3   aa .3       parents before children

A child scores no higher than its parent, and a tie goes to the shallower, then the earlier: what is kept is a tree.
"""

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor

from ..core.draft import Draft
from ..core.interfaces import DraftBudget
from ..core.request import Sequence as TextSequence
from ..core.tree import TokenTree

Continue: TypeAlias = Callable[[Sequence[float]], bool]

MC_SIM_7B_63: tuple[tuple[int, ...], ...] = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip
"""EAGLE-1's tree of 25 nodes as paths of ranks: (0, 1) is the second likeliest child of the likeliest child."""

_OF_RANK = (0.6, 0.2, 0.1, 0.05)
"""Assumed chance of a child by its rank: which paths of a table stay when the budget is smaller than the table."""


@dataclass(frozen=True)
class DraftTree:
    """The nodes below one root: a parent is counted from 1 in the order of the lists, the root is 0."""

    tokens: list[int]
    parents: list[int]
    confidences: list[float]

    @property
    def depth(self) -> int:
        """Length of the longest path."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return max(depths)


def draft_of(seqs: Sequence[TextSequence], trees: Mapping[int, DraftTree], source: str) -> Draft:
    """The draft of a batch. `trees` are by row; rows without one get the root alone."""
    rows = [trees.get(row, DraftTree([], [], [])) for row in range(len(seqs))]
    tokens = [[seq.token_ids[-1], *row.tokens] for seq, row in zip(seqs, rows, strict=True)]
    tree = TokenTree.from_lists(tokens, [[-1, *row.parents] for row in rows])
    return Draft(tree, source=source, confidence=padded_confidences([row.confidences for row in rows], tree.num_nodes))


def padded_confidences(rows: Sequence[Sequence[float]], num_nodes: int) -> Tensor:
    """Confidences [B, N], NaN at roots and padding."""
    padded = [[math.nan, *row] + [math.nan] * (num_nodes - 1 - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.float32)


class TreeBuilder(ABC):
    """A tree that is being built. Nodes are numbered from 0 in the order of their arrival; -1 is the root.

    frontier: the nodes whose children are wanted next.
    min_prob: the smallest probability of a kept node.
    should_continue: see `DraftBudget`. It is called after each level with the probabilities along the best path.
    """

    def __init__(self, depth: int, min_prob: float, should_continue: Continue | None = None):
        self.should_continue = should_continue
        self.depth, self.level, self.frontier = depth, 0, [-1] if depth > 0 else list[int]()
        self.tokens, self.parents = list[int](), list[int]()
        self.logps, self.scores, self.depths = list[float](), list[float](), list[int]()
        self._floor = math.log(min_prob) if min_prob > 0 else -math.inf
        self._newest: list[int] = []

    def add(self, tokens: Sequence[Sequence[int]], logps: Sequence[Sequence[float]]) -> None:
        """The children of each node of the frontier, likeliest first, and log-probabilities given their parents.

        Children of no probability, NaN included, are passed over.
        """
        self.level += 1
        self._newest = []
        for place, parent in enumerate(self.frontier):
            above = self.scores[parent] if parent >= 0 else 0.0
            for rank, logp in enumerate(logps[place]):
                score = above + logp
                if not (score > -math.inf and score >= self._floor) or not self.takes(parent, rank, score):
                    break  # the next ones are even less likely
                self._newest.append(len(self.tokens))
                self.tokens.append(tokens[place][rank])
                self.parents.append(parent)
                self.logps.append(logp)
                self.scores.append(score)
                self.depths.append(self.level)
        self.frontier = self.next_frontier(self._newest) if self.level < self.depth else []
        if self.frontier and self.should_continue is not None and not self.should_continue(self.best_path()):
            self.frontier = []

    @abstractmethod
    def takes(self, parent: int, rank: int, score: float) -> bool:
        """Whether this child may be kept; if not, neither may its later siblings."""

    @abstractmethod
    def next_frontier(self, newest: list[int]) -> list[int]:
        """Which of the newest nodes may have children that are kept."""

    def kept(self) -> list[int]:
        """Nodes of the finished tree, in the order they came."""
        return list(range(len(self.tokens)))

    def best_path(self) -> list[float]:
        """Probabilities along the likeliest path to the newest level, given each parent; empty if nothing came."""
        path: list[float] = []
        node = max(self._newest, key=lambda index: self.scores[index], default=-1)
        while node >= 0:
            path.append(math.exp(self.logps[node]))
            node = self.parents[node]
        return path[::-1]

    def finish(self) -> DraftTree:
        """The finished tree."""
        kept = self.kept()
        place = {node: index + 1 for index, node in enumerate(kept)} | {-1: 0}
        return DraftTree(
            [self.tokens[node] for node in kept],
            [place[self.parents[node]] for node in kept],
            [math.exp(self.logps[node]) for node in kept],
        )


@final
class DynamicTree(TreeBuilder):
    """The tree of EAGLE-2 (Li et al. 2024, arXiv 2406.16858): expand the best `top_k` of a level, keep the best nodes.

    What cannot be among the best `nodes` any more is neither kept nor expanded: a node's children score no higher than
    itself, so a small budget feeds few rows. top_k 1: a chain.
    """

    def __init__(
        self, depth: int, nodes: int, top_k: int, min_prob: float = 0.0, should_continue: Continue | None = None
    ):
        super().__init__(depth if nodes > 0 else 0, min_prob, should_continue)
        self.nodes, self.top_k = nodes, top_k
        self._best: list[float] = []  # heap of the best `nodes` scores so far

    def takes(self, parent: int, rank: int, score: float) -> bool:
        """Among the best so far; a tie goes to what came earlier."""
        if rank >= self.top_k:
            return False
        if len(self._best) < self.nodes:
            heapq.heappush(self._best, score)
        elif score > self._best[0]:
            heapq.heapreplace(self._best, score)
        else:
            return False
        return True

    def next_frontier(self, newest: list[int]) -> list[int]:
        """The best of the level that leave room for a child: fewer than `nodes` others score at least as high."""
        full = len(self._best) == self.nodes
        able = [node for node in newest if not full or self.scores[node] > self._best[0]]
        return sorted(able, key=lambda node: -self.scores[node])[: self.top_k]

    def kept(self) -> list[int]:
        """The best `nodes`; on a tie the one that came earlier, which is the shallower. Closed under parents."""
        return sorted(sorted(range(len(self.tokens)), key=lambda node: -self.scores[node])[: self.nodes])


@final
class StaticTree(TreeBuilder):
    """A tree of fixed shape, as EAGLE-1 has it: `table` says which ranks below which (see `cut`)."""

    def __init__(
        self,
        depth: int,
        table: Sequence[tuple[int, ...]],
        min_prob: float = 0.0,
        should_continue: Continue | None = None,
    ):
        super().__init__(depth if table else 0, min_prob, should_continue)
        self._table, self._inner = set(table), {path[:-1] for path in table}
        self._paths: list[tuple[int, ...]] = []

    def takes(self, parent: int, rank: int, score: float) -> bool:
        """Iff the table has this path."""
        path = (*(self._paths[parent] if parent >= 0 else ()), rank)
        if path in self._table:
            self._paths.append(path)
            return True
        return False

    def next_frontier(self, newest: list[int]) -> list[int]:
        """Those that have children in the table."""
        return [node for node in newest if self._paths[node] in self._inner]


def cut(table: Sequence[tuple[int, ...]], depth: int, nodes: int) -> list[tuple[int, ...]]:
    """The part of a table that fits a budget: the paths most likely to be accepted, if rank alone decided.

    Closed under parents and earlier siblings, since those are always likelier.
    """
    fitting = [path for path in table if len(path) <= depth]
    return sorted(fitting, key=lambda path: -math.prod(_OF_RANK[min(r, 3)] * 0.9 ** max(0, r - 3) for r in path))[
        : max(0, nodes)
    ]


def from_marginals(
    logp: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]], nodes: int, min_prob: float = 0.0
) -> DraftTree:
    """The best tree of `nodes` nodes where the distribution of a depth does not depend on the path.

    DDTree (arXiv 2604.12989): it maximises the expected number of accepted tokens under the product of the
    distributions, in O(nodes log nodes). Ties go to the shallower, then the earlier.

        pop (S, parent, d, r)    push the sibling  (S - logp[d][r] + logp[d][r + 1], parent, d, r + 1)
                                 push the child    (S + logp[d + 1][0],              node,   d + 1, 0)

    logp, tokens: the top tokens of each depth, best first, and their log-probabilities, [D, k].
    """
    made = DraftTree([], [], [])
    floor = math.log(min_prob) if min_prob > 0 else -math.inf
    heap: list[tuple[float, int, int, int, float]] = []  # (-score, depth, parent, rank, score of the parent)

    def push(above: float, depth: int, parent: int, rank: int) -> None:
        if depth < len(logp) and rank < len(logp[depth]):
            score = above + logp[depth][rank]
            if score > -math.inf and score >= floor:
                heapq.heappush(heap, (-score, depth, parent, rank, above))

    push(0.0, 0, 0, 0)
    while heap and len(made.tokens) < nodes:
        minus, depth, parent, rank, above = heapq.heappop(heap)
        made.tokens.append(tokens[depth][rank])
        made.parents.append(parent)
        made.confidences.append(math.exp(logp[depth][rank]))
        push(above, depth, parent, rank + 1)
        push(-minus, depth + 1, len(made.tokens), 0)
    return made


def best_of_marginals(
    tokens: Sequence[Sequence[int]], logp: Sequence[Sequence[float]], depth: int, budget: DraftBudget
) -> DraftTree:
    """`from_marginals` within a budget: no deeper than `depth` and where it stops the path of likeliest tokens."""
    path: list[float] = []
    for logps in logp[:depth]:
        path.append(math.exp(logps[0]))
        if len(path) < depth and budget.should_continue is not None and not budget.should_continue(path):
            break
    return from_marginals(logp[: len(path)], tokens[: len(path)], budget.nodes, budget.min_prob)
