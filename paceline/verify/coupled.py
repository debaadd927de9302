"""`Coupled`, the default: the very tokens that plain decoding gives with the same seed, greedy or sampled.

The noise of a position is a function of (seed, position) alone. So the target's choice after a given prefix is fixed
before anything is drafted, and a draft can only be right or wrong about it.
"""

from typing import ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..core.argmax import argmax
from ..core.draft import Draft
from ..core.interfaces import Verifier
from ..core.outputs import TargetLaw, VerifyOutput
from ..core.rng import Purpose, gumbel
from .rows import no_law
from .walk import Branches, Walk, to_list, verdict


def choose(law: TargetLaw, seeds: Int[Tensor, " B"], positions: Int[Tensor, "B N"]) -> Int[Tensor, "B N"]:
    """The target's token at each position: argmax(scores + noise), a draw from the law; argmax(scores) if greedy.

    The Gumbel-max draw (Gumbel 1954; Maddison et al. 1411.0030). Plain decoding calls it, and so may drafters, with
    log q for scores: sharing the noise makes them agree as often as the laws overlap allows, nearly.

    positions: absolute position of the token that each row of scores decides. Errors: NumericsError.
    """
    tokens = _choices(law, seeds, positions)
    for row, node in (tokens < 0).nonzero():
        raise no_law(int(row), int(node), int(positions[row, node]))
    return tokens


def _choices(law: TargetLaw, seeds: Int[Tensor, " B"], positions: Int[Tensor, "B N"]) -> Int[Tensor, "B N"]:
    """As `choose`, with -1 where the scores give no law."""
    scores = law.scores
    sampled = (~law.is_greedy).nonzero().squeeze(1)
    if len(sampled):
        noisy = scores[sampled] + _noise(seeds[sampled], positions[sampled], scores.shape[-1])
        if len(sampled) == len(scores):
            scores = noisy
        else:
            scores = scores.to(noisy.dtype, copy=True)
            scores[sampled] = noisy
    return _argmax(scores)


def _argmax(scores: Float[Tensor, "B N V"]) -> Int[Tensor, "B N"]:
    token = argmax(scores).unsqueeze(-1)
    best = scores.gather(-1, token)  # NaN passes through argmax
    return token.where(best.isfinite(), -1).squeeze(-1)


def _noise(seeds: Int[Tensor, " B"], positions: Int[Tensor, "B N"], size: int) -> Float[Tensor, "B N V"]:
    """The target's noise, computed once per row and distinct position: it costs more than the argmax it feeds."""
    if positions.shape[1] == 1:
        return gumbel(seeds, positions, Purpose.TARGET, size)
    rows = list[Tensor]()
    for seed, wanted in zip(seeds.unsqueeze(1), to_list(positions), strict=True):
        distinct = {position: index for index, position in enumerate(dict.fromkeys(wanted))}
        noise = gumbel(seed, torch.tensor([[*distinct]], device=seeds.device), Purpose.TARGET, size)
        rows.append(noise[0, [distinct[position] for position in wanted]])
    return torch.stack(rows)


@final
class Coupled(Verifier):
    """R7, sample-and-match on shared noise: descend while a child holds the target's own choice, then emit that choice.

    Drafter-invariant speculative decoding (Daliri et al. 2408.07978). Takes a draft of any law and never reads q.
    Proof: docs/lossless.md, lemma 5.

    whole_tree: choose for greedy rows at every node at once, with one copy to the host, rather than level by level
    along the walk. None: on accelerators, where waiting costs more than the argmax of nodes never visited.
    Errors: NumericsError where the scores of a visited node give no law.
    """

    name: ClassVar[str] = "coupled"
    lossless: ClassVar[bool] = True
    exact: ClassVar[bool] = True

    def __init__(self, whole_tree: bool | None = None):
        self.whole_tree = whole_tree

    def verify(
        self, draft: Draft, law: TargetLaw, seeds: Int[Tensor, " B"], positions: Int[Tensor, " B"]
    ) -> VerifyOutput:
        """Walk all trees together, one level a turn. `positions[b]` is the position of the token after the root."""
        device = law.scores.device
        at_once = self.whole_tree if self.whole_tree is not None else device.type != "cpu"
        columns = [law.is_greedy.unsqueeze(1).expand(-1, draft.tree.num_nodes)]
        if at_once:
            columns.append(_argmax(law.scores))
        rows, (greedy, *known) = Branches.read(draft.tree, *(column.long() for column in columns))

        paths: list[list[int]] = [[] for _ in rows]
        walks: dict[int, Walk] = {}
        while len(walks) < len(rows):
            at = {row: path[-1] if path else 0 for row, path in enumerate(paths) if row not in walks}
            tokens = {row: known[0][row][node] for row, node in at.items() if known and greedy[row][0]}
            tokens |= _ask(law, seeds, positions, [(row, at[row], len(paths[row])) for row in at if row not in tokens])
            for row, node in at.items():
                if tokens[row] < 0:
                    raise no_law(row, node, int(positions[row]) + len(paths[row]))
                children = rows[row].children[node]
                child = next((child for child in children if rows[row].tokens[child] == tokens[row]), None)
                if child is None:
                    walks[row] = Walk(paths[row], tokens[row], is_bonus=not children)
                else:
                    paths[row].append(child)
        return verdict([walks[row] for row in range(len(rows))], device)


def _ask(
    law: TargetLaw, seeds: Int[Tensor, " B"], positions: Int[Tensor, " B"], where: list[tuple[int, int, int]]
) -> dict[int, int]:
    """The target's choice, by row, at each (row, node, depth): one level of the walk in one batch."""
    if not where:
        return {}
    rows, nodes, depths = torch.tensor(where, device=law.scores.device).unbind(1)
    here = TargetLaw(law.scores[rows, nodes].unsqueeze(1), law.is_greedy[rows])
    tokens = _choices(here, seeds[rows], (positions[rows] + depths).unsqueeze(1))
    return dict(zip((row for row, _, _ in where), to_list(tokens.squeeze(1)), strict=True))
