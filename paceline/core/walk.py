"""The target's distributions, and the decisions of the verifier."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import NumericsError


@dataclass(frozen=True)
class TargetDistribution:
    """p, the distribution of the token after each node, with all processors applied on the path of that node.

    Verifiers read it with `at`, node by node, so that no processor is called on a node that plain decoding would not
    reach.

    scores: log-probabilities up to a constant per node, before `process`; -inf for a forbidden token.
    is_greedy: which rows have temperature 0; their distribution is a point mass on the argmax.
    process: (scores [K, V], their rows, their nodes) -> processed scores [K, V]; None if `scores` are final.
    errors: the errors of `process` by (row, node); such a node has no distribution.
    """

    scores: Float[Tensor, "B N V"]
    is_greedy: Sequence[bool]
    process: Callable[[Tensor, list[int], list[int]], Tensor] | None = None
    errors: dict[tuple[int, int], Exception] = field(default_factory=dict[tuple[int, int], Exception])

    def at(self, rows: list[int], nodes: list[int]) -> Float[Tensor, "K V"]:
        """Processed scores after the K nodes (rows[k], nodes[k]). Without a distribution, the maximum is not finite."""
        width = self.scores.shape[1]
        index = torch.tensor([row * width + node for row, node in zip(rows, nodes, strict=True)])
        picked = self.scores.flatten(0, 1).index_select(0, index.to(self.scores.device))
        return picked if self.process is None else self.process(picked, rows, nodes)

    def error(self, row: int, node: int, number: int) -> Exception:
        """Why this node has no distribution. number: that of the token after the node in its answer, from 1."""
        return self.errors.get((row, node)) or NumericsError(
            f"the target's scores give no distribution (at token {number} of the answer)",
            got="NaN, +inf, or -inf for every token",
            expected="at least one finite score and no NaN",
            fix="check that the model's logits are finite and that the processors leave a token allowed",
        )


class Walk(NamedTuple):
    """The decision of a verifier on one row: the accepted nodes and one more token, which is the target's own.

    path: the accepted nodes from the root down, root excluded.
    next_token: the *recovered* token after a rejection, or the *bonus* token after a fully accepted path; -1 if the
        path leads to a node without a distribution, which is an error unless the answer ends on the path.
    is_bonus: whether nothing was rejected: the path ended at a leaf of the draft.
    """

    path: list[int]
    next_token: int
    is_bonus: bool
