"""The token tree: one shape for every draft, from a single chain to EAGLE-2's trees and Lookahead's window.

Knows nothing about models, laws or caches. Node 0 is the last committed token: its key and value are not cached yet,
so the target's pass over the tree computes them together with those of the drafted tokens.

    tokens so far   t0 t1 t2 t3          committed length (cached) = 3, root = t3
    tree            t3 ── a ── b         parents = [-1, 0, 1, 0, 3]
                     └─── c ── d         depth   = [ 0, 1, 2, 1, 2]   position = 3 + depth
    cache columns   3:t3 4:a 5:b 6:c 7:d (node i is written at committed length + i)

A *candidate* is verified and may be accepted. A *probe* is only read: mask tokens of SPACE, Lookahead's window, and
the padding that makes the rows of a batch equally long. Mask j has the token `vocabulary + j`, which no model emits,
and comes after all candidates of its row, so that these have the columns of plain decoding:

    tree            t3 ── a ── m0 ── m1     order   t3 a | m0 m1 | m0 m1     (candidates, masks of t3, masks of a)
                     └─── m0 ── m1          parents -1 0 |  0  2 |  1  4
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

_CPU = torch.device("cpu")


class TreeLists(NamedTuple):
    """A tree's fields as nested lists, [B][N]; never written to."""

    token_ids: list[list[int]]
    parents: list[list[int]]
    is_probe: list[list[bool]]

    def are_sound(self, width: int) -> bool:
        """Whether they would make int64, int64 and bool tensors of one shape [B, width], 0 < width."""
        if not len(self.token_ids) == len(self.parents) == len(self.is_probe):
            return False
        for ids, ups, probes in zip(*self, strict=True):
            if not 0 < width == len(ids) == len(ups) == len(probes):
                return False
            if {*map(type, ids), *map(type, ups)} != {int} or {*map(type, probes)} != {bool}:
                return False
        return True


