"""Lookahead decoding: probes in the target's pass generate n-grams; those that begin with the last token are drafted.

Fu et al. 2024 (arXiv 2402.02057). docs/how_it_works.md shows the window: N - 1 rows of W columns, which are probes of
the tree. Row r, column j guesses the token r + j places after the last one.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, TypeAlias, final

import torch
from pydantic import Field
from torch import Tensor

from ..core.draft import Draft
from ..core.interfaces import DraftBudget, Drafter, DrafterInfo, DraftOptions, Target, Verifier
from ..core.request import TokenSequence
from ..core.tree import TokenTree
from ..core.walk import Walk
from ..errors import ConfigError
from ..sampling.scores import argmax
from ..schema import checked, checked_call
from .ngram_pool import NgramPool, PoolSize, Scope, add_branches
from .spec import DrafterSpec
from .tenants import PerTenant

WindowSize: TypeAlias = Annotated[int, Field(ge=1, le=64)]
NgramSize: TypeAlias = Annotated[int, Field(ge=2, le=16)]
NumGuesses: TypeAlias = Annotated[int, Field(ge=1, le=64)]


@dataclass
class _State:
    """The state of a slot.

    rows: the window; its first token is replaced by the text's last one.
    num_read: where the next n-gram of the text starts.
    ends: the last node of each column in the proposed tree; empty if the tree had no window.
    candidates: how many nodes precede the window in that tree, the root included.
    """

    pool: NgramPool
    rows: list[list[int]]
    num_read: int
    ends: list[int] = field(default_factory=list[int])
    candidates: int = 0


@final
class Lookahead(Drafter):
    """Draft n-grams that the target itself guessed in the window of earlier passes.

    Each round that drafts adds up to W (N - 1) - 1 rows to the target's pass for the window, whatever the budget; the
    policy counts them. It pays if such rows are nearly free, as on a GPU that decodes one text.

    window: W, the columns of the window.
    ngram: N, the tokens of an n-gram: one to look up and N - 1 to draft.
    guesses: G, the most n-grams that are drafted in a round.
    pool: "request" keeps n-grams of the answer, "prompt" those of its prompt too, "shared" those of all requests
        of a tenant.
    pool_size: the most n-grams of one pool, of at most 400 + 40 N bytes each. "shared" has one pool per tenant, the
        others have one per slot.
    """

    name: ClassVar[str] = "lookahead"

    @checked_call
    def __init__(
        self,
        window: WindowSize = 7,
        ngram: NgramSize = 5,
        guesses: NumGuesses = 7,
        pool: Scope = "prompt",
        pool_size: PoolSize = 8192,
    ):
        self.window, self.ngram, self.guesses, self.pool, self.pool_size = window, ngram, guesses, pool, pool_size
        self.info = DrafterInfo(branches=guesses, drafts_during_prefill=True)
        self._states: dict[int, _State] = {}  # by slot
        self._shared = PerTenant(self._new_pool)

    def bind(self, target: Target, verifier: Verifier) -> None:
        """Start with an empty pool. Raises `ConfigError` if the window does not fit into the context."""
        if self.window + self.ngram > target.max_length:
            raise ConfigError(
                "the window of Lookahead is wider than the context",
                got=f"window {self.window}, ngram {self.ngram}",
                expected=f"window + ngram <= {target.max_length}",
            )
        super().bind(target, verifier)
        self._states.clear()
        self._shared = PerTenant(self._new_pool)

    def draft_options(self, seq: TokenSequence) -> Sequence[DraftOptions]:
        """The hint is -1 if no n-gram of the pool begins with the last token."""
        state = self._read(seq)
        hint = 0 if state.pool.after(seq.token_ids[-1]) else -1
        probes = sum(map(len, state.rows)) - 1 if self._has_room(seq, state) else 0
        return (DraftOptions(self.name, hint, branches=self.guesses, probes=probes, ready=self.ngram - 1),)

    def propose(self, seqs: Sequence[TokenSequence], budgets: Sequence[DraftBudget]) -> Draft:
        """Candidates from the pool, newest first, then the window; nothing for a budget of 0."""
        tokens, parents, probes = list[list[int]](), list[list[int]](), list[list[bool]]()
        for seq, budget in zip(seqs, budgets, strict=True):
            ids, ups, state = [seq.token_ids[-1]], [-1], self._read(seq)
            if budget.depth > 0:
                add_branches(ids, ups, state.pool.after(ids[0]), seq, 1, budget.depth, budget.nodes)
            candidates = state.candidates = len(ids)
            if budget.depth > 0 and self._has_room(seq, state):
                state.rows[0][0] = ids[0]
                state.ends = add_window(ids, ups, state.rows)
            tokens.append(ids)
            parents.append(ups)
            probes.append([node >= candidates for node in range(len(ids))])
        return Draft(TokenTree.from_lists(tokens, parents, probes=probes), source=self.name)

    @torch.inference_mode()
    def observe(self, seqs: Sequence[TokenSequence], draft: Draft, logits: Tensor, walks: Sequence[Walk]) -> None:
        """Advance each window by the target's top tokens after its last row, and add its n-grams to the pool."""
        known = [(row, self._states[seq.slot]) for row, seq in enumerate(seqs) if seq.slot in self._states]
        with_window = [(row, state) for row, state in known if state.ends]
        if not with_window:
            return
        rows, nodes = list[int](), list[int]()
        for row, state in with_window:
            dropped = state.candidates - len(draft.tree.rows[row].candidates)
            rows += [row] * len(state.ends)
            nodes += [node - dropped if node else 0 for node in state.ends]
        top_tokens = argmax(logits[rows, nodes]).tolist()
        for _, state in with_window:
            count = len(state.ends)
            state.rows = next_rows(state.rows, top_tokens[:count], state.pool)
            del top_tokens[:count]
            state.ends = []

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._states.pop(slot, None)
        self._shared.release(slots)

    def _new_pool(self) -> NgramPool:
        return NgramPool(self.ngram, self.guesses, self.pool_size, self.banned_token_ids)

    def _read(self, seq: TokenSequence) -> _State:
        """The state of a sequence, after adding all n-grams of the text so far to its pool."""
        state = self._states.get(seq.slot)
        if state is None:
            # Jacobi iteration may start anywhere; the authors start with tokens of the prompt, too.
            text = [token for token in seq.token_ids if token not in self.banned_token_ids]
            row = random.Random(seq.seed).choices(text or seq.token_ids[-1:], k=self.window + self.ngram - 2)
            begin = len(seq.prompt_ids) if self.pool == "request" else 0
            pool = self._shared.of(seq) if self.pool == "shared" else self._new_pool()
            state = self._states[seq.slot] = _State(pool, [row], begin)
        state.num_read, state.ends = state.pool.read(seq.token_ids, state.num_read), []
        return state

    def _has_room(self, seq: TokenSequence, state: _State) -> bool:
        """Whether all positions of the window are within the context."""
        return len(seq.token_ids) + len(state.rows[0]) + len(state.rows) - 2 <= seq.max_length


