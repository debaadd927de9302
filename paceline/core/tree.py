"""The token tree: one shape for every draft, from a single chain to EAGLE-2's trees and Lookahead's window.

Node 0 is the last committed token, see docs/how_it_works.md, "The tree". Node i is written to the cache column
committed length + i.

A *candidate* is verified and may be accepted. A *probe* is only read: mask tokens of SPACE, Lookahead's window, and
the padding that makes the rows of a batch equally long. Mask j has the token `vocabulary + j`, which no model emits,
and comes after all candidates of its row, so that these have the columns of plain decoding:

    tree            t3 ── a ── m0 ── m1     order   t3 a | m0 m1 | m0 m1     (candidates, masks of t3, masks of a)
                     └─── m0 ── m1          parents -1 0 |  0  2 |  1  4
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..errors import DraftError
from .nodes import Tree


class TreeLists(NamedTuple):
    """The nodes of all trees of a batch, padding included, [B][N]."""

    token_ids: list[list[int]]
    parents: list[list[int]]
    is_probe: list[list[bool]]


@dataclass(frozen=True)
class TokenTree:
    """B trees of N nodes. Made by `of`, `from_lists` or `chain`.

    rows: the tree of each sequence.
    num_nodes: N, the root included; a tree of fewer nodes is padded with probes below its root.
    device: the device of the tensors below.
    """

    rows: list[Tree]
    num_nodes: int
    device: torch.device

    @staticmethod
    def of(rows: Iterable[Tree], device: torch.device | str = "cpu") -> "TokenTree":
        """The batch of these trees, as wide as the largest."""
        rows = [*rows]
        if not rows:
            raise DraftError("a batch has no trees", expected="a tree for each sequence")
        return TokenTree(rows, max(map(len, rows)), torch.device(device))

    @staticmethod
    def from_lists(
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
        probes: Sequence[Sequence[bool]] | None = None,
    ) -> "TokenTree":
        """Trees of unequal sizes, one list per row (root first).

        Raises TypeError for values that are not integers, `DraftError` for lists of different lengths.
        """
        marks = [None] * len(tokens) if probes is None else probes
        if not len(tokens) == len(parents) == len(marks):
            got = [len(tokens), len(parents), len(marks)]
            raise DraftError("the lists of a batch of trees differ in length", got=got, expected="a list for each tree")
        return TokenTree.of(map(Tree.of, tokens, parents, marks), device)

    @staticmethod
    def chain(tokens: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> "TokenTree":
        """One chain per row: `tokens[b]` is the root followed by the drafted tokens (possibly none)."""
        return TokenTree.of(map(Tree.of, tokens), device)

    @cached_property
    def lists(self) -> TreeLists:
        """The tokens, the parents and the probes as lists."""
        rows = [row.padded(self.num_nodes) for row in self.rows]
        return TreeLists([row.token_ids for row in rows], [row.parents for row in rows], [row.is_probe for row in rows])

    @property
    def token_ids(self) -> Int[Tensor, "B N"]:
        """The tokens, as a new tensor."""
        return torch.tensor(self.lists.token_ids, device=self.device)

    @property
    def parents(self) -> Int[Tensor, "B N"]:
        """The parents, as a new tensor."""
        return torch.tensor(self.lists.parents, device=self.device)

    @property
    def is_probe(self) -> Bool[Tensor, "B N"]:
        """The probes, as a new tensor."""
        return torch.tensor(self.lists.is_probe, device=self.device)

    @cached_property
    def ancestor_mask(self) -> Bool[Tensor, "B N N"]:
        """mask[b, i, j] is True iff node j is node i or one of its ancestors."""
        return ancestors(self.parents)

    @cached_property
    def depth(self) -> Int[Tensor, "B N"]:
        """Number of edges to the root; a node's position is committed length + depth."""
        return self.ancestor_mask.sum(-1) - 1

    @property
    def is_chain(self) -> bool:
        """True iff in every row node i's parent is node i - 1, probes apart (they are read, never kept)."""
        return all(row.is_chain for row in self.rows)

    def behind(self, text: Sequence[int]) -> "TokenTree":
        """The tree of one row with a text before its root, as a chain."""
        (row,), count = self.rows, len(text)
        parents = [*range(-1, count - 1), *(up + count for up in row.parents)]
        tree = Tree([*text, *row.token_ids], parents, [False] * count + row.is_probe)
        return replace(self, rows=[tree], num_nodes=count + self.num_nodes)

    def to(self, device: torch.device) -> "TokenTree":
        """The same trees on `device`; itself if they are there."""
        return self if self.device == device else replace(self, device=device)

    def trimmed(self) -> "TokenTree":
        """The same trees without the nodes at the end that are probes in every row; itself where there are none."""
        if any(len(row) == self.num_nodes and not row.is_probe[-1] for row in self.rows):
            return self
        width = max(row.candidates[-1] for row in self.rows) + 1
        rows = [row if len(row) <= width else row.part(range(width)) for row in self.rows]
        return replace(self, rows=rows, num_nodes=width)

    def padded(self, num_nodes: int) -> "TokenTree":
        """The same trees with `num_nodes` nodes, if that is more."""
        return self if num_nodes <= self.num_nodes else replace(self, num_nodes=num_nodes)

    def of_rows(self, rows: Sequence[int]) -> "TokenTree":
        """The trees of these rows alone, as wide as all of them."""
        return replace(self, rows=[self.rows[row] for row in rows])


def ancestors(parents: Int[Tensor, "B N"]) -> Bool[Tensor, "B N N"]:
    """mask[b, i, j] is True iff node j is node i or one of its ancestors; reads nothing back from the device.

    It is the reflexive-transitive closure of the parent relation, by squaring: log2(N) products instead of N steps.
    """
    n = parents.shape[1]
    reach = torch.eye(n, dtype=torch.float32, device=parents.device).repeat(len(parents), 1, 1)
    child, row = parents.clamp(min=0).unsqueeze(-1), (parents >= 0).float().unsqueeze(-1)
    reach.scatter_add_(2, child, row)
    for _ in range(max(1, (n - 1).bit_length())):
        reach = (reach @ reach).clamp_(max=1.0)
    return reach > 0
