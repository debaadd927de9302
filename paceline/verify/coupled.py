"""`Coupled`, the default: the very tokens that plain decoding gives with the same seed, greedy or sampled.

The noise of a position is a function of (seed, position) alone. So the target's choice after a given prefix is fixed
before anything is drafted, and a draft can only be right or wrong about it.
"""

from collections.abc import Sequence
from typing import ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..core.argmax import argmax
from ..core.draft import Draft
from ..core.interfaces import Verifier
from ..core.outputs import TargetLaw, VerifyOutput
from ..core.rng import Purpose, gumbel
from ..schema import checked_call
from .walk import Branches, Walk, to_list, verdict


def choose(law: TargetLaw, seeds: Int[Tensor, " B"], positions: Int[Tensor, "B N"]) -> Int[Tensor, "B N"]:
    """The target's token at each position: argmax(scores + noise), a draw from the law; argmax(scores) if greedy.

    The Gumbel-max draw (Gumbel 1954; Maddison et al. 1411.0030). Plain decoding calls it, and so may drafters, with
    log q for scores: sharing the noise makes them agree as often as the laws overlap allows, nearly.

    positions: absolute position of the token that each row of scores decides. Errors: those of `TargetLaw.error`.
    """
    places = [
        (row, node, position) for row, found in enumerate(to_list(positions)) for node, position in enumerate(found)
    ]
    tokens = _choices(law, to_list(law.is_greedy), seeds, places)
    for row, node, position in places:
        if tokens[row, node] < 0:
            raise law.error(row, node, position)
    return torch.tensor([*tokens.values()], device=positions.device).view(positions.shape)


def _choices(
    law: TargetLaw, is_greedy: Sequence[bool], seeds: Int[Tensor, " B"], places: list[tuple[int, int, int]]
) -> dict[tuple[int, int], int]:
    """The target's token after each (row, node), whose position comes third; -1 where the scores give no law.

    Greedy and sampled rows are read apart, so that neither takes on the dtype of the other.
    """
    chosen = {(row, node): -1 for row, node, _ in places}
    for greedy in (True, False):
        group = [place for place in places if bool(is_greedy[place[0]]) == greedy]
        if not group:
            continue
        rows, nodes, positions = (list(column) for column in zip(*group, strict=True))
        scores = law.at(rows, nodes)
        if not greedy:
            scores = scores + _noise(seeds, rows, positions, scores.shape[-1])
        chosen.update(zip(zip(rows, nodes, strict=True), to_list(_argmax(scores)), strict=True))
    return chosen


def _argmax(scores: Float[Tensor, "*K V"]) -> Int[Tensor, "*K"]:
    token = argmax(scores).unsqueeze(-1)
    best = scores.gather(-1, token)  # NaN passes through argmax
    return token.where(best.isfinite(), -1).squeeze(-1)


def _noise(seeds: Int[Tensor, " B"], rows: list[int], positions: list[int], size: int) -> Float[Tensor, "K V"]:
    """The target's noise, computed once per row and distinct position: it costs more than the argmax it feeds."""
    places = list(zip(rows, positions, strict=True))
    distinct = {place: index for index, place in enumerate(dict.fromkeys(places))}
    row, position = torch.tensor([*distinct], device=seeds.device).unbind(1)
    noise = gumbel(seeds[row], position.unsqueeze(1), Purpose.TARGET, size).squeeze(1)
    return noise if len(distinct) == len(places) else noise[[distinct[place] for place in places]]


@final
class Coupled(Verifier):
    """R7, sample-and-match on shared noise: descend while a child holds the target's own choice, then emit that choice.

    Drafter-invariant speculative decoding (Daliri et al. 2408.07978). Takes a draft of any law and never reads q.
    Proof: docs/lossless.md, lemma 5.

    whole_tree: choose for greedy rows at every node at once, with one copy to the host, rather than level by level
    along the walk, where nothing is left to process. None: on accelerators, where waiting costs more than the argmax
    of nodes never visited.
    """

    name: ClassVar[str] = "coupled"
    lossless: ClassVar[bool] = True
    exact: ClassVar[bool] = True

    @checked_call
    def __init__(self, whole_tree: bool | None = None):
        self.whole_tree = whole_tree

    def verify(
        self, draft: Draft, law: TargetLaw, seeds: Int[Tensor, " B"], positions: Int[Tensor, " B"]
    ) -> VerifyOutput:
        """Walk all trees together, one level a turn. `positions[b]` is the position of the token after the root."""
        device = law.scores.device
        at_once = self.whole_tree if self.whole_tree is not None else device.type != "cpu"
        at_once = at_once and law.process is None
        columns = [law.is_greedy.unsqueeze(1).expand(-1, draft.tree.num_nodes)]
        if at_once:
            columns.append(_argmax(law.scores))
        rows, (flags, *known) = Branches.read(draft.tree, *(column.long() for column in columns))
        greedy = [bool(row[0]) for row in flags]
        starts: list[int] = to_list(positions)

        paths: list[list[int]] = [[] for _ in rows]
        walks: dict[int, Walk] = {}
        while len(walks) < len(rows):
            at = {row: path[-1] if path else 0 for row, path in enumerate(paths) if row not in walks}
            tokens = {(row, node): known[0][row][node] for row, node in at.items() if known and greedy[row]}
            unknown = [(row, at[row], starts[row] + len(paths[row])) for row in at if (row, at[row]) not in tokens]
            tokens |= _choices(law, greedy, seeds, unknown)
            for row, node in at.items():
                token, children = tokens[row, node], rows[row].children[node]
                child = next((child for child in children if rows[row].tokens[child] == token), None)
                if child is None:
                    walks[row] = Walk(paths[row], token, is_bonus=not children)
                else:
                    paths[row].append(child)
        return verdict([walks[row] for row in range(len(rows))], device)