def add_window(ids: list[int], parents: list[int], rows: Sequence[Sequence[int]]) -> list[int]:
    """Add the window to a tree, below its root, which is its first token; returns the last node of each column."""
    top = [0]
    for token in rows[0][1:]:
        ids.append(token)
        parents.append(top[-1])
        top.append(len(ids) - 1)
    ends = list[int]()
    for column, node in enumerate(top):
        for row in rows[1:]:
            ids.append(row[column])
            parents.append(node)
            node = len(ids) - 1
        ends.append(node)
    return ends


def next_rows(rows: list[list[int]], last: list[int], pool: NgramPool) -> list[list[int]]:
    """The window after a pass. last: the target's tokens after the last row, which become the next row."""
    rows = [*rows, last]
    if len(rows) < pool.ngram:  # not all rows yet
        return [row[1:] for row in rows]
    for column in zip(*rows, strict=True):
        pool.add(column)
    return rows[1:]


@checked
class LookaheadSpec(DrafterSpec):
    """Options of `Lookahead`."""

    window: WindowSize = 7
    ngram: NgramSize = 5
    guesses: NumGuesses = 7
    pool: Scope = "prompt"
    pool_size: PoolSize = 8192
    method = "lookahead"
    drafter = Lookahead
    tokens = 4

    def tree_nodes(self, depth: int) -> int:
        return max(depth, self.guesses * min(depth, self.ngram - 1))
