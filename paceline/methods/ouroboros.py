"""Ouroboros: a draft model that drafts phrases, and a pool of phrases from rejected drafts.

Zhao et al. 2024 (arXiv 2402.13720); docs/how_it_works.md shows a round. A phrase is an n-gram of a pool, looked up by
its first token. Phrases save passes of the draft model and lengthen the draft. New ones are made of the target's tokens
after the drafted tokens, rejected ones included. Drafts are verified as a point mass.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor

from ..core.draft import Draft
from ..core.interfaces import DraftBudget, Drafter, DraftOptions, Target, Verifier
from ..core.nodes import Tree
from ..core.request import TokenSequence
from ..core.tree import TokenTree
from ..core.walk import Walk
from ..errors import ConfigError, IncompatibleModels
from ..hf.fingerprint import hash_vocabulary
from ..sampling.scores import argmax
from ..schema import checked, checked_call
from .draft_model.drafter import DraftModel, DraftModelSpec
from .ngram_pool import NgramPool, PoolSize, add_branches
from .spec import DrafterSpec
from .tenants import PerTenant

PhraseTokens = Annotated[int, Field(ge=2, le=16)]
Phrases = Annotated[int, Field(ge=1, le=16)]


@final
class Ouroboros(Drafter):
    """Draft with a draft model and phrases.

    The pool is shared by all requests of a tenant, and lives as long as the drafter.

    draft: the draft model. With another tokenizer it drafts by intersection, and phrases have only common tokens.
    ngram: N, the tokens of a phrase, its key included. At most a third of a draft is its phrase suffix.
    phrases: K, the most phrases after a token, both in a pass of the draft model and at the end of the draft.
    pool_size: the most phrases of a pool, of about 500 bytes each.
    pool_file: a file that `save` wrote, to start each pool with its phrases. It must be of the target's tokenizer.
    """

    name: ClassVar[str] = "ouroboros"

    @checked_call
    def __init__(
        self,
        draft: DraftModel,
        ngram: PhraseTokens = 5,
        phrases: Phrases = 3,
        pool_size: PoolSize = 65536,
        pool_file: str | Path | None = None,
    ):
        if draft.inner_drafter is not None:
            message = "the draft model of Ouroboros drafts with phrases, and cannot have another drafter"
            raise ConfigError(message, fix="leave inner_drafter out")
        self.draft, self.ngram, self.phrases, self.pool_size, self._file = draft, ngram, phrases, pool_size, pool_file
        self.info = replace(draft.info, branches=phrases)
        self.pools = PerTenant(partial(NgramPool, ngram, phrases, pool_size))
        self._num_read: dict[int, int] = {}  # by slot, where the next n-gram of the text starts

    def bind(self, target: Target, verifier: Verifier) -> None:
        """Load the draft model and the pool.

        Raises as `DraftModel.bind`; `ConfigError` for a file of another kind; `IncompatibleModels` for one of another
        tokenizer, and for a draft model that drafts by strings, which cannot verify phrases.
        """
        self.draft.bind(target, verifier)
        translation = self.draft.translation
        common = None if translation is None else translation.common
        if translation is not None and common is None:
            raise IncompatibleModels(
                "the draft model of Ouroboros has another tokenizer than the target and drafts by strings",
                got=self.draft.runner.loaded.name,
                expected="a draft model whose vocabulary has tokens in common with the target's",
                fix='use vocabulary="intersection", or model:PATH without phrases',
            )
        # The draft model verifies phrases, so they may only have tokens of its vocabulary.
        runner, vocab_size = self.draft.runner, target.vocab_size
        banned_token_ids = target.banned_token_ids | runner.banned_token_ids
        if translation is None or common is None:
            vocab_size = min(vocab_size, runner.vocab_size)
        else:
            translation.mode = "intersection"
            banned_token_ids |= frozenset(range(vocab_size)).difference(common.draft_ids)
        pool = NgramPool(self.ngram, self.phrases, self.pool_size, banned_token_ids, vocab_size)
        tokenizer = target.loaded.tokenizer
        self._vocabulary = f"{target.vocab_size} tokens" if tokenizer is None else hash_vocabulary(tokenizer)
        if self._file is not None:
            pool.load(self._file, self._vocabulary)
        self.pools = PerTenant(partial(deepcopy, pool))
        self.draft.chains = replace(self.draft.chains, phrases=lambda seq, token: self.pools.of(seq).after(token))
        self._num_read.clear()

    @property
    def pool(self) -> NgramPool:
        """The pool of requests that name no tenant."""
        return self.pools.of_tenant("")

    def save(self, path: str | Path) -> None:
        """Write the phrases of `pool` to a JSON file, which holds parts of prompts and answers."""
        self.pool.save(path, self._vocabulary)

    def draft_options(self, seq: TokenSequence) -> Sequence[DraftOptions]:
        return [replace(options, source=self.name, branches=self.phrases) for options in self.draft.draft_options(seq)]

    def seconds(self) -> Mapping[str, tuple[float, float]]:
        """Those of the draft model without phrases."""
        return {self.name: self.draft.seconds()[self.draft.name]}

    def propose(self, seqs: Sequence[TokenSequence], budgets: Sequence[DraftBudget]) -> Draft:
        for seq in seqs:
            self._num_read[seq.slot] = self.pools.of(seq).read(seq.token_ids, self._num_read.get(seq.slot, 0))
        # With phrases a token costs less than the policy assumes, so the policy must not stop the draft.
        chained = [replace(b, depth=b.depth - self._suffix(b), should_continue=None) for b in budgets]
        chains = self.draft.propose(seqs, chained).tree
        tokens, parents = [[*row.token_ids] for row in chains.rows], [[*row.parents] for row in chains.rows]
        for seq, budget, ids, ups in zip(seqs, budgets, tokens, parents, strict=True):
            drafted = len(ids) - 1
            if drafted and not seq.would_end(ids[-1], drafted):
                length = min(self._suffix(budget), budget.depth - drafted)
                add_branches(ids, ups, self.pools.of(seq).after(ids[-1]), seq, drafted + 1, length, budget.nodes)
        return Draft(TokenTree.from_lists(tokens, parents), source=self.name)

    @torch.inference_mode()
    def observe(self, seqs: Sequence[TokenSequence], draft: Draft, logits: Tensor, walks: Sequence[Walk]) -> None:
        """Add phrases from the verified rows to the pools, then let the draft model observe."""
        verified = draft.tree.trimmed()
        top_tokens = argmax(logits[:, : verified.num_nodes]).tolist()
        for seq, tree, tokens in zip(seqs, verified.rows, top_tokens, strict=True):
            recycle(self.pools.of(seq), tree, tokens)
        self.draft.observe(seqs, draft, logits, walks)

    def release(self, slots: Sequence[int]) -> None:
        self.draft.release(slots)
        self.pools.release(slots)
        for slot in slots:
            self._num_read.pop(slot, None)

    def _suffix(self, budget: DraftBudget) -> int:
        return min(self.ngram - 1, budget.depth // 3)


def recycle(pool: NgramPool, tree: Tree, top_tokens: Sequence[int]) -> None:
    """Add each run of drafted tokens that the target confirms, wherever it begins, with the target's token after it.

    top_tokens: the target's token after each node of the tree.
    """
    for start in tree.candidates:
        gram, node = [tree.token_ids[start]], start
        while node is not None and len(gram) < pool.ngram:
            gram.append(top_tokens[node])
            node = tree.child(node, gram[-1])
        if len(gram) == pool.ngram:
            pool.add(gram)


@checked
class OuroborosSpec(DraftModelSpec):
    """Options of `Ouroboros`: those of its draft model, and its own."""

    ngram: PhraseTokens = 5
    phrases: Phrases = 3
    pool_size: PoolSize = 65536
    pool_file: str | None = None
    method = "ouroboros"
    drafter = Ouroboros
    tokens = 12

    @property
    def name(self) -> str:
        return f"{self.method}:{super().name}"

    def tree_nodes(self, depth: int) -> int:
        """The draft and all phrases after it."""
        return depth + (self.phrases - 1) * min(self.ngram - 1, depth // 3)

    def build(self) -> Ouroboros:
        options = {key: value for key, value in self.as_dict().items() if value is not None}
        pool_options = {key: options.pop(key, None) for key in ("ngram", "phrases", "pool_size", "pool_file")}
        return Ouroboros(DraftModel(**options), **pool_options)  # type: ignore[arg-type]

    def elsewhere(self, tokens: int) -> dict[str, tuple[str, str]]:
        return DrafterSpec.elsewhere(self, tokens)