@dataclass(frozen=True)
class TokenTree:
    """B trees of N nodes; a parent always precedes its child.

    token_ids: token of each node.
    parents:   index of each node's parent, -1 at the root (node 0).
    is_probe:  True where the node is read but never accepted; a probe has no candidate below it.

    Given as tensors, or by `from_lists`; the other form is made once, on first use.
    """

    token_ids: Int[Tensor, "B N"]
    parents: Int[Tensor, "B N"]
    is_probe: Bool[Tensor, "B N"]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor:
            """A tensor that is not there yet."""
            if name not in TreeLists._fields or "lists" not in self.__dict__:
                raise AttributeError(name)
            dtype = torch.bool if name == "is_probe" else torch.long
            made = torch.tensor(getattr(self.lists, name), dtype=dtype, device=self.device)
            self.__dict__[name] = made
            return made

    @cached_property
    def lists(self) -> TreeLists:
        """The fields as lists; waits for the device."""
        return TreeLists(*(field.tolist() for field in (self.token_ids, self.parents, self.is_probe)))  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType, reportUnknownArgumentType]

    def reread(self) -> TreeLists:
        """The lists of a tree that others made, who may have written to its tensors: read anew if there are any."""
        if not self.is_listed:
            self.__dict__["lists"] = TokenTree(self.token_ids, self.parents, self.is_probe).lists
        return self.lists

    @cached_property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.token_ids.device

    @property
    def is_listed(self) -> bool:
        """Whether it was made of lists, which are sound, and has no tensors yet."""
        return not any(name in self.__dict__ for name in TreeLists._fields)

    @property
    def num_nodes(self) -> int:
        """N, the root included."""
        return len(self.lists.token_ids[0]) if self.is_listed else self.token_ids.shape[1]

    @cached_property
    def ancestor_mask(self) -> Bool[Tensor, "B N N"]:
        """mask[b, i, j] is True iff node j is node i or one of its ancestors.

        The reflexive-transitive closure of the parent relation by squaring: log2(depth) products instead of N steps.
        """
        n = self.num_nodes
        reach = torch.eye(n, dtype=torch.float32, device=self.parents.device).repeat(self.parents.shape[0], 1, 1)
        child, row = self.parents.clamp(min=0).unsqueeze(-1), (self.parents >= 0).float().unsqueeze(-1)
        reach.scatter_add_(2, child, row)
        for _ in range(max(1, (n - 1).bit_length())):
            reach = (reach @ reach).clamp_(max=1.0)
        return reach > 0

    @cached_property
    def depth(self) -> Int[Tensor, "B N"]:
        """Number of edges to the root; a node's position is committed length + depth."""
        return self.ancestor_mask.sum(-1) - 1

    @cached_property
    def is_chain(self) -> bool:
        """True iff in every row node i's parent is node i - 1, probes apart (they are read, never kept)."""
        straight = torch.arange(-1, self.num_nodes - 1, device=self.parents.device)
        return bool(((self.parents == straight) | self.is_probe).all())

    def path_to(self, row: int, node: int) -> list[int]:
        """Node indices from below the root down to `node`; empty for the root itself."""
        path, parents = list[int](), self.lists.parents[row]
        while node > 0:
            path.append(node)
            node = parents[node]
        return path[::-1]

    def behind(self, text: Sequence[int]) -> "TokenTree":
        """The tree of one row with a text as its trunk: its root follows the last of these tokens."""
        count, device = len(text), self.token_ids.device
        ids = torch.cat([torch.tensor([list(text)], dtype=torch.long, device=device), self.token_ids], 1)
        parents = torch.cat([torch.arange(-1, count - 1, device=device)[None], self.parents + count], 1)
        probe = torch.cat([torch.zeros(1, count, dtype=torch.bool, device=device), self.is_probe], 1)
        return TokenTree(ids, parents, probe)

    def to(self, device: torch.device) -> "TokenTree":
        """The same trees on `device`; itself if they are there."""
        if self.device == device:
            return self
        if self.is_listed:
            return _of(self.lists, device)
        return TokenTree(self.token_ids.to(device), self.parents.to(device), self.is_probe.to(device))

    def trimmed(self) -> "TokenTree":
        """The same trees without the nodes at the end that are probes in every row; itself where there are none."""
        width = self.num_nodes
        while width > 1 and all(row[width - 1] for row in self.lists.is_probe):
            width -= 1
        if width == self.num_nodes:
            return self
        ids, ups, probes = self.lists
        cut = TreeLists([row[:width] for row in ids], [row[:width] for row in ups], [row[:width] for row in probes])
        return _of(cut, self.device)

    def padded(self, num_nodes: int) -> "TokenTree":
        """The same trees with probes added under the root until each has `num_nodes` nodes."""
        extra = num_nodes - self.num_nodes
        if extra <= 0:
            return self
        if not self.is_listed:
            pad = torch.nn.functional.pad
            return TokenTree(
                pad(self.token_ids, (0, extra), value=0),
                pad(self.parents, (0, extra), value=0),
                pad(self.is_probe, (0, extra), value=True),
            )
        ids, ups, probes = self.lists
        zeros, marks = [0] * extra, [True] * extra
        lists = TreeLists([row + zeros for row in ids], [row + zeros for row in ups], [row + marks for row in probes])
        return _of(lists, self.device)

    def of_rows(self, rows: Sequence[int]) -> "TokenTree":
        """The trees of these rows alone, as wide as all of them."""
        ids, ups, probes = self.lists
        lists = TreeLists([ids[row] for row in rows], [ups[row] for row in rows], [probes[row] for row in rows])
        return _of(lists, self.device)

    @staticmethod
    def from_lists(
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        device: torch.device | str = _CPU,
        probes: Sequence[Sequence[bool]] | None = None,
    ) -> "TokenTree":
        """Trees of unequal sizes, one list per row (root first), padded with probes to the longest."""
        width = max(len(row) for row in tokens)
        marks = probes if probes is not None else [[False] * len(row) for row in tokens]
        lists = TreeLists(
            [[*row, *[0] * (width - len(row))] for row in tokens],
            [[*row, *[0] * (width - len(row))] for row in parents],
            [[*row, *[True] * (width - len(row))] for row in marks],
        )
        if lists.are_sound(width):  # else they become whatever tensors they can, which the loop will judge
            return _of(lists, device if isinstance(device, torch.device) else torch.device(device))
        return TokenTree(
            torch.tensor(lists.token_ids, dtype=torch.long, device=device),
            torch.tensor(lists.parents, dtype=torch.long, device=device),
            torch.tensor(lists.is_probe, dtype=torch.bool, device=device),
        )

    @staticmethod
    def chain(tokens: Sequence[Sequence[int]], device: torch.device | str = _CPU) -> "TokenTree":
        """One chain per row: `tokens[b]` is the root followed by the drafted tokens (possibly none)."""
        return TokenTree.from_lists(tokens, [range(-1, len(row) - 1) for row in tokens], device)


def _of(lists: TreeLists, device: torch.device) -> TokenTree:
    """A tree of sound lists, which has no tensors yet."""
    tree = object.__new__(TokenTree)
    tree.__dict__.update(lists=lists, device=device)
    return tree
