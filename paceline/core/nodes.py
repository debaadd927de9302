"""The tree of one sequence, as lists. Does not import torch, so that `paceline show` starts fast."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index

from ..errors import DraftError


@dataclass(frozen=True)
class Tree:
    """The nodes of one tree, see `tree`; a parent always precedes its child. Made by `of`, never modified.

    token_ids: the token of each node; node 0 is the root.
    parents: the index of each node's parent, -1 at the root.
    is_probe: which nodes are never accepted and have no candidate below them.
    """

    token_ids: list[int]
    parents: list[int]
    is_probe: list[bool]

    @staticmethod
    def of(
        token_ids: Sequence[int], parents: Sequence[int] | None = None, is_probe: Sequence[bool] | None = None
    ) -> "Tree":
        """A tree of these nodes; without parents a chain, without marks all of them candidates.

        Raises TypeError for values that are not integers, `DraftError` for lists of different lengths and without root.
        """
        size = len(token_ids)
        parents = [*range(-1, size - 1)] if parents is None else [*map(index, parents)]
        is_probe = [False] * size if is_probe is None else [*map(bool, is_probe)]
        if not 0 < size == len(parents) == len(is_probe):
            got = [size, len(parents), len(is_probe)]
            raise DraftError("the lists of a tree differ in length", got=got, expected="a root, and a parent for each")
        return Tree([*map(index, token_ids)], parents, is_probe)

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def depths(self) -> list[int]:
        """The number of edges from each node to the root."""
        return depths_of(self.parents)

    @cached_property
    def candidates(self) -> list[int]:
        """The nodes that may be accepted, the root included."""
        return [node for node, is_probe in enumerate(self.is_probe) if not is_probe]

    @cached_property
    def children(self) -> list[list[int]]:
        """The candidates below each node, in drafted order."""
        children: list[list[int]] = [[] for _ in self.token_ids]
        parents = self.parents
        for node in self.candidates[1:]:
            children[parents[node]].append(node)
        return children

    @property
    def is_chain(self) -> bool:
        """Whether the parent of each candidate is the node before it."""
        return all(self.parents[node] == node - 1 for node in self.candidates)

    def child(self, node: int, token: int) -> int | None:
        """The first candidate with this token below a node."""
        for child in self.children[node]:
            if self.token_ids[child] == token:
                return child
        return None

    def path_to(self, node: int) -> list[int]:
        """Node indices from below the root down to `node`; empty for the root itself."""
        return path_to(self.parents, node)

    @property
    def paths(self) -> list[list[int]]:
        """The nodes from the root to each leaf, both included; a probe without children is a leaf too."""
        leaves = sorted(set(range(len(self))) - set(self.parents))
        return [[0, *self.path_to(leaf)] for leaf in leaves]

    def tokens_to(self, node: int) -> list[int]:
        """The tokens of `path_to`."""
        return [self.token_ids[on_path] for on_path in self.path_to(node)]

    def part(self, nodes: Sequence[int]) -> "Tree":
        """Some nodes in this order, root first; the parent of each must be among them. Itself if that is all of it."""
        if len(nodes) == len(self) and nodes == self.candidates:
            return self
        place = {node: index for index, node in enumerate(nodes)} | {-1: -1}
        parents = [place[self.parents[node]] for node in nodes]
        return Tree([self.token_ids[node] for node in nodes], parents, [self.is_probe[node] for node in nodes])

    def padded(self, size: int) -> "Tree":
        """The tree with probes below its root until it has so many nodes."""
        more = size - len(self)
        if more <= 0:
            return self
        return Tree(self.token_ids + [0] * more, self.parents + [0] * more, self.is_probe + [True] * more)


def depths_of(parents: Sequence[int]) -> list[int]:
    """See `Tree.depths`."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """See `Tree.path_to`."""
    path = list[int]()
    while node > 0:
        path.append(node)
        node = parents[node]
    return path[::-1]
