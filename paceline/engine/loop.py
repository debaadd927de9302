"""The loop: draft, verify in one target pass, keep what was accepted. Plain decoding is the same without drafts."""

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import replace

import torch

from ..attention.columns import BLOCK
from ..core.draft import Draft
from ..core.interfaces import NOTHING_PROPOSED, DraftBudget, Drafter, DraftPolicy, Verifier, bind_once
from ..core.request import TokenSequence
from ..core.round import Origin, Round
from ..core.shortage import spared
from ..core.tree import TokenTree
from ..core.walk import TargetDistribution, Walk
from ..errors import CacheFull, ConfigError
from ..policy import CostModel
from ..sampling.distribution import target_distribution
from ..sampling.scores import token_logprob
from ..system.hardware import one_thread
from ..target import ModelRunner
from ..verify import Coupled
from . import first_pass
from .contract import bind_policy, call, check_contract
from .forbidden import without_forbidden

_AHEAD = 2 * BLOCK
"""The least columns that a sequence gets beyond its text: reading a text again must be worth it."""


class SpeculativeDecoder:
    """Ties a target, a drafter, a verifier and a policy together; decodes a batch one round at a time."""

    def __init__(self, runner: ModelRunner, drafter: Drafter, verifier: Verifier, policy: DraftPolicy):
        self.runner, self.drafter, self.verifier, self.policy = runner, drafter, verifier, policy
        self.num_rounds, self._learn_s = 0, 0.0
        # These never change, and the model is slow to return them.
        self._device, self._known = runner.loaded.device, (runner.vocab_size, runner.banned_token_ids)
        with runner.lock:
            bind_once(drafter, runner, verifier)
            drafter.bind_inner(lambda own, inner: SpeculativeDecoder(own, inner, Coupled(), CostModel()))
            bind_policy(policy, drafter, runner.pass_seconds, runner.pads_trees, runner.experts)

    @property
    def drafters(self) -> tuple[str, ...]:
        """The names of the drafters, as in results and in `SamplingParams.extra_args["method"]`."""
        return tuple(name for name in self.drafter.labels or (self.drafter.name,) if name != "none")

    def admit(self, seq: TokenSequence, is_used: Callable[[], bool] | None = None) -> Iterator[None]:
        """Give a sequence a slot now; each item then reads a chunk of its text. Others may run in between.

        The last token is not read: it is the first root. The last chunk may be left to the first `step`, see
        `first_pass`. A sequence that was released before its end goes on where it was, see `can_resume`.
        is_used: see `SlotCache.allocate`.
        """
        if not seq.num_output:
            self._check_room(seq)
        self._check_head(seq)
        seq.slot = self.runner.admit(seq.token_ids, seq.vision, is_used)
        self.runner.cache.adapters[seq.slot] = seq.adapter
        if not self.runner.cache.reserved.take(seq.slot, self.first_columns(seq)):
            self.runner.cache.release(seq.slot)
            seq.slot = -1
            raise CacheFull("the cache is full", fix="finish the streams that are open, or raise kv_cache_memory_bytes")
        self.reset_slot(seq.slot)  # an interrupted release may not have done this
        return self._prefill(seq)

    @property
    def can_resume(self) -> bool:
        """Whether a sequence may be released before its end and admitted again, with the tokens that it would have had.

        In native passes the columns of a text have the same bits however they are read. A verifier that changes the
        answers may have promised something of an answer as a whole.
        """
        return self.runner.loaded.is_native and self.verifier.lossless

    def first_columns(self, seq: TokenSequence) -> int:
        """The columns that a sequence reserves with its slot: some more than its text, or all that it may need."""
        length = len(seq.token_ids)
        ahead = min(seq.remaining, max(_AHEAD, length // 4)) if self.can_resume else seq.remaining
        return min(length + ahead, self.runner.cache.reserved.most or length + ahead)

    def has_room(self, seq: TokenSequence, without: Collection[int] = ()) -> bool:
        """Whether a sequence can be admitted, or never can be. without: slots whose columns do not count."""
        cache = self.runner.cache
        if not cache.is_lazy:
            return True
        least = 1 if seq.params.max_tokens is None else seq.remaining
        is_refused = not cache.can_hold(len(seq.token_ids) + least)
        return is_refused or cache.reserved.fits(self.first_columns(seq), without)

    def reserve(self, seq: TokenSequence) -> bool:
        """Reserve the columns of the next round; False where the cache is full."""
        return self.runner.cache.reserved.take(seq.slot, len(seq.token_ids) + min(seq.remaining, BLOCK))

    def has_all(self, seq: TokenSequence) -> bool:
        """Whether a sequence has reserved all the columns that it may need."""
        return self.runner.cache.reserved.of(seq.slot) >= len(seq.token_ids) + seq.remaining

    def _check_room(self, seq: TokenSequence) -> None:
        """Raise `CacheFull` if the memory cannot hold the whole sequence; with `max_tokens=None` shorten it instead."""
        length, cache = len(seq.token_ids), self.runner.cache
        if cache.can_hold(length + seq.remaining):
            return
        most = cache.most_columns()
        if seq.params.max_tokens is not None or length >= most:
            raise CacheFull(
                "a request does not fit into memory",
                got=f"{length} tokens, and {seq.remaining} to come",
                expected=f"at most {most}" + ("" if cache.is_lazy else f" in each of {cache.num_slots} slots"),
                fix="lower max_tokens, max_model_len or max_num_seqs"
                if cache.max_bytes is None
                else "lower max_tokens, or raise kv_cache_memory_bytes",
            )
        seq.max_length = most

    def _check_head(self, seq: TokenSequence) -> None:
        """Raise `ConfigError` for what needs logits of a model that has none."""
        wants_states = seq.reading is not None and not seq.reading.wants_logits
        if getattr(self.runner.loaded.model.config, "lacks_head", False) and not wants_states:
            fix = "use LLM.embed, or /v1/embeddings"
            raise ConfigError("this model makes embeddings alone", got="no output layer in its files", fix=fix)

    def _prefill(self, seq: TokenSequence) -> Iterator[None]:
        is_done, vision_s, chunks = False, 0.0, self._chunks(seq)
        while not is_done:
            begin = time.perf_counter()
            try:
                next(chunks)
            except StopIteration as end:
                is_done, vision_s = True, end.value
            seconds = time.perf_counter() - begin - vision_s
            seq.vision_s += vision_s
            seq.prefill_s += seconds
            if not is_done:
                yield
        seq.has_deferred_tokens = self.runner.cache.lengths[seq.slot] < seq.num_cached

    def _chunks(self, seq: TokenSequence) -> Generator[None, None, float]:
        fuses, keep_states = self.runner.settings.can_fuse_prefill, self.drafter.info.reads_states
        known = ids = seq.token_ids
        reading = None if seq.num_output else seq.reading
        if reading is not None:
            reading.restart()
            fuses, keep_states = False, keep_states and not reading.ends
            known, ids = ids[: reading.first + 1], [*ids[: reading.stop], ids[-1]]
        how = seq.vision, fuses, keep_states
        cached = self.runner.restore_prefix(seq.slot, known, *how, seq.params.tenant)
        if not (seq.rounds or seq.prefill_s):  # its first reading
            seq.num_cached_tokens = cached
        return (yield from self.runner.prefill_chunks(seq.slot, ids, *how, reading))

    def release(self, seq: TokenSequence) -> None:
        """Release the slot, even if the drafter or the policy raises; harmless if there is none."""
        if seq.slot >= 0:
            slot, seq.slot = seq.slot, -1
            try:
                self.runner.keep_prefix(slot, seq.token_ids, seq.vision)
            finally:
                self.runner.cache.release(slot)
                self.reset_slot(slot)

    def reset_slot(self, slot: int) -> None:
        """Drop what the drafter and the policy know of this slot, which is possible at any time."""
        try:
            self.drafter.release([slot])
        finally:
            self.policy.release([slot])

    def can_go_on(self, seq: TokenSequence) -> bool:
        """Whether a sequence is consistent after a round that raised: its text and its cache agree."""
        cached = self.runner.cache.lengths[seq.slot]
        return seq.error is None and (cached == seq.num_cached or (seq.has_deferred_tokens and cached < seq.num_cached))

    @torch.inference_mode()
    def step(self, seqs: Sequence[TokenSequence]) -> None:
        """One round for sequences that are admitted and not finished; each gets at least one token.

        An error that concerns one sequence only, such as a processor that raises, becomes its `TokenSequence.error`.
        """
        keep_states = self.drafter.info.reads_states
        begin = time.perf_counter()
        budgets = self._budgets(seqs)
        draft = self._propose(seqs, budgets)
        drafted = time.perf_counter()
        # one target pass over candidates and probes, and over deferred tokens of prompts
        logits, prefill_s = first_pass.forward(self.runner, seqs, draft.tree.to(self._device), keep_states)
        verified, num_experts = time.perf_counter(), 0 if prefill_s else self.runner.experts_read
        trimmed = draft.trimmed()  # masks and padding at the end are not verified
        with one_thread(logits):
            distribution = target_distribution(logits[:, : trimmed.tree.num_nodes], seqs, trimmed.tree)
            positions = [len(seq.token_ids) for seq in seqs]
            walks = self.verifier.verify(trimmed, distribution, [seq.seed for seq in seqs], positions)
            self.runner.commit([seq.slot for seq in seqs], [walk.path for walk in walks], keep_states)
            emitted = [
                _append(seq, row, walk, draft, logits, distribution)
                for row, (seq, walk) in enumerate(zip(seqs, walks, strict=True))
            ]
            appended = time.perf_counter()
            self.num_rounds += 1
            seconds = {"draft_s": drafted - begin, "verify_s": verified - drafted - sum(prefill_s.values())}
            seconds |= {"rest_s": appended - verified, "learn_s": self._learn_s}
            counts = self.runner.pads_trees, self.num_rounds, num_experts
            records = make_records(draft, walks, emitted, prefill_s, *counts, **seconds)
            for row, (seq, record) in enumerate(zip(seqs, records, strict=True)):
                seq.rounds.append(_with_prompt_seconds(record, seq, prefill_s.get(row, 0.0)))
                if record.with_prompt:  # requests with the same prompt may use it from now on
                    self.runner.keep_prefix(seq.slot, seq.token_ids, seq.vision)
                self.policy.observe(seq, record)
                if seq.is_finished:
                    seq.no_draft_reason = self._no_draft_reason(seq)
            with spared(self.drafter, seqs):
                call(self.drafter, "observe", seqs, draft, logits, walks)
        self._learn_s = time.perf_counter() - appended

    def _budgets(self, seqs: Sequence[TokenSequence]) -> list[DraftBudget]:
        """The policy's budgets, within `TokenSequence.most_drafted`; none where the drafter cannot say what it can do.

        A drafter that reads the states or the cache of the target's pass drafts from the second round on.
        """
        budgets = [DraftBudget(0, 0)] * len(seqs)
        with spared(self.drafter, seqs):
            budgets = [*self.policy.budgets(seqs)]
        for row, (seq, budget) in enumerate(zip(seqs, budgets, strict=True)):
            if budget.depth == budget.nodes == 0:
                continue
            info = self.drafter.info.member(budget.drafter_index)
            must_wait = seq.has_deferred_tokens and not info.drafts_during_prefill
            depth = 0 if must_wait else max(0, min(budget.depth, budget.nodes, seq.most_drafted))
            seq.had_budget |= depth > 0
            if depth == 0 or depth < budget.depth:
                budgets[row] = replace(budget, depth=depth, nodes=budget.nodes if depth else 0)
        return budgets

    def _propose(self, seqs: Sequence[TokenSequence], budgets: list[DraftBudget]) -> Draft:
        """The drafter's draft, checked and without tokens that grammars forbid.

        Empty if no row may draft, or if the drafter cannot.
        """
        if any(budget.depth for budget in budgets):
            with spared(self.drafter, seqs):
                draft: Draft = call(self.drafter, "propose", seqs, tuple(budgets))
                vocab_size, banned_token_ids = self._known
                check_contract(draft, seqs, budgets, vocab_size, self.runner.num_masks, banned_token_ids, self.drafter)
                return without_forbidden(draft, seqs)
        return Draft(TokenTree.chain([[seq.token_ids[-1]] for seq in seqs]), source=self.drafter.name)

    def _no_draft_reason(self, seq: TokenSequence) -> str | None:
        """Why nothing was drafted for a sequence; None where something was, or the reason is not known."""
        if any(record.num_nodes for record in seq.rounds):
            return None
        return NOTHING_PROPOSED if seq.had_budget else self.policy.no_draft_reason(seq)


def _append(
    seq: TokenSequence, row: int, walk: Walk, draft: Draft, logits: torch.Tensor, distribution: TargetDistribution
) -> int:
    """Append the accepted tokens and the target's own token to a sequence, up to its end; returns how many.

    If the walk ends at a node without a distribution before the sequence ends, the sequence gets the node's error.
    """
    seq.has_deferred_tokens, before = False, seq.num_output
    tree = draft.tree.rows[row]
    last = Origin.BONUS if walk.is_bonus else Origin.RECOVERED
    last = Origin.PLAIN if len(tree.candidates) == 1 else last
    emitted = [(tree.token_ids[node], Origin.DRAFTED, draft.source_of(row)) for node in walk.path]
    if walk.next_token >= 0:
        emitted.append((walk.next_token, last, ""))
    nodes, number, k = [0, *walk.path], seq.num_output + len(walk.path) + 1, seq.params.logprobs
    try:
        for parent, (token, origin, source) in zip(nodes, emitted, strict=False):
            logprob = None if k is None else token_logprob(logits[row, parent], token, k)
            if seq.append(token, origin, source, logprob):
                break
        else:
            if walk.next_token < 0:
                seq.error = distribution.error(row, nodes[-1], number)
    except Exception as error:  # of this sequence alone: a stop string, a grammar, a processor
        seq.error = error
    return seq.num_output - before


def _with_prompt_seconds(record: Round, seq: TokenSequence, prefill_s: float) -> Round:
    """The record with the seconds before it, if it is the first one in its slot. prefill_s: of the end of the text."""
    before = {"queue_s": seq.queue_s, "vision_s": seq.vision_s, "prefill_s": seq.prefill_s + prefill_s}
    seq.queue_s = seq.vision_s = seq.prefill_s = 0.0
    return replace(record, **before) if any(before.values()) else record


def make_records(
    draft: Draft,
    walks: list[Walk],
    emitted: list[int],
    with_prompt: Collection[int] = (),
    pads_trees: bool = True,
    number: int = 0,
    num_experts: int = 0,
    **seconds: float,
) -> list[Round]:
    """One record for each row of the batch, without probes and padding.

    emitted: how many tokens each row got. with_prompt: the rows whose pass read the end of their prompt.
    pads_trees: whether the pass computed as many rows for each tree as for the largest.
    number, num_experts, seconds: of the round, see `Round`.
    """
    confidence = None if draft.confidence is None else draft.confidence.tolist()
    records = []
    for row, (tree, (path, _, _)) in enumerate(zip(draft.tree.rows, walks, strict=True)):
        nodes = tree.candidates
        verified = tree.part(nodes)
        given = () if confidence is None else tuple(confidence[row][node] for node in nodes[1:])
        records.append(
            Round(
                draft.source_of(row),
                num_drafted=max(verified.depths),
                num_accepted=len(path),
                num_emitted=emitted[row],
                token_ids=tuple(verified.token_ids),
                parents=tuple(verified.parents),
                path=tuple(nodes.index(node) for node in path),
                confidences=() if any(c != c for c in given) else given,
                hint=0 if draft.hints is None else draft.hints[row],
                batch=len(walks),
                num_probes=len(tree) - len(nodes),
                num_rows=draft.tree.num_nodes if pads_trees else len(tree),
                with_prompt=row in with_prompt,
                num_experts=num_experts,
                number=number,
                **seconds,
            )
        )
    return records
