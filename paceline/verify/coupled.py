"""`Coupled`, the default: exactly the tokens of plain decoding with the same seed, greedy or sampled."""

import math
from collections.abc import Callable, Sequence
from typing import ClassVar, final

from jaxtyping import Float, Int
from torch import Tensor

from ..core.draft import Draft
from ..core.interfaces import Verifier
from ..core.nodes import Tree
from ..core.walk import TargetDistribution, Walk
from ..sampling.scores import argmax, gumbel_argmax
from ..schema import checked_call
from .walk import descend, to_list


def choose_tokens(
    distribution: TargetDistribution, seeds: Sequence[int], places: list[tuple[int, int, int]]
) -> dict[tuple[int, int], int]:
    """The target's token at some nodes, by (row, node): argmax(scores + noise), or argmax(scores) in greedy rows.

    Greedy and sampled rows are processed separately, so that their dtypes do not mix. The token is -1 where the scores
    give no distribution.

    places: (row, node, absolute position of the token to choose).
    """
    chosen = {(row, node): -1 for row, node, _ in places}
    for greedy in (True, False):
        group = [place for place in places if distribution.is_greedy[place[0]] == greedy]
        if not group:
            continue
        rows, nodes, positions = ([place[i] for place in group] for i in range(3))
        scores = distribution.at(rows, nodes)
        tokens = argmax(scores) if greedy else gumbel_argmax(scores, [seeds[row] for row in rows], positions)
        chosen.update(zip(zip(rows, nodes, strict=True), to_list(_if_finite(scores, tokens)), strict=True))
    return chosen


def _if_finite(scores: Float[Tensor, "*K V"], tokens: Int[Tensor, "*K"]) -> Int[Tensor, "*K"]:
    """-1 for a token whose score is NaN, which passes through argmax, or infinite."""
    best = scores.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return tokens.where(best.isfinite(), -1)


def _choose(scores: Float[Tensor, " V"]) -> int:
    """The token of one greedy node, or -1, in few operations since they count on a CPU."""
    token = int(argmax(scores))
    return token if math.isfinite(scores[token]) else -1


@final
class Coupled(Verifier):
    """R7, sample-and-match on shared noise: descend while a child holds the target's own choice, then emit that choice.

    Drafter-invariant speculative decoding (Daliri et al. 2408.07978). Accepts a draft of any distribution and never
    reads q. Proof: docs/exactness.md, lemma 5.

    whole_tree: whether to choose the tokens of greedy rows at all nodes at once, with one copy to the host, instead of
        level by level. Only for scores without processors. None: on accelerators, where waiting costs more.
    """

    name: ClassVar[str] = "coupled"
    lossless: ClassVar[bool] = True
    exact: ClassVar[bool] = True

    @checked_call
    def __init__(self, whole_tree: bool | None = None):
        self.whole_tree = whole_tree

    def verify(
        self, draft: Draft, distribution: TargetDistribution, seeds: Sequence[int], positions: Sequence[int]
    ) -> list[Walk]:
        """Walk all trees together, level by level. `positions[b]` is the position of the token after the root."""
        trees = draft.tree.rows
        walks = dict[int, Walk]()
        if distribution.process is None and any(distribution.is_greedy):
            choices = self._greedy(distribution.scores)
            walks = {r: _follow(tree, choices, r) for r, tree in enumerate(trees) if distribution.is_greedy[r]}
        paths: list[list[int]] = [[] for _ in trees]
        while len(walks) < len(trees):
            at = {row: path[-1] if path else 0 for row, path in enumerate(paths) if row not in walks}
            places = [(row, node, positions[row] + len(paths[row])) for row, node in at.items()]
            tokens = choose_tokens(distribution, seeds, places)
            for row, node in at.items():
                child = trees[row].child(node, token := tokens[row, node])
                if child is None:
                    walks[row] = Walk(paths[row], token, is_bonus=not trees[row].children[node])
                else:
                    paths[row].append(child)
        return [walks[row] for row in range(len(trees))]

    def _greedy(self, scores: Float[Tensor, "B N V"]) -> Callable[[int, int], int]:
        """A function that returns the target's choice in a greedy row at a node."""
        if self.whole_tree is False or (self.whole_tree is None and scores.is_cpu):
            return lambda row, node: _choose(scores[row, node])
        known: list[list[int]] = to_list(_if_finite(scores, argmax(scores)))
        return lambda row, node: known[row][node]


def _follow(tree: Tree, choices: Callable[[int, int], int], row: int) -> Walk:
    """Walk down while a child holds the choice at its parent."""

    def decide(node: int, depth: int, children: list[int]) -> tuple[int | None, int]:
        return tree.child(node, token := choices(row, node)), token

    return descend(tree, decide)
