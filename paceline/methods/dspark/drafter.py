"""DSpark heads draft a block in one pass, and rank each token after the one before it (see `methods.dspark.head`).

Every node has children of its own: those of depth k come from row k of the block, and from the token and the Markov
state of their parent. A level is one small product for all of its nodes.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from ...core.request import TokenSequence
from ...schema import checked
from ..dflash.drafter import DFlashPass, DFlashSpec
from ..eagle.drafter import Eagle
from ..heads.draft_layer import Level
from ..heads.trees import Children, DynamicTree, grow
from .head import DSparkHead


@final
class DSpark(Eagle):
    """Draft trees with a DSpark head. Options are those of `Eagle`; trees are no deeper than its block."""

    name: ClassVar[str] = "dspark"
    _head, _pass = DSparkHead, DFlashPass

    @torch.inference_mode()
    def _grow_at_once(self, seqs: Sequence[TokenSequence], growing: Sequence[DynamicTree]) -> None:
        block = self._catch_up(seqs, masks=max(tree.levels for tree in growing) - 1)
        states = self._first_states(block, len(growing))
        places = {(row, -1): row for row in range(len(growing))}  # in `states`, of the parents of the frontier

        def children(rows: list[int], level: int) -> Children:
            nonlocal states, places
            nodes = [(row, node) for row in rows for node in growing[row].frontier]
            above = [places[row, growing[row].parents[node]] for row, node in nodes]
            tokens = [growing[row].tokens[node] for row, node in nodes]
            which = torch.tensor([tokens, above, [row for row, _ in nodes]], device=states.device)
            logits, states = self._told(block, level, which[2], which[0], states[which[1]])
            places = {node: place for place, node in enumerate(nodes)}
            ids, logps = self._ranking.top(logits, [seqs[row] for row, _ in nodes], level, self.top_k)
            ends = [places[row, growing[row].frontier[-1]] + 1 for row in rows]
            cuts = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
            return [ids[cut] for cut in cuts], [logps[cut] for cut in cuts]

        grow(growing, children)

    def _told(self, block: Level, level: int, rows: Tensor, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [N, Vd] after tokens [N] of this depth, and the Markov states below them. rows: of the batch [N]."""
        head: Any = self.layer.head
        hidden = block.hidden[rows, level]
        told, states = head.markov_head(head.before(tokens).to(hidden.dtype), hidden, states)
        logits = block.logits[rows, level]
        is_told = level > 0 or head.config.tells_first
        return (logits + head.markov_head.markov_w2(told) if is_told else logits), states

    def _ranked(self, drafted: Level, depth: int) -> object:
        rows = torch.zeros(self.top_k, dtype=torch.long, device=drafted.hidden.device)
        logits, _ = self._told(drafted, depth, rows, rows, self._first_states(drafted, self.top_k))
        return self._ranking.top(logits, [], 0, self.top_k)

    def _first_states(self, block: Level, count: int) -> Tensor:
        """The Markov states above the first row."""
        head: Any = self.layer.head
        return block.hidden.new_zeros(count, head.config.markov_rank)


@checked
class DSparkSpec(DFlashSpec):
    """Options of `DSpark`."""

    method = "dspark"
    drafter = DSpark
