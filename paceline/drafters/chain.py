"""Drafting a chain with a model, one token a pass: shared by the draft model and the quantised self-draft."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from ..core.draft import Draft, Law
from ..core.interfaces import DraftBudget
from ..core.request import Sequence
from ..core.tree import TokenTree
from ..runner import ModelRunner
from ..sampling.draft_sampler import DraftSampler, confidence
from .trees import padded_confidences


class CommonTokens:
    """Tokens that a target and a draft both have under different ids. draft_ids: the draft's id by the target's."""

    def __init__(self, draft_ids: Mapping[int, int], device: torch.device):
        self.draft_ids = draft_ids
        self._target = torch.tensor([*draft_ids], device=device)
        self._draft = torch.tensor([*draft_ids.values()], device=device)

    def spread(self, logits: Tensor, vocab_size: int) -> Tensor:
        """The draft's logits [B, Vd] as logits over the target's vocabulary [B, V]; -inf for all other tokens."""
        spread = logits.new_full((len(logits), vocab_size), -torch.inf)
        return spread.index_copy_(1, self._target, logits.index_select(1, self._draft))


@final
@dataclass(frozen=True, eq=False)
class Chains:
    """Drafts chains with a model.

    vocab_size: of the target, whose tokens are drafted.
    common: for a runner with another vocabulary.
    """

    runner: ModelRunner
    sampler: DraftSampler
    vocab_size: int
    source: str
    common: CommonTokens | None = None

    def logits(self, own: Tensor) -> Tensor:
        """The runner's logits [B, V'] as logits over the target's vocabulary [B, V], -inf where it has no token."""
        if self.common is not None:
            return self.common.spread(own, self.vocab_size)
        missing = self.vocab_size - own.shape[-1]
        if missing <= 0:
            return own[..., : self.vocab_size]
        return torch.nn.functional.pad(own, (0, missing), value=float("-inf"))

    def own_id(self, token: int) -> int:
        return token if self.common is None else self.common.draft_ids[token]

    def draft(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget], uncached_tokens: Seq[Seq[int]]) -> Draft:
        """Draft up to `budgets[b].depth` tokens for each row, which the runner's cache keeps.

        uncached_tokens: the runner's tokens of each row that it has not cached yet; the last is the root. All drafted
        tokens but the last are cached at the end, so a fully accepted draft leaves two uncached tokens.

        Where a budget has `should_continue` the draft's confidences are noted, and a row ends with the token that stops
        it. It also ends with a token that would end the answer.

            uncached r-1 r | x1 x2 x3      passes: [r-1 r] -> x1, [x1] -> x2, [x2] -> x3; x3 itself is never fed
        """
        runner = self.runner
        drafted: list[list[int]] = [[] for _ in seqs]
        probs: list[list[Tensor]] = [[] for _ in seqs]
        confidences: list[list[float]] = [[] for _ in seqs]
        weighs = any(budget.should_continue is not None for budget in budgets)
        active = [b for b, budget in enumerate(budgets) if budget.depth > 0 and uncached_tokens[b]]
        feed = [list(p) for p in uncached_tokens]
        while active:
            slots = [seqs[b].slot for b in active]
            tree = TokenTree.chain([feed[b] for b in active], runner.loaded.device)
            logits = runner.forward(slots, tree)
            runner.commit(slots, [range(1, len(feed[b])) for b in active])
            last = torch.tensor([len(feed[b]) - 1 for b in active], device=logits.device)
            logits = self.logits(logits[torch.arange(len(active), device=logits.device), last])
            # Rows keep pace with one another, so the offset of one is the offset of all.
            tokens, q = self.sampler.sample(logits, [seqs[b] for b in active], len(drafted[active[0]]))
            given = confidence(logits, tokens).tolist() if weighs else []
            for i, (b, token) in enumerate(zip(active, tokens.tolist(), strict=True)):
                drafted[b].append(token)
                confidences[b] += given[i : i + 1]
                feed[b] = [self.own_id(token)]
                if q is not None:
                    probs[b].append(q[i])
            active = [b for b in active if _continues(seqs[b], drafted[b], budgets[b], confidences[b])]
        tree = TokenTree.chain([[seq.token_ids[-1], *tokens] for seq, tokens in zip(seqs, drafted, strict=True)])
        weighed = padded_confidences(confidences, tree.num_nodes) if weighs else None
        if not any(probs):
            return Draft(tree, source=self.source, confidence=weighed)
        first = next(row for row in probs if row)[0]
        q = first.new_zeros(len(seqs), tree.num_nodes, self.vocab_size)
        for b, row in enumerate(probs):
            if row:
                q[b, : len(row)] = torch.stack(row)
        return Draft(tree, Law.IID, q, self.source, confidence=weighed)


def _continues(seq: Sequence, drafted: list[int], budget: DraftBudget, confidences: list[float]) -> bool:
    if len(drafted) >= budget.depth or seq.would_end(drafted[-1], len(drafted)):
        return False
    return budget.should_continue is None or budget.should_continue(confidences)
