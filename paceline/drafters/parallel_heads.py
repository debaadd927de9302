"""Drafters whose heads foresee the next tokens side by side, from one state of the target.

Between rounds the target has read all but the last token, the root. Its last state tells of what follows the root:

    token         x_{T-3}    x_{T-2}    x_{T-1} = root     x_T       x_{T+1}
    state         f_{T-3}    f_{T-2}    (not yet computed)
    drafted from             f_{T-2} ─── head 0 ──────────> x_T
                                     └── head 1 ────────────────────> x_{T+1}

They keep nothing between rounds, and read nothing first: the state is there since the last pass of the target. Only
the first token of a text has no state before it: with a prompt of one token, the first round drafts nothing.
"""

import statistics
import time
from abc import ABC
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from os import PathLike
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field

from ..core.draft import Draft
from ..core.interfaces import DraftBudget, Drafter, DrafterInfo, DraftOptions, TargetView, Verifier
from ..core.request import Sequence
from ..heads import BlockwiseHead, MedusaHead
from ..heads.parallel import ParallelHeads
from ..sampling.scores import columns_of
from ..schema import checked, checked_call
from .fitting import fitted, row_dtype
from .registry import TREE_NODES, HeadSpec
from .top_tokens import top_tokens
from .trees import DraftTree, best_of_marginals, stacked


class HeadsDrafter(Drafter, ABC):
    """What Medusa and blockwise decoding share: all of a head's laws come from one product with the output rows.

    So a head more costs little, and stopping early saves the target's rows, not the drafter's.
    """

    kind: ClassVar[type[ParallelHeads]]

    def __init__(self, head: str | PathLike[str] | ParallelHeads, top_k: int):
        self._given, self.top_k = head, top_k
        self.info = DrafterInfo(branches=top_k, reads_states=True)
        self._heads: ParallelHeads | None = None

    def bind(self, target: TargetView, verifier: Verifier) -> None:
        """Fit the heads to the target and have it keep its last states."""
        self._heads, self._target, self._coupled = fitted(self._given, self.kind, target), target, verifier.exact
        self._barred = columns_of(target.banned_token_ids, self._heads.draft_ids)
        self._dtype = row_dtype(target)
        target.watch_states([target.loaded.num_layers])

    @property
    def heads(self) -> ParallelHeads:
        """The heads, once bound."""
        assert self._heads is not None, "bind() comes first"
        return self._heads

    def draft_options(self, seq: Sequence) -> Seq[DraftOptions]:
        """Nothing is ever pending; -1 where the target has no state yet."""
        return (DraftOptions(self.name, hint=0 if seq.num_cached else -1, branches=self.top_k),)

    def seconds(self) -> Mapping[str, tuple[float, float]]:
        """All heads once, shared among their tokens; there is nothing to read."""
        loaded, heads = self._target.loaded, self.heads
        state = torch.zeros(1, loaded.hidden_size, dtype=self._dtype, device=loaded.device)
        times: list[float] = []
        with torch.inference_mode():
            for _ in range(4):  # the first warms up
                begin = time.perf_counter()
                heads(state).topk(1).indices.tolist()  # reading waits for the device
                times.append(time.perf_counter() - begin)
        return {self.name: (statistics.median(times[1:]) / heads.num_heads, 0.0)}

    @torch.inference_mode()
    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> Draft:
        """Read the laws of the next tokens off each row's last state, and make the best draft of them."""
        heads = self.heads
        depths = [
            min(budget.depth, budget.nodes, heads.num_heads) if seq.num_cached else 0
            for seq, budget in zip(seqs, budgets, strict=True)
        ]
        grown = [DraftTree([], [], []) for _ in seqs]
        rows = [row for row, depth in enumerate(depths) if depth > 0]
        if rows:
            for row, made in zip(rows, self._laws([seqs[r] for r in rows], max(depths)), strict=True):
                grown[row] = best_of_marginals(*made, depths[row], budgets[row])
        tree, confidence = stacked([seq.token_ids[-1] for seq in seqs], grown)
        return Draft(tree, source=self.name, confidence=confidence)

    def _laws(self, seqs: Seq[Sequence], depth: int) -> list[tuple[list[list[int]], list[list[float]]]]:
        """For each sequence the best tokens of each depth, likeliest first, and their log-probabilities: [D, k]."""
        heads, read = self.heads, self._target.read_states
        layer = [self._target.loaded.num_layers]
        states = torch.cat([read(seq.slot, seq.num_cached - 1, seq.num_cached, layer) for seq in seqs])
        logits = heads(states.to(self._dtype), depth)  # [B, D, Vd]
        found: list[tuple[list[list[int]], list[list[float]]]] = [([], []) for _ in seqs]
        for step in range(depth):
            ids = heads.draft_ids
            best = top_tokens(logits[:, step], ids, seqs, step, self.top_k, self._coupled, self._barred)
            for (tokens, logps), row_tokens, row_logps in zip(found, *best, strict=True):
                tokens.append(row_tokens)
                logps.append(row_logps)
        return found


@final
class Medusa(HeadsDrafter):
    """A tree from the laws of Medusa's heads: the nodes whose product of probabilities is largest.

    Cai et al. 2024, arXiv 2401.10774. head: a folder that `paceline train` wrote, or a module. top_k: most children of
    a node. With `Typical(allow_lossy=True)` for the verifier this is the paper's typical acceptance.
    """

    name: ClassVar[str] = "medusa"
    kind = MedusaHead

    @checked_call
    def __init__(self, head: str | PathLike[str] | MedusaHead, top_k: Annotated[int, Field(ge=1)] = 10):
        super().__init__(head, top_k)


@final
class Blockwise(HeadsDrafter):
    """A chain of the likeliest token of each head: blockwise parallel decoding (Stern et al. 2018, arXiv 1811.03115).

    The paper's *predict* is `propose`; its *verify* and *accept* are the loop's pass and the verifier, and that pass
    leaves the state from which the next block is predicted. head: a folder or a module.
    """

    name: ClassVar[str] = "blockwise"
    kind = BlockwiseHead

    @checked_call
    def __init__(self, head: str | PathLike[str] | BlockwiseHead):
        super().__init__(head, 1)


@checked
class MedusaSpec(HeadSpec):
    """Options of `Medusa`."""

    top_k: Annotated[int, Field(ge=1, le=64)] | None = None
    method = "medusa"
    drafter = Medusa
    tokens = 4
    exported = ("vLLM",)

    def tree_nodes(self, depth: int) -> int:
        """As of other trees."""
        return max(TREE_NODES, depth)


@checked
class BlockwiseSpec(HeadSpec):
    """Options of `Blockwise`."""

    method = "blockwise"
    drafter = Blockwise
    tokens = 4
