"""The token tree: one shape for every draft, from a single chain to EAGLE-2's trees and Lookahead's window.

Knows nothing about models, laws or caches. Node 0 is the last committed token: its key and value are not cached yet,
so the target's pass over the tree computes them together with those of the drafted tokens.

    tokens so far   t0 t1 t2 t3          committed length (cached) = 3, root = t3
    tree            t3 ── a ── b         parents = [-1, 0, 1, 0, 3]
                     └─── c ── d         depth   = [ 0, 1, 2, 1, 2]   position = 3 + depth
    cache columns   3:t3 4:a 5:b 6:c 7:d (node i is written at committed length + i)

A *candidate* is verified and may be accepted. A *probe* is only read: mask tokens of SPACE, Lookahead's window, and
the padding that makes the rows of a batch equally long. Mask j has the token `vocabulary + j`, which no model emits,
and stands behind all candidates of its row, so that these have the columns of plain decoding:

    tree            t3 ── a ── m0 ── m1     order   t3 a | m0 m1 | m0 m1     (candidates, masks of t3, masks of a)
                     └─── m0 ── m1          parents -1 0 |  0  2 |  1  4
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class TokenTree:
    """B trees of N nodes; a parent always precedes its child.

    token_ids: token of each node.
    parents:   index of each node's parent, -1 at the root (node 0).
    is_probe:  True where the node is read but never accepted; a probe has no candidate below it.
    """

    token_ids: Int[Tensor, "B N"]
    parents: Int[Tensor, "B N"]
    is_probe: Bool[Tensor, "B N"]

    @property
    def num_nodes(self) -> int:
        """N, the root included."""
        return self.token_ids.shape[1]

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
        path: list[int] = []
        parents: list[int] = self.parents[row].tolist()  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
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
        if self.token_ids.device == device:
            return self
        return TokenTree(self.token_ids.to(device), self.parents.to(device), self.is_probe.to(device))

    def trimmed(self) -> "TokenTree":
        """The same trees without the nodes at the end that are probes in every row; itself where there are none."""
        kept = (~self.is_probe).any(0).nonzero()
        width = int(kept[-1]) + 1 if len(kept) else 1
        if width == self.num_nodes:
            return self
        return TokenTree(self.token_ids[:, :width], self.parents[:, :width], self.is_probe[:, :width])

    def padded(self, num_nodes: int) -> "TokenTree":
        """The same trees with probes hung under the root until each has `num_nodes` nodes."""
        extra = num_nodes - self.num_nodes
        if extra <= 0:
            return self
        pad = (0, extra)
        return TokenTree(
            torch.nn.functional.pad(self.token_ids, pad, value=0),
            torch.nn.functional.pad(self.parents, pad, value=0),
            torch.nn.functional.pad(self.is_probe, pad, value=True),
        )

    @staticmethod
    def from_lists(
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
        probes: Sequence[Sequence[bool]] | None = None,
    ) -> "TokenTree":
        """Trees of unequal sizes, one list per row (root first), padded with probes to the longest."""
        width = max(len(row) for row in tokens)
        ids = [list(row) + [0] * (width - len(row)) for row in tokens]
        ups = [list(row) + [0] * (width - len(row)) for row in parents]
        marks = probes if probes is not None else [[False] * len(row) for row in tokens]
        flags = [list(row) + [True] * (width - len(row)) for row in marks]
        return TokenTree(
            torch.tensor(ids, dtype=torch.long, device=device),
            torch.tensor(ups, dtype=torch.long, device=device),
            torch.tensor(flags, dtype=torch.bool, device=device),
        )

    @staticmethod
    def chain(tokens: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> "TokenTree":
        """One chain per row: `tokens[b]` is the root followed by the drafted tokens (possibly none)."""
        return TokenTree.from_lists(tokens, [list(range(-1, len(row) - 1)) for row in tokens], device)
