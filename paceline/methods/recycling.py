"""Token recycling (Luo et al. 2024, arXiv 2408.08696): draft what the model found likely after the same token before.

A matrix holds, for each token of the vocabulary, the eight most likely successors that the target computed last, best
first. A tree of fixed shape is filled from it.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import ClassVar, final

import torch
from torch import Tensor

from ..core.draft import Draft
from ..core.interfaces import DraftBudget, Drafter, DrafterInfo, DraftOptions, Target, Verifier
from ..core.nodes import Tree
from ..core.request import TokenSequence
from ..core.walk import Walk
from ..kernels.library import largest, reads
from ..schema import checked, checked_call
from .heads.trees import DynamicTree, Grown, draft_of
from .spec import DrafterSpec
from .tenants import PerTenant

SUCCESSORS = 8
"""Tokens kept for each token."""
_DEPTH, _NODES = 6, 80
"""The size of the paper's tree."""
_RANK_PROBS = (0.4, 0.13, 0.045, 0.035, 0.025, 0.02, 0.017, 0.015)
"""How often the next token was a kept successor, by its rank; measured with SmolLM2-135M on chats."""


@final
class TokenRecycling(Drafter):
    """Draft a tree of the successors that the target found likely last.

    The matrix [V, 8] of int32 is shared by all requests of a tenant and lives as long as the drafter: 1.6 MB for 49,152
    tokens. A token that the target has not processed yet has no successors, and nothing is drafted below it.
    """

    name: ClassVar[str] = "recycling"
    info = DrafterInfo(branches=SUCCESSORS, drafts_during_prefill=True)  # it reads tokens only

    @checked_call
    def __init__(self) -> None:
        self._vocab_size = 0
        self.successors = PerTenant(lambda: torch.full((self._vocab_size, SUCCESSORS), -1, dtype=torch.int32))

    def bind(self, target: Target, verifier: Verifier) -> None:
        self._vocab_size = target.vocab_size
        super().bind(target, verifier)

    def draft_options(self, seq: TokenSequence) -> Sequence[DraftOptions]:
        """The hint is -1 where the last token has no successors."""
        known = max(self._below(self.successors.of(seq), seq.token_ids[-1])) >= 0
        return (DraftOptions(self.name, hint=0 if known else -1, branches=SUCCESSORS),)

    def propose(self, seqs: Sequence[TokenSequence], budgets: Sequence[DraftBudget]) -> Draft:
        """The tree of each row, the most likely nodes of it if the budget is small."""
        return draft_of([self._tree(*both) for both in zip(seqs, budgets, strict=True)], self.name)

    def observe(self, seqs: Sequence[TokenSequence], draft: Draft, logits: Tensor, walks: Sequence[Walk]) -> None:
        """Store the successors of every token of the pass. If a token occurs twice, the accepted path takes precedence.

        Rejected tokens count too, since the target computed what follows them.
        """
        width, matrices = draft.tree.num_nodes, [self.successors.of(seq) for seq in seqs]
        for matrix in {id(one): one for one in matrices}.values():
            place = dict[int, int]()  # token: its row of the logits, flattened
            for row, (tree, walk) in enumerate(zip(draft.tree.rows, walks, strict=True)):
                read = [*tree.candidates, 0, *walk.path] if matrices[row] is matrix else []
                place.update((tree.token_ids[node], row * width + node) for node in read)
            rows = torch.tensor([*place.values()], device=logits.device)
            best = _best(logits.flatten(0, 1).index_select(0, rows))
            matrix[torch.tensor([*place]), : best.shape[1]] = best

    def release(self, slots: Sequence[int]) -> None:
        self.successors.release(slots)

    def _below(self, matrix: Tensor, token: int) -> list[int]:
        """The successors of a token, best first; -1 for one that is unknown or cannot be drafted."""
        successors: list[int] = matrix[token].tolist()  # pyright: ignore[reportUnknownMemberType]
        return [-1 if successor in self.banned_token_ids else successor for successor in successors]

    def _tree(self, seq: TokenSequence, budget: DraftBudget) -> Grown:
        """The most probable nodes of the shape whose tokens are known, within the budget."""
        deepest, matrix = _deepest(budget), self.successors.of(seq)
        tokens, parents, confidences = seq.token_ids[-1:], [-1], list[float]()
        place, depths = {0: 0}, [0]  # node of the shape -> node of the tree; depth of each node of the tree
        below = {0: self._below(matrix, tokens[0])}  # node of the tree -> successors
        for node, (rank, above, score) in enumerate(_shape(), start=1):
            if not deepest or len(confidences) >= budget.nodes or score < budget.min_prob(len(confidences)):
                break
            parent = place.get(above)
            if parent is None or depths[parent] >= deepest or parent not in below:
                continue
            token = below[parent][rank]
            if token < 0:
                continue
            place[node] = len(tokens)
            tokens.append(token)
            parents.append(parent)
            confidences.append(_RANK_PROBS[rank])
            depths.append(depths[parent] + 1)
            if not seq.would_end(token, depths[-1]):
                below[place[node]] = self._below(matrix, token)
        return Tree.of(tokens, parents), confidences


def _best(logits: Tensor) -> Tensor:
    """The largest logits of each row, largest first: [R, V] -> int32 [R, k] on the CPU."""
    count = min(SUCCESSORS, logits.shape[1])
    if reads(logits):
        return largest(logits.float(), count)[0]
    return logits.topk(count, dim=-1).indices.int().cpu()


@cache
def _shape() -> list[tuple[int, int, float]]:
    """The best tree of 80 nodes if the chance of a token depends on its rank only.

    Returns for each node its rank, its parent (0: the root), and the probability of its path, in descending order.
    """
    tree = DynamicTree(0, DraftBudget(_DEPTH, _NODES), SUCCESSORS, width=_NODES)
    logps = [math.log(chance) for chance in _RANK_PROBS]
    while tree.frontier:
        tree.add([range(SUCCESSORS)] * len(tree.frontier), [logps] * len(tree.frontier))
    nodes = sorted(tree.kept(), key=lambda node: -tree.scores[node])
    place = {node: index for index, node in enumerate([0, *nodes])}
    return [(tree.tokens[node], place[tree.parents[node]], math.exp(tree.scores[node])) for node in nodes]


def _deepest(budget: DraftBudget) -> int:
    """The depth of the tree: the budget's, or where `should_continue` stops the path of first ranks."""
    depth, path = min(budget.depth, _DEPTH), list[float]()
    while len(path) < depth:
        path.append(_RANK_PROBS[0])
        if budget.should_continue is not None and not budget.should_continue(path):
            break
    return len(path)


@checked
class RecyclingSpec(DrafterSpec):
    """Options of `TokenRecycling`: none."""

    method = "token_recycling"
    label = "recycling"
    drafter = TokenRecycling
    tokens = _DEPTH
    draws_tree = True
