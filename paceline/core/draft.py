"""A draft: a tree of drafted tokens with the distribution they were drawn from.

Rejection sampling depends on that distribution: argmax tokens that are declared as draws from a softmax bias the output
(mean total variation 0.39 over four random tokens).
"""

from dataclasses import dataclass, replace
from enum import Enum

from jaxtyping import Float
from torch import Tensor

from .tree import TokenTree


class Law(Enum):
    """The "law" of a draft: how the children of a node were chosen, given everything before them."""

    POINT_MASS = "point_mass"  # deterministic, or drawn by an unknown distribution: always safe
    IID = "iid"  # each child drawn independently from q
    WITHOUT_REPLACEMENT = "without_replacement"  # each child drawn from q less its earlier siblings, renormalised


@dataclass(frozen=True)
class Draft:
    """A tree of drafted tokens and their distribution.

    q: row i is the distribution of the children of node i; None if and only if `law` is POINT_MASS.
    source: the name of the drafter, shown to the user with every drafted token.
    sources: the name for each row, if they differ.
    confidence: the drafter's probability of each node, NaN if unknown; only policies use it.
    hints: `DraftOptions.hint` of each row.
    """

    tree: TokenTree
    law: Law = Law.POINT_MASS
    q: Float[Tensor, "B N V"] | None = None
    source: str = "draft"
    sources: tuple[str, ...] | None = None
    confidence: Float[Tensor, "B N"] | None = None
    hints: tuple[int, ...] | None = None

    def trimmed(self) -> "Draft":
        """The draft without the probes at its end, which are not verified, see `TokenTree.trimmed`."""
        tree = self.tree.trimmed()
        if tree is self.tree:
            return self
        width = tree.num_nodes
        q = None if self.q is None else self.q[:, :width]
        confidence = None if self.confidence is None else self.confidence[:, :width]
        return replace(self, tree=tree, q=q, confidence=confidence)

    def source_of(self, row: int) -> str:
        """The name of the drafter of this row."""
        return self.source if self.sources is None else self.sources[row]
