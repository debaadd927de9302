"""`Typical`: lossy; accepts what the target finds plausible enough, which changes the distribution of the answer."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, final

from jaxtyping import Float64
from pydantic import Field
from torch import Tensor

from ..core.draft import Draft
from ..core.interfaces import Verifier
from ..core.nodes import Tree
from ..core.walk import TargetDistribution, Walk
from ..errors import LossyNotAllowed
from ..schema import checked_call
from .rejection import Keyed, probability
from .walk import p_at


@final
class Typical(Verifier):
    """Typical acceptance: x is accepted where p(x) > min(epsilon, delta * exp(-H(p))). Medusa, 2401.10774, section 3.3.

    H is the entropy of p in nats. Of the paths whose tokens are all accepted the longest is taken, the more probable
    of two equally long; then a token is drawn from p. The answer does not follow the target's distribution, except in
    greedy rows, where only the argmax is accepted. The defaults are those of the Medusa code.

    Errors: LossyNotAllowed without consent; ConfigError where a threshold is outside (0, 1).
    """

    name: ClassVar[str] = "typical"
    lossless: ClassVar[bool] = False
    exact: ClassVar[bool] = False

    @checked_call
    def __init__(
        self,
        epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.09,
        delta: Annotated[float, Field(gt=0, lt=1)] = 0.3,
        *,
        allow_lossy: bool = False,
    ):
        if not allow_lossy:
            raise LossyNotAllowed(
                "typical acceptance changes what the target would answer",
                got="allow_lossy=False",
                fix="pass Typical(allow_lossy=True), or use Coupled (same tokens) or Ratio (same distribution)",
            )
        self.epsilon, self.delta = epsilon, delta

    def threshold(self, p: Float64[Tensor, " V"]) -> float:
        """The probability that a token must exceed; lower for a p of high entropy."""
        entropy = float(-p.xlogy(p).sum())
        return min(self.epsilon, self.delta * math.exp(-entropy))

    def verify(
        self, draft: Draft, distribution: TargetDistribution, seeds: Sequence[int], positions: Sequence[int]
    ) -> list[Walk]:
        walks = list[Walk]()
        for row, tree in enumerate(draft.tree.rows):
            path = self._longest(tree, distribution, row)
            node, position = path[-1] if path else 0, positions[row] + len(path)
            p = p_at(distribution, row, node)
            token = -1 if p is None else Keyed(seeds[row], position, 0).draw(p)
            walks.append(Walk(path, token, is_bonus=not tree.children[node]))
        return walks

    def _longest(self, tree: Tree, distribution: TargetDistribution, row: int) -> list[int]:
        """The longest path of accepted tokens; of equally long ones the most probable."""
        best, best_rank = list[int](), (0, 0.0)
        open_paths: list[tuple[list[int], float]] = [([], 0.0)]
        while open_paths:
            path, logprob = open_paths.pop()
            node = path[-1] if path else 0
            if (len(path), logprob) > best_rank:
                best, best_rank = path, (len(path), logprob)
            p = p_at(distribution, row, node) if tree.children[node] else None
            if p is None:
                continue
            threshold = self.threshold(p)
            for child in tree.children[node]:
                mass = float(probability(p, tree.token_ids[child]))
                if mass > threshold:
                    open_paths.append(([*path, child], logprob + math.log(mass)))
        return best
