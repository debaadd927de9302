"""Drafts chains with a model, for the draft model, Ouroboros and the quantised self-draft."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch
from torch import Tensor

from ...core.draft import Draft, Law
from ...core.interfaces import DraftBudget, InnerDecoder, Target
from ...core.request import SamplingParams, TokenSequence
from ...core.tree import TokenTree
from ...core.vision import VisionPrompt
from ...errors import NumericsError
from ...sampling.draft_sampler import DraftSampler, confidence
from ...sampling.scores import before_banned
from ..heads.trees import padded_confidences, up_to_end
from ..ngram_pool import add_branches


class Runner(Target, Protocol):
    """What drafting with a model takes: `target.runner.ModelRunner`, as `Target.run_model` gives it."""

    chunk: int
    settings: Any
    images: Any
    states: Any
    spans_of: Any
    forward: Callable[[Sequence[int], TokenTree], Tensor]
    commit: Callable[[Sequence[int], Sequence[Sequence[int]]], None]
    prefill: Callable[[int, Sequence[int], VisionPrompt | None, str], None]
    extend_cache: Callable[[int, Sequence[int]], None]
    set_offset: Callable[[int, VisionPrompt | None], None]
    tentative: Callable[[Sequence[int]], AbstractContextManager[None]]
    pass_seconds: Callable[[int], float]
    prefill_seconds: Callable[[], float]


class CommonTokens:
    """The tokens that both a target and a draft have. draft_ids: from the target's id to the draft's."""

    def __init__(self, draft_ids: Mapping[int, int], device: torch.device):
        self.draft_ids = draft_ids
        self._target = torch.tensor([*draft_ids], device=device)
        self._draft = torch.tensor([*draft_ids.values()], device=device)

    def spread(self, logits: Tensor, vocab_size: int) -> Tensor:
        """The draft's logits [B, Vd] as logits over the target's vocabulary [B, V]; -inf for all other tokens."""
        spread = logits.new_full((len(logits), vocab_size), -torch.inf)
        return spread.index_copy_(1, self._target, logits.index_select(1, self._draft))


@dataclass(eq=False)
class _Row:
    """The unfinished chain of one sequence.

    feed: the input of the next pass, in the draft's tokens.
    children: the nodes of that pass that belong to phrases, by parent and target token.
    path: the nodes of that pass that are text or drafted; the logits of the last one give the next token.
    is_open: whether more tokens may be drafted.
    """

    seq: TokenSequence
    budget: DraftBudget
    feed: list[int]
    tokens: list[int] = field(default_factory=list[int])
    confidences: list[float] = field(default_factory=list[float])
    probs: list[Tensor] = field(default_factory=list[Tensor])
    children: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    path: list[int] = field(default_factory=list[int])
    is_open: bool = True

    def append(self, token: int, confidence: float | None, q: Tensor | None) -> bool:
        """Append a drafted token. Returns whether a phrase has it too, so that the pass also gives the next token.

        token: -1 where the model gave no distribution, which ends the draft.
        """
        if token < 0:
            self.is_open = False
            return False
        self.tokens.append(token)
        if confidence is not None:
            self.confidences.append(confidence)
        if q is not None:
            self.probs.append(q)
        should_continue = self.budget.should_continue
        if len(self.tokens) >= self.budget.depth or self.seq.would_end(token, len(self.tokens)):
            self.is_open = False
        elif should_continue is not None:
            self.is_open = should_continue(self.confidences)
        child = self.children.get((self.path[-1], token)) if self.is_open else None
        if child is not None:
            self.path.append(child)
        return child is not None


@final
@dataclass(frozen=True, eq=False)
class Chains:
    """Drafts chains with a model.

    vocab_size: that of the target, whose tokens are drafted.
    common: the common tokens, if the runner has another vocabulary.
    phrases: returns phrases that may follow a target token in a sequence. A pass verifies them after its last token, so
        that it can yield several tokens: the draft is the same as without phrases, in fewer passes.
    decoder: decodes with the runner and a drafter for it, to the same effect; None: there is no such drafter.
    """

    runner: Runner
    sampler: DraftSampler
    vocab_size: int
    source: str
    common: CommonTokens | None = None
    phrases: Callable[[TokenSequence, int], Sequence[Sequence[int]]] | None = None
    decoder: InnerDecoder | None = None

    def logits(self, draft_logits: Tensor) -> Tensor:
        """The runner's logits [B, V'] as logits over the target's vocabulary [B, V]; -inf for tokens that it lacks."""
        if self.common is not None:
            return self.common.spread(draft_logits, self.vocab_size)
        missing = self.vocab_size - draft_logits.shape[-1]
        if missing <= 0:
            return draft_logits[..., : self.vocab_size]
        return torch.nn.functional.pad(draft_logits, (0, missing), value=float("-inf"))

    def draft_id(self, token: int) -> int:
        return token if self.common is None else self.common.draft_ids[token]

    def draft(
        self, seqs: Sequence[TokenSequence], budgets: Sequence[DraftBudget], uncached_tokens: Sequence[Sequence[int]]
    ) -> Draft:
        """Draft up to `budgets[b].depth` tokens for each row; the runner's cache keeps them.

        A row ends with a token that would end the answer, or after which `should_continue` of its budget returns False.
        All drafted tokens but the last are cached at the end, so a fully accepted draft leaves two uncached tokens.

        uncached_tokens: for each row the text that the runner has not cached, in its own tokens; the last is the root.

            uncached r-1 r | x1 x2 x3      passes: [r-1 r] -> x1, [x1] -> x2, [x2] -> x3; x3 itself is never fed
            phrase r x1 x2 y                       [r-1 r x1 x2 y] -> x1, x2, x3
        """
        slots, cache = [seq.slot for seq in seqs], self.runner.cache
        with cache.held(slots, [cache.lengths[slot] for slot in slots]):  # what is drafted may be rejected
            if self.decoder is not None:
                return self._decode(self.decoder, seqs, budgets, uncached_tokens)
            return self._draft(seqs, budgets, uncached_tokens)

    def _draft(
        self, seqs: Sequence[TokenSequence], budgets: Sequence[DraftBudget], uncached_tokens: Sequence[Sequence[int]]
    ) -> Draft:
        runner = self.runner
        rows = [_Row(seq, budget, [*ids]) for seq, budget, ids in zip(seqs, budgets, uncached_tokens, strict=True)]
        needs_confidence = any(budget.should_continue is not None for budget in budgets)
        active = [row for row in rows if row.budget.depth > 0 and row.feed]
        while active:
            slots = [row.seq.slot for row in active]
            ids, parents = zip(*[self._next_pass(row) for row in active], strict=True)
            logits = runner.forward(slots, TokenTree.from_lists(ids, parents, runner.loaded.device))
            pending = [*range(len(active))]  # rows whose last node has not been sampled from
            while pending:
                here = [active[i] for i in pending]
                where = torch.tensor([pending, [row.path[-1] for row in here]], device=logits.device)
                row_logits = self.logits(logits[where[0], where[1]])
                counts = [len(row.tokens) for row in here]
                tokens, q = self.sampler.sample(row_logits, [row.seq for row in here], counts)
                sureness = (
                    confidence(row_logits, tokens.clamp(min=0)).tolist() if needs_confidence else [None] * len(here)
                )
                laws = [None] * len(here) if q is None else [*q]
                drawn = zip(pending, tokens.tolist(), sureness, laws, strict=True)
                pending = [i for i, token, sure, law in drawn if active[i].append(token, sure, law)]
            runner.commit(slots, [row.path[1:] for row in active])
            active = [row for row in active if row.is_open]
            for row in active:
                row.feed = [self.draft_id(row.tokens[-1])]
        tree = TokenTree.chain([[row.seq.token_ids[-1], *row.tokens] for row in rows])
        confidences = None
        if needs_confidence:
            confidences = padded_confidences([row.confidences for row in rows], tree.num_nodes)
        if not any(row.probs for row in rows):
            return Draft(tree, source=self.source, confidence=confidences)
        first = next(row.probs for row in rows if row.probs)[0]
        q = first.new_zeros(len(seqs), tree.num_nodes, self.vocab_size)
        for b, row in enumerate(rows):
            if row.probs:
                q[b, : len(row.probs)] = torch.stack(row.probs)
        return Draft(tree, Law.IID, q, self.source, confidence=confidences)

    def _decode(
        self,
        decoder: InnerDecoder,
        seqs: Sequence[TokenSequence],
        budgets: Sequence[DraftBudget],
        uncached: Sequence[Sequence[int]],
    ) -> Draft:
        """`draft` where each chain is a short answer of the decoder. It is a point mass, without confidences.

        Coupled, its tokens have the noise of their positions, as those of `DraftSampler` have; else they are greedy.
        """
        runner, answers = self.runner, dict[int, TokenSequence]()
        for row, (seq, budget, feed) in enumerate(zip(seqs, budgets, uncached, strict=True)):
            if budget.depth > 0 and feed:
                asked = seq.params
                params = SamplingParams(
                    temperature=asked.temperature if self.sampler.coupled else 0.0, top_k=asked.top_k,
                    top_p=asked.top_p, min_p=asked.min_p, max_tokens=budget.depth, ignore_eos=asked.ignore_eos,
                    extra_args=asked.owner,
                )  # fmt: skip
                text = [token if token < runner.vocab_size else 0 for token in seq.token_ids]
                decoder.drafter.release([seq.slot])  # it may have read tokens that were rejected since
                answers[row] = answer = TokenSequence(text, params, seq.seed, seq.eos_ids, 1 << 62, slot=seq.slot)
                if runner.settings.can_fuse_prefill:
                    answer.has_deferred_tokens = len(feed) > 1
                else:
                    runner.extend_cache(seq.slot, feed[:-1])
        while active := [answer for answer in answers.values() if not answer.is_finished and answer.error is None]:
            decoder.step(active)
            for answer in active:
                if answer.error is not None and not isinstance(answer.error, NumericsError):  # that one ends the draft
                    raise answer.error
        banned, drafted = self.sampler.banned_token_ids, [list[int]() for _ in seqs]
        for row, answer in answers.items():
            drafted[row] = up_to_end(seqs[row], before_banned(answer.output_ids, banned))
        tree = TokenTree.chain([[seq.token_ids[-1], *tokens] for seq, tokens in zip(seqs, drafted, strict=True)])
        return Draft(tree, source=self.source)

    def _next_pass(self, row: _Row) -> tuple[list[int], list[int]]:
        """The tokens and parents of a row's next pass: its feed, then phrases."""
        count, done = len(row.feed), len(row.tokens)
        ids, parents, row.path = [*row.feed], [*range(-1, count - 1)], [*range(count)]
        if self.phrases is not None:
            phrases = self.phrases(row.seq, row.tokens[-1] if done else row.seq.token_ids[-1])
            length = row.budget.depth - done - 1  # the last token of a draft is not fed
            row.children = add_branches(ids, parents, phrases, row.seq, done + 1, length, 1 << 30)
            ids[count:] = map(self.draft_id, ids[count:])
        return ids, parents
