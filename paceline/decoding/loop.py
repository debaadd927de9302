"""One step of speculative decoding: draft, verify in one target pass, keep what the target would have said.

Every method of the field is a drafter in this loop; plain decoding is the drafter that proposes nothing.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from ..core.draft import Draft
from ..core.interfaces import DraftBudget, Drafter, DraftPolicy, Verifier, bind_once
from ..core.outputs import Origin, TargetDistribution, TargetOutput, Timings, VerifyOutput
from ..core.request import Sequence
from ..runner import ModelRunner
from ..sampling import target_distribution, token_logprob
from . import first_pass
from .contract import check_draft, naming
from .record import records_of


class SpeculativeDecoder:
    """Ties a target, a drafter, a verifier and a policy together; decodes a batch one round at a time."""

    def __init__(self, runner: ModelRunner, drafter: Drafter, verifier: Verifier, policy: DraftPolicy):
        self.runner, self.drafter, self.verifier, self.policy = runner, drafter, verifier, policy
        self.timings = Timings()
        # These never change, and asking the model for them is slow.
        self._device, self._known = runner.loaded.device, (runner.vocab_size, runner.banned_token_ids)
        with runner.lock:
            bind_once(drafter, runner, verifier)
            policy.bind(drafter, runner.pass_seconds)

    def admit(self, seq: Sequence, is_used: Callable[[], bool] | None = None) -> None:
        """Give a sequence a slot and read its prompt, all but the last token, which is the first root.

        The last chunk is left to the first `step`, where one pass can take both, see `first_pass`.
        is_used: as in `SlotCache.allocate`.
        """
        begin = time.perf_counter()
        self.runner.states.kept = self.drafter.info.reads_states
        seq.slot = self.runner.admit(seq.token_ids, seq.vision, is_used)
        self._forget(seq.slot)  # what an interrupted release may have left behind
        seeing = self.runner.read(seq.slot, seq.token_ids, seq.vision, self.runner.can_fuse_prefill)
        seq.is_unread = self.runner.cache.lengths[seq.slot] < len(seq.token_ids) - 1
        self.timings.vision += seeing
        self.timings.prefill += time.perf_counter() - begin - seeing

    def release(self, seq: Sequence) -> None:
        """Give the slot back, whatever the drafter does about it; harmless when there is none."""
        if seq.slot >= 0:
            slot, seq.slot = seq.slot, -1
            self.runner.cache.release(slot)
            self._forget(slot)

    def _forget(self, slot: int) -> None:
        try:
            self.drafter.release([slot])
        finally:
            self.policy.release([slot])

    @torch.inference_mode()
    def step(self, seqs: Seq[Sequence]) -> None:
        """One round for sequences that are admitted and not finished; each gains at least one token."""
        slots = [seq.slot for seq in seqs]
        self.runner.states.kept = self.drafter.info.reads_states  # decoders of several kinds may share the runner
        t0 = time.perf_counter()
        budgets = [self._cut(seq, wish) for seq, wish in zip(seqs, self.policy.budgets(seqs), strict=True)]
        with naming(self.drafter, "propose"):
            draft = self.drafter.propose(seqs, budgets)
        t1 = time.perf_counter()
        draft_s = t1 - t0
        vocab_size, banned_token_ids = self._known
        check_draft(draft, seqs, budgets, vocab_size, self.runner.num_masks, banned_token_ids, self.drafter)
        tree = draft.tree.to(self._device)
        # one target pass over candidates and probes, and over the end of a prompt that is still unread
        out, with_prompt, reading = first_pass.forward(self.runner, seqs, tree)
        t2 = time.perf_counter()
        verify_s = t2 - t1 - reading
        judged = draft.trimmed()  # masks and padding at the end have no law that anybody needs
        logits = out.logits if judged is draft else out.logits[:, : judged.tree.num_nodes]
        law = target_distribution(logits, seqs, judged.tree)
        positions = [len(seq.token_ids) for seq in seqs]
        verdict = self.verifier.verify(judged, law, [seq.seed for seq in seqs], positions)
        paths = [walk.path for walk in verdict.walks]
        self.runner.commit(slots, paths)  # keep the accepted rows, forget the rest
        for seq in seqs:
            seq.is_unread = False
        emitted = self._append(seqs, draft, out, law, verdict)
        seconds = (draft_s, verify_s, time.perf_counter() - t2)
        for seq, record in zip(seqs, records_of(draft, paths, emitted, with_prompt, seconds), strict=True):
            seq.rounds.append(record)
            self.policy.observe(seq, record)
        with naming(self.drafter, "observe"):
            self.drafter.observe(seqs, draft, out, verdict)
        t3 = time.perf_counter()
        self.timings.prefill += reading
        self.timings.draft += draft_s
        self.timings.verify += verify_s
        self.timings.rest += t3 - t2
        self.timings.rounds += 1

    def _cut(self, seq: Sequence, wish: DraftBudget) -> DraftBudget:
        """The policy's budget, cut to what may still be emitted besides the target's own token.

        Drafters that need what the target's pass leaves behind draft from the second round on.
        """
        if wish.depth == wish.nodes == 0:
            return wish
        room = self.runner.room(seq.slot) - len(first_pass.unread(self.runner, seq))
        waits = seq.is_unread and not self.drafter.info.member(wish.drafter_index).drafts_during_prefill
        depth = 0 if waits else max(0, min(wish.depth, wish.nodes, seq.remaining - 1, room))
        return wish if depth == wish.depth > 0 else replace(wish, depth=depth, nodes=wish.nodes if depth else 0)

    def _append(
        self,
        seqs: Seq[Sequence],
        draft: Draft,
        out: TargetOutput,
        distribution: TargetDistribution,
        verdict: VerifyOutput,
    ) -> list[int]:
        """Hand each sequence its accepted tokens and the target's own, cut where it ends; returns how many it took.

        Raises what went wrong behind the accepted tokens, where the answer goes on there.
        """
        token_ids, _, probes = draft.tree.lists
        counts = []
        for row, (seq, (path, token, is_bonus)) in enumerate(zip(seqs, verdict.walks, strict=True)):
            last = Origin.BONUS if is_bonus else Origin.RECOVERED
            last = Origin.PLAIN if all(probes[row][1:]) else last
            emitted = [(token_ids[row][node], Origin.DRAFTED) for node in path]
            if token >= 0:
                emitted.append((token, last))
            nodes, count, position = [0, *path], 0, len(seq.token_ids) + len(path)
            for parent, (token, origin) in zip(nodes, emitted, strict=False):
                k = seq.params.logprobs
                logprob = None if k is None else token_logprob(out.logits[row, parent], token, k)
                count += 1
                if seq.append(token, origin, draft.source_of(row) if origin is Origin.DRAFTED else "", logprob):
                    break
            if len(emitted) < len(nodes) and not seq.is_finished:
                raise distribution.error(row, nodes[-1], position)
            counts.append(count)
        return counts
