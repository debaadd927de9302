"""SPACE drafts in the target's own pass: mask tokens below the nodes that are likely to be the last accepted ones.

Yi et al. 2024, arXiv 2402.11809; see `adapter` for what a mask is, and docs/how_it_works.md for a round. Mask j
below a node predicts the token that comes j + 2 places after it, since the target itself predicts the next one. Each
place is predicted by the mask of the last accepted node or, where it has none for it, of the nearest node above.

There is no prefill. Without predictions (in the first round, and after a round without masks) the candidates are copies
of what followed the same tokens, if there are any, and the round adds the masks of the root.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor, nn

from ...core.draft import Draft
from ...core.interfaces import DraftBudget, Drafter, DrafterInfo, DraftOptions, Target, Verifier
from ...core.nodes import Tree
from ...core.request import TokenSequence
from ...core.walk import Walk
from ...schema import checked, checked_call
from ...system.hardware import median_seconds
from ..heads.context_ngrams import ContextNgrams
from ..heads.fitting import read_head
from ..heads.top_tokens import TokenRanking
from ..heads.trees import Children, DynamicTree, Grown, draft_of, grow
from ..spec import HeadSpec
from .adapter import SpaceAdapter

MASK_WORTH = 0.25
"""What a mask below the last accepted node is worth, in accepted tokens."""
SHORTLIST = 64
"""How many of a mask's top tokens are ranked again by the token before them; others can hardly become the best."""


@dataclass(frozen=True)
class _Predicted:
    """The predictions [d, V] for a sequence of `length` tokens, from the masks below its last token but one."""

    seq: TokenSequence  # a slot is unique within one target only
    length: int
    logits: Tensor


