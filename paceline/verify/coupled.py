"""`Coupled`, the default: the very tokens that plain decoding gives with the same seed, greedy or sampled."""

from collections.abc import Callable, Sequence
from typing import ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..core.draft import Draft
from ..core.interfaces import Verifier
from ..core.outputs import TargetDistribution, Walk
from ..core.rng import Purpose, gumbel
from ..sampling.scores import argmax
from ..schema import checked_call
from .walk import Branches, descend, to_list


def choose_tokens(
    distribution: TargetDistribution, seeds: Sequence[int], places: list[tuple[int, int, int]]
) -> dict[tuple[int, int], int]:
    """The target's token at some nodes, by (row, node): argmax(scores + noise), or argmax(scores) in greedy rows.

    The Gumbel-max draw (Gumbel 1954; Maddison et al. 1411.0030). Greedy and sampled rows are read apart, so that
    neither takes on the dtype of the other.

    places: (row, node, absolute position of the token to choose).
    Returns -1 where the scores give no distribution.
    """
    chosen = {(row, node): -1 for row, node, _ in places}
    for greedy in (True, False):
        group = [place for place in places if distribution.is_greedy[place[0]] == greedy]
        if not group:
            continue
        rows, nodes, positions = ([place[i] for place in group] for i in range(3))
        scores = distribution.at(rows, nodes)
        if not greedy:
            scores = scores + _noise([seeds[row] for row in rows], positions, scores)
        chosen.update(zip(zip(rows, nodes, strict=True), to_list(_argmax(scores)), strict=True))
    return chosen


def _argmax(scores: Float[Tensor, "*K V"]) -> Int[Tensor, "*K"]:
    token = argmax(scores).unsqueeze(-1)
    best = scores.gather(-1, token)  # NaN passes through argmax
    return token.where(best.isfinite(), -1).squeeze(-1)


def _noise(seeds: Sequence[int], positions: Sequence[int], scores: Float[Tensor, "K V"]) -> Float[Tensor, "K V"]:
    """The target's noise, computed once per distinct seed and position: it costs more than the argmax it feeds."""
    places = list(zip(seeds, positions, strict=True))
    distinct = {place: index for index, place in enumerate(dict.fromkeys(places))}
    seed, position = torch.tensor([*distinct], device=scores.device).unbind(1)
    noise = gumbel(seed, position.unsqueeze(1), Purpose.TARGET, scores.shape[-1]).squeeze(1)
    return noise if len(distinct) == len(places) else noise[[distinct[place] for place in places]]


@final
class Coupled(Verifier):
    """R7, sample-and-match on shared noise: descend while a child holds the target's own choice, then emit that choice.

    Drafter-invariant speculative decoding (Daliri et al. 2408.07978). Takes a draft of any distribution and never reads
    q. Proof: docs/exactness.md, lemma 5.

    whole_tree: choose for greedy rows at every node at once, with one copy to the host, rather than level by level
    along the walk, where nothing is left to process. None: on accelerators, where waiting costs more than the argmax.
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
        """Walk all trees together, one level a turn. `positions[b]` is the position of the token after the root."""
        trees = Branches.read(draft.tree)
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
        """What gives the choice of a greedy row at a node."""
        if self.whole_tree is False or (self.whole_tree is None and scores.is_cpu):
            return lambda row, node: int(_argmax(scores[row, node]))
        known: list[list[int]] = to_list(_argmax(scores))
        return lambda row, node: known[row][node]


def _follow(tree: Branches, choices: Callable[[int, int], int], row: int) -> Walk:
    """Walk down while a child holds the choice at its parent."""

    def decide(node: int, depth: int, children: list[int]) -> tuple[int | None, int]:
        return tree.child(node, token := choices(row, node)), token

    return descend(tree, decide)
