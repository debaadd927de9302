"""The token tree: one shape for every draft, from a single chain to EAGLE-2's trees and Lookahead's window.

Node 0 is the last committed token, see docs/how_it_works.md, "The tree". Node i is written to the cache column
committed length + i.

A *candidate* is verified and may be accepted. A *probe* is only read: mask tokens of SPACE, Lookahead's window, and
the padding that makes the rows of a batch equally long. Mask j has the token `vocabulary + j`, which no model emits,
and comes after all candidates of its row, so that these have the columns of plain decoding:

    tree            t3 ── a ── m0 ── m1     order   t3 a | m0 m1 | m0 m1     (candidates, masks of t3, masks of a)
                     └─── m0 ── m1          parents -1 0 |  0  2 |  1  4
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import index
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..errors import DraftError


class TreeLists(NamedTuple):
    """The data of trees as nested lists [B][N]; never modified."""

    token_ids: list[list[int]]
    parents: list[list[int]]
    is_probe: list[list[bool]]


@dataclass(frozen=True)
class TokenTree:
    """B trees of N nodes; a parent always precedes its child. Made by `from_lists` or `chain`.

    lists: the token of each node; the index of its parent, -1 at the root (node 0); whether it is a probe, which is
        never accepted and has no candidate below it.
    sizes: the number of nodes of each tree without padding.
    device: the device of the tensors below.
    """

    lists: TreeLists
    sizes: list[int]
    device: torch.device

    @staticmethod
    def from_lists(
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
        probes: Sequence[Sequence[bool]] | None = None,
    ) -> "TokenTree":
        """Trees of unequal sizes, one list per row (root first), padded with probes to the longest.

        Raises TypeError for values that are not integers, `DraftError` for lists of different lengths.
        """
        sizes = [len(row) for row in tokens]
        marks = [[False] * size for size in sizes] if probes is None else probes
        if not any(sizes) or not sizes == [len(row) for row in parents] == [len(row) for row in marks]:
            raise DraftError("the lists of a tree differ in length", got=sizes, expected="a parent for each token")
        ids = [[*map(index, row)] for row in tokens]
        ups = [[*map(index, row)] for row in parents]
        made = TokenTree(TreeLists(ids, ups, [[*map(bool, row)] for row in marks]), sizes, torch.device(device))
        return made.padded(max(sizes))

    @staticmethod
    def chain(tokens: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> "TokenTree":
        """One chain per row: `tokens[b]` is the root followed by the drafted tokens (possibly none)."""
        return TokenTree.from_lists(tokens, [range(-1, len(row) - 1) for row in tokens], device)

    @property
    def num_nodes(self) -> int:
        """N, the root included."""
        return len(self.lists.token_ids[0])

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

    @cached_property
    def is_chain(self) -> bool:
        """True iff in every row node i's parent is node i - 1, probes apart (they are read, never kept)."""
        rows = zip(self.lists.parents, self.lists.is_probe, strict=True)
        return all(up == node - 1 or probe for row in rows for node, (up, probe) in enumerate(zip(*row, strict=True)))

    def path_to(self, row: int, node: int) -> list[int]:
        """Node indices from below the root down to `node`; empty for the root itself."""
        path, parents = list[int](), self.lists.parents[row]
        while node > 0:
            path.append(node)
            node = parents[node]
        return path[::-1]

    def part(self, row: int, nodes: Sequence[int]) -> tuple[list[int], list[int], list[bool]]:
        """Tokens, parents and marks of some nodes of a row, in this order; the parent of each must be among them."""
        place = {node: index for index, node in enumerate(nodes)} | {-1: -1}
        ids, ups, probes = self.lists.token_ids[row], self.lists.parents[row], self.lists.is_probe[row]
        return [ids[node] for node in nodes], [place[ups[node]] for node in nodes], [probes[node] for node in nodes]

    def behind(self, text: Sequence[int]) -> "TokenTree":
        """The tree of one row with a text before its root, as a chain."""
        count, (ids, ups, probes) = len(text), self.lists
        parents = [*range(-1, count - 1), *(up + count for up in ups[0])]
        return self._of([count + self.sizes[0]], [[*text, *ids[0]]], [parents], [[False] * count + probes[0]])

    def to(self, device: torch.device) -> "TokenTree":
        """The same trees on `device`; itself if they are there."""
        return self if self.device == device else replace(self, device=device)

    def trimmed(self) -> "TokenTree":
        """The same trees without the nodes at the end that are probes in every row; itself where there are none."""
        width = self.num_nodes
        while width > 1 and all(row[width - 1] for row in self.lists.is_probe):
            width -= 1
        if width == self.num_nodes:
            return self
        return self._of([min(size, width) for size in self.sizes], *([row[:width] for row in of] for of in self.lists))

    def padded(self, num_nodes: int) -> "TokenTree":
        """The same trees with probes added under the root until each has `num_nodes` nodes."""
        missing = [num_nodes - len(row) for row in self.lists.token_ids]
        if max(missing) <= 0:
            return self
        fillers = zip(self.lists, (0, 0, True), strict=True)
        return self._of(
            self.sizes,
            *([row + [filler] * more for row, more in zip(rows, missing, strict=True)] for rows, filler in fillers),
        )

    def of_rows(self, rows: Sequence[int]) -> "TokenTree":
        """The trees of these rows alone, as wide as all of them."""
        return self._of([self.sizes[row] for row in rows], *([of[row] for row in rows] for of in self.lists))

    def _of(self, sizes: list[int], *lists: Any) -> "TokenTree":
        return TokenTree(TreeLists(*lists), sizes, self.device)


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
