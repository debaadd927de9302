"""Drafters with parallel heads, which predict the next tokens from one state of the target (docs/how_it_works.md).

They have no cache: the last pass of the target has left the hidden state they need. After a prompt of one
token there is none yet, so the first round drafts nothing.
"""

from abc import ABC
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field

from ...core.draft import Draft
from ...core.interfaces import DraftBudget, Drafter, DrafterInfo, DraftOptions, Target, Verifier
from ...core.request import TokenSequence
from ...schema import checked, checked_call
from ...system.hardware import median_seconds
from ..heads.context_ngrams import ContextNgrams
from ..heads.fitting import attach_head, row_dtype
from ..heads.top_tokens import TokenRanking
from ..heads.trees import DynamicTree, draft_of
from ..spec import HeadSpec
from .head import BlockwiseHead, MedusaHead, ParallelHeads


class HeadsDrafter(Drafter, ABC):
    """The common part of Medusa and blockwise decoding. One product with the output rows gives all logits."""

    kind: ClassVar[type[ParallelHeads]]

    def __init__(self, head: str | PathLike[str] | ParallelHeads, top_k: int, ngrams: bool):
        self._given, self.top_k, self._uses_ngrams = head, top_k, ngrams
        self.info = DrafterInfo(branches=top_k, reads_states=True)

    def bind(self, target: Target, verifier: Verifier) -> None:
        sizes = {"hidden_size": target.loaded.hidden_size, "states": (target.loaded.num_layers,)}
        self.heads, self._target = attach_head(self._given, self.kind, target, **sizes), target
        self._ranking = TokenRanking.of(self.heads.draft_ids, target, verifier)
        self._ngrams = ContextNgrams(target.banned_token_ids, self._uses_ngrams)
        self._dtype = row_dtype(target)
        target.watch_states([target.loaded.num_layers])

    def draft_options(self, seq: TokenSequence) -> Sequence[DraftOptions]:
        """There are never uncached tokens; the hint is -1 if the target has no state yet."""
        return (DraftOptions(self.name, hint=0 if seq.num_cached else -1, branches=self.top_k, at_once=True),)

    def seconds(self) -> Mapping[str, tuple[float, float]]:
        """The time of all heads; there is no prefill."""
        loaded, heads = self._target.loaded, self.heads
        state = torch.zeros(1, loaded.hidden_size, dtype=self._dtype, device=loaded.device)
        seconds = median_seconds(lambda: heads(state).topk(1).indices.tolist())
        return {self.name: (seconds, 0.0)}

    @torch.inference_mode()
    def propose(self, seqs: Sequence[TokenSequence], budgets: Sequence[DraftBudget]) -> Draft:
        """The best tree by the heads' distributions, which depend on each row's last state only, and by the text."""
        heads, rerank = self.heads, self._ngrams.rerank
        trees = [
            DynamicTree(seq.token_ids[-1], budget, self.top_k, heads.num_heads, budget.nodes, rerank(seq))
            if seq.num_cached
            else DynamicTree(seq.token_ids[-1], budget, self.top_k, 0)
            for seq, budget in zip(seqs, budgets, strict=True)
        ]
        growing = [row for row, tree in enumerate(trees) if tree.frontier]
        if growing:
            read, layer = self._target.read_states, [self._target.loaded.num_layers]
            ends = [(seqs[row].slot, seqs[row].num_cached) for row in growing]
            states = torch.cat([read(slot, length - 1, length, layer) for slot, length in ends])
            logits = heads(states.to(self._dtype), max(trees[row].levels for row in growing))  # [B, D, Vd]
            self._ranking.grow_marginal([trees[row] for row in growing], [seqs[row] for row in growing], logits)
        return draft_of([tree.finish() for tree in trees], self.name)

    def release(self, slots: Sequence[int]) -> None:
        self._ngrams.release(slots)


@final
class Medusa(HeadsDrafter):
    """A tree from Medusa's heads (Cai et al. 2024, arXiv 2401.10774): the nodes of the largest probabilities.

    With `Typical(allow_lossy=True)` for the verifier this is the paper's typical acceptance.

    head: a folder that `paceline train` wrote, a packaged name, or a module.
    top_k: the most children of a node.
    ngrams: see `Eagle`.
    """

    name: ClassVar[str] = "medusa"
    kind = MedusaHead

    @checked_call
    def __init__(
        self, head: str | PathLike[str] | MedusaHead, top_k: Annotated[int, Field(ge=1)] = 10, ngrams: bool = True
    ):
        super().__init__(head, top_k, ngrams)


@final
class Blockwise(HeadsDrafter):
    """A chain of the top token of each head: blockwise parallel decoding (Stern et al. 2018, arXiv 1811.03115).

    head: a folder that `paceline train` wrote, a packaged name, or a module.
    ngrams: see `Eagle`.
    """

    name: ClassVar[str] = "blockwise"
    kind = BlockwiseHead

    @checked_call
    def __init__(self, head: str | PathLike[str] | BlockwiseHead, ngrams: bool = True):
        super().__init__(head, 1, ngrams)


@checked
class MedusaSpec(HeadSpec):
    """Options of `Medusa`."""

    top_k: Annotated[int, Field(ge=1, le=64)] | None = None
    method = "medusa"
    drafter = Medusa
    tokens = 4
    draws_tree = True


@checked
class BlockwiseSpec(HeadSpec):
    """Options of `Blockwise`."""

    method = "blockwise"
    drafter = Blockwise
    tokens = 4
