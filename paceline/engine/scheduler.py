"""Continuous batching: requests join and leave between rounds.

    waiting  -- a slot is free -->  prefill  -- chunk by chunk -->  running  -- round by round -->  ended

A step first prefills one chunk of tokens, of one prompt or of several short ones, and then runs one round. So a long
prompt delays the others by one chunk per round, and a short prompt never waits for a long one. An error ends only the
requests that caused it: a round that raises is run again, one sequence at a time.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from ..core.request import Sequence
from .first_pass import deferred_tokens
from .loop import SpeculativeDecoder
from .request import Answer, Request, read_prompt_logprobs
from .stats import EngineStats

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Job:
    """An answer and its request. chunks: prefills the rest of its prompt, chunk by chunk, once it has a slot."""

    request: Request
    answer: Answer
    chunks: Iterator[None] = field(default_factory=lambda: iter(()))

    @property
    def seq(self) -> Sequence:
        """The sequence of the answer."""
        return self.answer.seq


@dataclass
class StepOutput:
    """The result of a step.

    updated: the answers with new tokens, by request.
    failed: the errors of requests that cannot continue; their slots are free.
    """

    updated: dict[Request, list[Answer]] = field(default_factory=dict[Request, list[Answer]])
    failed: dict[Request, Exception] = field(default_factory=dict[Request, Exception])


class Scheduler:
    """Runs requests on a decoder, step by step. Slots are given in the order of arrival, one for each answer.

    A request with several answers leaves one slot in eight to others, which would else wait for the end of an answer.
    Only one thread may call it, and it must hold the runner's lock.
    is_used: see `SlotCache.allocate`.
    """

    def __init__(self, decoder: SpeculativeDecoder, is_used: Callable[[], bool] | None = None):
        self.decoder, self.stats = decoder, EngineStats()
        self._is_used = is_used
        self._waiting, self._prefilling, self._running = deque[Job](), deque[Job](), list[Job]()
        self._output = StepOutput()

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do, or no slot is free to do it in."""
        return not (self._prefilling or self._running or self._next())

    @property
    def has_waiting(self) -> bool:
        """Whether an answer waits for a slot."""
        return bool(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.append(Job(request, request.answers[0]))

    def remove(self, request: Request) -> None:
        """Drop a request and release its slots; harmless for an unknown one."""
        self._waiting = deque(one for one in self._waiting if one.request is not request)
        self._prefilling = deque(one for one in self._prefilling if one.request is not request)
        self._running = [one for one in self._running if one.request is not request]
        for seq in request.seqs:
            try:
                self.decoder.release(seq)
            except Exception:  # the slot is free nevertheless, and its next user resets the drafter again
                _log.exception("the drafter or the policy failed to forget a slot")

    def step(self) -> StepOutput:
        """Prefill one chunk of tokens, then run a round of all sequences whose prompts are complete."""
        self._output = StepOutput()
        self._prefill()
        if self._running:
            self._round()
        return self._output

    def _prefill(self) -> None:
        cache, budget = self.decoder.runner.cache, self.decoder.runner.chunk
        while budget > 0:
            self._admit()
            if not self._prefilling:
                return
            job = self._prefilling.popleft()
            seq = job.seq
            before = cache.lengths[seq.slot]
            try:
                is_done = next(job.chunks, self) is self
            except Exception as error:
                self._fail(job.request, error)
                continue
            count = cache.lengths[seq.slot] - (before or seq.num_cached_tokens)
            if is_done:
                self._running.append(job)
                self.stats.count_prompt(seq, bool(self.decoder.runner.prefixes.max_bytes))
                budget -= count + len(deferred_tokens(self.decoder.runner, seq))  # which this round will read
            else:
                self._prefilling.append(job)
                budget -= count or budget  # no tokens: it encoded images

    def _admit(self) -> None:
        """Give free slots to waiting jobs. The next answer of a request waits for the first round of this one."""
        while job := self._next():
            self._waiting.remove(job)
            try:
                job.chunks = self.decoder.admit_in_chunks(job.seq, self._is_used)
            except Exception as error:
                self._fail(job.request, error)
                continue
            if job.answer.index == 0:
                job.seq.timings.queue = time.perf_counter() - job.request.begin
                job.chunks = chain(read_prompt_logprobs(self.decoder.runner, job.request), job.chunks)
            self._prefilling.append(job)

    def _next(self) -> Job | None:
        """The first waiting job for which a slot is free."""
        cache = self.decoder.runner.cache
        kept = cache.num_slots // 8  # from further answers of a request
        return next((job for job in self._waiting if cache.num_free > (kept if job.answer.index else 0)), None)

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
            self.stats.count(seq.rounds[begin:])
            if seq.error is not None:
                self._fail(request, seq.error)
            elif request not in self._output.failed:
                self._output.updated.setdefault(request, []).append(answer)
                if begin == 0:  # from now on the prompt is in the prefix cache
                    self._waiting.extend(Job(request, one) for one in request.answers[answer.index + 1 :][:1])
                if seq.is_finished:
                    self._running.remove(job)
                    try:
                        self.decoder.release(seq)
                    except Exception as error:
                        self._fail(request, error)

    def _step_alone(self, seq: Sequence, error: Exception, is_tried: bool) -> None:
        """Run one answer of a round that raised, unless it has logits processors, which run once for each token."""
        if is_tried or seq.params.logits_processors or not self.decoder.can_go_on(seq):
            seq.error = seq.error or error
        elif not seq.is_finished:
            try:
                self.decoder.reset_slot(seq.slot)  # the drafter may have been interrupted anywhere
                self.decoder.step([seq])
            except Exception as own:
                seq.error = own

    def _fail(self, request: Request, error: Exception) -> None:
        self.remove(request)
        self._output.failed.setdefault(request, error)