@final
class Space(Drafter):
    """Draft from mask tokens in the target's last pass (SPACE), ranked as in `methods.heads.top_tokens`.

    With a transition, the scores of the `SHORTLIST` best tokens of a mask are corrected by the token before them. The
    confidence in a token is then the probability of the shortlist before the correction, times the token's probability
    in the corrected shortlist. Without a transition the predictions do not depend on the path.

    adapter: a folder that `paceline train` wrote, a packaged name, or a module, of which the target takes a copy.
    top_k: the most candidates after a node; 1 drafts chains.
    ngrams: see `Eagle`.
    """

    name: ClassVar[str] = "space"

    @checked_call
    def __init__(
        self,
        adapter: str | PathLike[str] | SpaceAdapter,
        top_k: Annotated[int, Field(ge=1)] = 4,
        ngrams: bool = True,
    ):
        self.top_k, self._given, self._uses_ngrams = top_k, adapter, ngrams
        self.info = DrafterInfo(branches=top_k + 1)
        self._predicted: dict[int, _Predicted] = {}  # by slot

    def bind(self, target: Target, verifier: Verifier) -> None:
        """Attach the adapter to the target.

        Raises `ConfigError` for a head of another method or a second adapter, `IncompatibleModels` for an adapter of
        other sizes, or with a transition for a target whose output rows cannot be used.
        """
        shape = {size: getattr(target.loaded, size) for size in ("hidden_size", "num_layers", "vocab_size")}
        head = read_head(self._given, SpaceAdapter, target.loaded, **shape)
        rows = target.loaded.output_rows() if head.config.transition_rank else None
        adapter = target.attach_adapter(head)  # first: if it raises, this drafter must stay unchanged
        self._rows, self._target, self._adapter, self._embeddings = rows, target, adapter, target.loaded.embeddings
        ids = torch.arange(target.vocab_size, device=target.loaded.device)
        self._ranking = TokenRanking.of(ids, target, verifier)
        self._ngrams = ContextNgrams(target.banned_token_ids, self._uses_ngrams)
        self._predicted.clear()

    def draft_options(self, seq: TokenSequence) -> Sequence[DraftOptions]:
        """`ready` is how many tokens the last masks predicted; at 0 this round adds masks for the next one."""
        ready = len(self._known(seq))
        return (DraftOptions(self.name, branches=self.info.branches, masks=self._adapter.num_masks, ready=ready),)

    def seconds(self) -> Mapping[str, tuple[float, float]]:
        """Ranking a level; the rows of masks are part of the target's pass. There is no prefill."""
        loaded = self._target.loaded
        logits = torch.zeros(1, self._target.vocab_size, dtype=loaded.dtype, device=loaded.device)

        def rank() -> object:
            if self._rows is None:
                return self._ranking.top(logits, [], 0, self.top_k)
            return self._children(logits, [], 0, [[0] * self.top_k])

        return {self.name: (median_seconds(rank), 0.0)}

    @torch.inference_mode()
    def propose(self, seqs: Sequence[TokenSequence], budgets: Sequence[DraftBudget]) -> Draft:
        """Candidates from the predictions of the last masks, and masks for the next round."""
        known = [self._known(seq) for seq in seqs]
        trees = list[DynamicTree]()
        for seq, budget, logits in zip(seqs, budgets, known, strict=True):
            width, rerank = budget.nodes if self._rows is None else None, self._ngrams.rerank(seq)
            trees.append(DynamicTree(seq.token_ids[-1], budget, self.top_k, len(logits), width, rerank))
        if self._rows is None:
            self._ranking.grow_marginal(trees, seqs, known)
        else:
            self._grow_corrected(trees, seqs, known)
        # The last token of the answer is the target's in any case.
        rows = [
            with_masks(tree.finish(), budget, self._adapter.num_masks, seq.remaining - 2, self._target.vocab_size)
            for tree, budget, seq in zip(trees, budgets, seqs, strict=True)
        ]
        return draft_of(rows, self.name)

    def observe(self, seqs: Sequence[TokenSequence], draft: Draft, logits: Tensor, walks: Sequence[Walk]) -> None:
        """Keep the logits of the masks that predict what follows each row's last accepted node."""
        for row, (tree, seq, walk) in enumerate(zip(draft.tree.rows, seqs, walks, strict=True)):
            self._predicted.pop(seq.slot, None)
            rows = list[int]()
            for distance, node in enumerate(reversed([0, *walk.path])):
                rows += masks_below(tree, node, self._target.vocab_size)[distance + len(rows) :]
            if rows and not seq.is_finished:
                mask_logits = logits[row, rows]
                num_finite = mask_logits.amax(-1).isfinite().cumprod(0).sum()  # those before the first overflow
                # A copy, since a view would keep the whole pass alive.
                self._predicted[seq.slot] = _Predicted(seq, len(seq.token_ids), mask_logits[:num_finite].clone())

    def release(self, slots: Sequence[int]) -> None:
        self._ngrams.release(slots)
        for slot in slots:
            self._predicted.pop(slot, None)

    def _known(self, seq: TokenSequence) -> Tensor:
        """Logits [d, V] of the next d tokens; d = 0 if the last predictions were made for another text."""
        known = self._predicted.get(seq.slot)
        if known is None or known.seq is not seq or known.length != len(seq.token_ids):
            return torch.empty(0, self._target.vocab_size)
        return known.logits

    def _grow_corrected(
        self, trees: Sequence[DynamicTree], seqs: Sequence[TokenSequence], known: Sequence[Tensor]
    ) -> None:
        """Grow the trees, each token ranked by its mask and by the token before it."""

        def children(rows: list[int], level: int) -> Children:
            before = [[trees[row].tokens[node] for node in trees[row].frontier] for row in rows]
            logits = torch.stack([known[row][level] for row in rows])
            return self._children(logits, [seqs[row] for row in rows], level, before)

        grow(trees, children)

    def _children(self, logits: Tensor, seqs: Sequence[TokenSequence], level: int, before: list[list[int]]) -> Children:
        """The best tokens by a mask's logits [R, V] after each parent. before: the parents' tokens for each row."""
        assert self._rows is not None
        columns, logps = self._ranking.best(logits, seqs, level, SHORTLIST)  # [R, K]
        columns, share = columns.long(), logps.logsumexp(-1)  # [R]
        width = max(map(len, before))
        parents = torch.tensor([ids + [0] * (width - len(ids)) for ids in before], device=logits.device)  # [R, F]
        shift = self._adapter.shift(nn.functional.embedding(parents.flatten(), self._embeddings))  # [R F, E]
        assert shift is not None
        correction = (shift.unflatten(0, parents.shape) @ self._rows[columns].mT).float()  # [R, F, K]
        if seqs:
            correction /= self._ranking.divisors(seqs).to(logits.device)[..., None]
        logps = (logps.unsqueeze(1) + correction).log_softmax(-1) + share[:, None, None]
        best = logps.topk(min(self.top_k, logps.shape[-1]))
        tokens = columns.unsqueeze(1).expand_as(logps).gather(-1, best.indices)
        return tokens.tolist(), best.values.tolist()


