"""Requests that join and leave between rounds: who waits, whose prompt is read, who runs.

    waiting  -- a slot is free -->  reading  -- chunk by chunk -->  running  -- round by round -->  ended

A turn reads at most one chunk of prompts, or several that are as short together, and then runs one round. So a long
prompt delays the others by one chunk a round, and a short one waits for no long one. What raises ends the requests
that are to blame, and no others: a round that raises is run again, one sequence at a time.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from ..core.outputs import Round
from ..core.request import Sequence
from ..decoding import SpeculativeDecoder
from ..decoding.first_pass import unread
from ..requests import Answer, Request, read_prompt_logprobs

_log = logging.getLogger(__name__)


@dataclass
class EngineStats:
    """What an engine has done so far, and its free slots now.

    finished, aborted, failed: requests, by how they ended.
    prompt_tokens: of the prompts that were read; once for each answer. generated_tokens: of the answers.
    prefix_cache_queries, prefix_cache_hits: tokens of prompts that were looked for in the prefix cache, and found.
    drafts, draft_tokens, accepted_tokens: rounds with a draft, the tokens in them, and how many were accepted.
    accepted_by_position: how often the first, the second and so on token of a draft was accepted.
    rounds: of all requests together, whatever their number in each. retried: rounds that raised with several requests.
    seconds: spent on reading and rounds.
    """

    finished: int = 0
    aborted: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    generated_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()
    rounds: int = 0
    retried: int = 0
    free_slots: int = 0
    seconds: float = 0.0


@dataclass(eq=False)
class Job:
    """An answer and its request. chunks: reads what is left of its prompt, once it has a slot."""

    request: Request
    answer: Answer
    chunks: Iterator[None] = field(default_factory=lambda: iter(()))

    @property
    def seq(self) -> Sequence:
        """The answer's."""
        return self.answer.seq


@dataclass
class Turn:
    """What came of a turn: answers with new tokens by request, and requests that cannot go on, whose slots are free."""

    grown: dict[Request, list[Answer]] = field(default_factory=dict[Request, list[Answer]])
    failed: dict[Request, Exception] = field(default_factory=dict[Request, Exception])


class Scheduler:
    """Runs requests on a decoder, turn by turn: slots go to those that came first, one for each answer by turns.

    One thread may call it, with the runner's lock. is_used: see `SlotCache.allocate`.
    """

    def __init__(self, decoder: SpeculativeDecoder, is_used: Callable[[], bool] | None = None):
        self.decoder, self.stats = decoder, EngineStats()
        self._is_used = is_used
        self._waiting, self._reading, self._running = deque[Job](), deque[Job](), list[Job]()
        self._turn = Turn()

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do, or no slot to do it in: others have them all."""
        return not (self._reading or self._running or (self._waiting and self.decoder.runner.cache.num_free))

    @property
    def has_waiting(self) -> bool:
        """Whether an answer waits for a slot."""
        return bool(self._waiting)

    def add(self, request: Request) -> None:
        """Let a request wait for slots."""
        self._waiting.append(Job(request, request.answers[0]))

    def remove(self, request: Request) -> None:
        """Forget a request and give its slots back; harmless where it is not known."""
        self._waiting = deque(one for one in self._waiting if one.request is not request)
        self._reading = deque(one for one in self._reading if one.request is not request)
        self._running = [one for one in self._running if one.request is not request]
        for seq in request.seqs:
            try:
                self.decoder.release(seq)
            except Exception:  # the slot is free all the same, and its next user has the drafter forget it again
                _log.exception("the drafter or the policy failed to forget a slot")

    def turn(self) -> Turn:
        """Read a chunk of prompts, then run a round of all that have been read."""
        self._turn = Turn()
        self._read()
        if self._running:
            self._round()
        return self._turn

    def _read(self) -> None:
        cache, budget = self.decoder.runner.cache, self.decoder.runner.chunk
        while budget > 0:
            self._admit()
            if not self._reading:
                return
            job = self._reading.popleft()
            seq = job.seq
            before = cache.lengths[seq.slot]
            try:
                is_read = next(job.chunks, self) is self
            except Exception as error:
                self._fail(job.request, error)
                continue
            count = cache.lengths[seq.slot] - (before or seq.num_cached_tokens)
            if is_read:
                self._running.append(job)
                self.stats.prompt_tokens += len(seq.prompt_ids)
                self.stats.prefix_cache_queries += len(seq.prompt_ids) if self.decoder.runner.prefixes.max_bytes else 0
                self.stats.prefix_cache_hits += seq.num_cached_tokens
                budget -= count + len(unread(self.decoder.runner, seq))  # the round reads the rest
            else:
                self._reading.append(job)
                budget -= count or budget  # no tokens: images

    def _admit(self) -> None:
        """Give free slots to those that wait; the next answer of a request waits for the first round of this one."""
        while self._waiting and self.decoder.runner.cache.num_free:
            job = self._waiting.popleft()
            try:
                job.chunks = self.decoder.reading(job.seq, self._is_used)
            except Exception as error:
                self._fail(job.request, error)
                continue
            if job.answer.index == 0:
                job.seq.timings.queue = time.perf_counter() - job.request.begin
                job.chunks = chain(read_prompt_logprobs(self.decoder.runner, job.request), job.chunks)
            self._reading.append(job)

    def _round(self) -> None:
        jobs = list(self._running)
        seen = [len(job.seq.rounds) for job in jobs]
        try:
            self.decoder.step([job.seq for job in jobs])
        except Exception as error:
            if len(jobs) > 1:
                _log.warning("a round of %d answers raised; they run alone", len(jobs), exc_info=True)
                self.stats.retried += 1
            for job in jobs:
                self._step_alone(job.seq, error, is_tried=len(jobs) == 1)
        self.stats.rounds += 1
        for job, begin in zip(jobs, seen, strict=True):
            request, answer, seq = job.request, job.answer, job.seq
            self._count(seq.rounds[begin:])
            if seq.error is not None:
                self._fail(request, seq.error)
            elif request not in self._turn.failed:
                self._turn.grown.setdefault(request, []).append(answer)
                if begin == 0:  # the next one finds the prompt in the cache
                    self._waiting.extend(Job(request, one) for one in request.answers[answer.index + 1 :][:1])
                if seq.is_finished:
                    self._running.remove(job)
                    try:
                        self.decoder.release(seq)
                    except Exception as error:
                        self._fail(request, error)

    def _step_alone(self, seq: Sequence, error: Exception, is_tried: bool) -> None:
        """One answer of a round that raised. Processors of the user's own are called once for a token, never again."""
        if is_tried or seq.params.logits_processors or not self.decoder.can_go_on(seq):
            seq.error = seq.error or error
        elif not seq.is_finished:
            try:
                self.decoder.forget(seq.slot)  # the drafter may have been interrupted anywhere
                self.decoder.step([seq])
            except Exception as own:
                seq.error = own

    def _fail(self, request: Request, error: Exception) -> None:
        self.remove(request)
        self._turn.failed.setdefault(request, error)

    def _count(self, rounds: list[Round]) -> None:
        stats = self.stats
        for one in rounds:
            own = [place < one.num_accepted for place in range(one.num_drafted)]
            stats.accepted_by_position = tuple(map(sum, zip_longest(stats.accepted_by_position, own, fillvalue=0)))
            stats.generated_tokens += one.num_emitted
            stats.drafts += one.num_nodes > 0
            stats.draft_tokens += one.num_nodes
            stats.accepted_tokens += one.num_accepted
