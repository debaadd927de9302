"""`Ratio`: the output follows the target's distribution, though not with the tokens plain decoding would give."""

from collections.abc import Sequence
from typing import ClassVar, final

from ..core.draft import Draft, Law
from ..core.interfaces import Verifier
from ..core.nodes import Tree
from ..core.walk import TargetDistribution, Walk
from .rejection import Keyed, iid, point_mass, without_replacement
from .walk import descend, p_at, q_at


@final
class Ratio(Verifier):
    """Speculative sampling over a tree: the rule for siblings follows the draft's `Law`, see `rejection`.

    p is taken at the node that the walk has reached. Proof: docs/exactness.md, lemmas 1 to 4.

    Lossless if the drafter keeps two promises. q is exactly the distribution its tokens were drawn from. Whether a
    token is offered depends on earlier tokens and on q, never on that token's own value: keep a weak token and stop
    after it, or declare POINT_MASS, which has no such condition.

    Errors: DraftError where q is not a distribution.
    """

    name: ClassVar[str] = "ratio"
    lossless: ClassVar[bool] = True
    exact: ClassVar[bool] = False

    def verify(
        self, draft: Draft, distribution: TargetDistribution, seeds: Sequence[int], positions: Sequence[int]
    ) -> list[Walk]:
        trees = enumerate(draft.tree.rows)
        return [_walk(draft, distribution, row, tree, seeds[row], positions[row]) for row, tree in trees]


def _walk(draft: Draft, distribution: TargetDistribution, row: int, tree: Tree, seed: int, position: int) -> Walk:
    """The walk down one row's tree."""

    def decide(node: int, depth: int, children: list[int]) -> tuple[int | None, int]:
        p, tokens = p_at(distribution, row, node), [tree.token_ids[child] for child in children]
        if p is None:
            return None, -1
        chance = Keyed(seed, position + depth, len(children))
        if draft.law is Law.POINT_MASS:
            index, owed = point_mass(p, tokens, chance.coin)
        elif not tokens:  # a leaf: nothing was drawn, so its row of q may hold anything
            index, owed = None, p
        else:
            rule = iid if draft.law is Law.IID else without_replacement
            index, owed = rule(p, q_at(draft, row, node), tokens, chance.coin)
        return (None, chance.draw(owed)) if index is None else (children[index], -1)

    return descend(tree, decide)