def with_masks(grown: Grown, budget: DraftBudget, num_masks: int, remaining: int, vocab_size: int) -> Grown:
    """Share the nodes of a budget: the root and the kept candidates, then the masks below each of them.

    A candidate is worth the chance that it is accepted, a mask `MASK_WORTH` times the chance that the node above it is
    the last accepted one. There are as many candidates as leave room for all masks that are worth more than the last of
    them. Nodes that are worth less than `budget.min_probs` ask for are left out. The root's masks are not: without them
    the next round might have nothing to draft from.

    num_masks: the most below a node. remaining: the most tokens that may follow the target's next one.
    """
    tree, confidences = grown
    chance = [1.0]
    for parent, confidence in zip(tree.parents[1:], confidences, strict=True):
        chance.append(chance[parent] * confidence)
    most = [max(0, min(budget.depth, num_masks, remaining - depth)) for depth in tree.depths]
    best = sorted(range(1, len(tree)), key=lambda node: -chance[node])  # ties keep their order: parents come first

    def mask_worths(num_candidates: int) -> dict[int, float]:
        ends = {node: chance[node] for node in (0, *best[:num_candidates])}
        for node in best[:num_candidates]:
            ends[tree.parents[node]] -= chance[node]
        return {node: MASK_WORTH * max(0.0, end) for node, end in ends.items()}

    def is_too_large(num_candidates: int) -> bool:
        least = chance[best[num_candidates - 1]]
        size = num_candidates + sum(most[node] for node, worth in mask_worths(num_candidates).items() if worth >= least)
        return size > budget.nodes or least < budget.min_prob(size - 1)

    num_candidates = bisect_left(range(1, len(best) + 1), True, key=is_too_large)
    worths, size, counts = mask_worths(num_candidates), num_candidates, [0] * len(tree)
    for node in sorted(worths, key=lambda node: -worths[node]):
        while counts[node] < most[node] and size < budget.nodes:
            if node > 0 and worths[node] < budget.min_prob(size):
                break
            counts[node] += 1
            size += 1
    kept = [0, *sorted(best[:num_candidates])]
    candidates = tree.part(kept)
    tokens, parents = [*candidates.token_ids], [*candidates.parents]
    for below, node in enumerate(kept):
        for mask in range(counts[node]):
            parents.append(len(tokens) - 1 if mask else below)
            tokens.append(vocab_size + mask)
    marks = [node >= len(kept) for node in range(len(tokens))]
    return Tree.of(tokens, parents, marks), [confidences[node - 1] for node in kept[1:]]


@checked
class SpaceSpec(HeadSpec):
    """Options of `Space`."""

    top_k: Annotated[int, Field(ge=1, le=64)] | None = None
    method = "space"
    drafter = Space
    tokens = 3
    draws_tree = True


def masks_below(tree: Tree, node: int, vocab_size: int) -> range:
    """The masks of a node, which are adjacent; empty where it has none."""
    tokens = tree.token_ids
    first = next((i for i, up in enumerate(tree.parents) if up == node and tokens[i] == vocab_size), len(tokens))
    end = first
    while end < len(tokens) and tokens[end] == vocab_size + end - first:
        end += 1
    return range(first, end)
