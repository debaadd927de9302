"""Continuous batching: requests join and leave between rounds.

    waiting  -- a slot is free -->  reading  -- chunk by chunk -->  running  -- round by round -->  ended

A step first reads prompts, and then runs one round. Where requests of others may come, it reads one chunk of tokens, of
one prompt or of several short ones. So a long prompt delays the others by one chunk per round, and a short prompt never
waits for a long one. An error ends only the requests that caused it: a round that raises is run again, one sequence at
a time.
"""

import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from inspect import GEN_CLOSED, getgeneratorstate

from ..core.request import TokenSequence
from .first_pass import deferred_tokens
from .loop import SpeculativeDecoder
from .request import Answer, Request, read_pixels
from .stats import EngineStats

_log = logging.getLogger(__name__)


@dataclass
class StepOutput:
    """The result of a step.

    updated: the answers with new tokens, by request.
    failed: the requests that cannot go on, see `Request.error`; their slots are free.
    """

    updated: dict[Request, list[Answer]] = field(default_factory=dict[Request, list[Answer]])
    failed: list[Request] = field(default_factory=list[Request])


def run(
    decoder: SpeculativeDecoder,
    requests: Iterable[Request],
    stats: EngineStats | None = None,
    *,
    return_exceptions: bool = False,
) -> Generator[StepOutput]:
    """Answer these requests, more than there are slots if need be; yields after each step.

    Raises the first error, unless return_exceptions. All slots are released when the iterator is closed, and after an
    interrupt or an error. If an interrupt prevents that, the next call releases them.
    """
    steps = _steps(
        Scheduler(decoder, lambda: (own := steps_ref()) is not None and getgeneratorstate(own) != GEN_CLOSED, stats),
        list(requests),
        return_exceptions,
    )
    steps_ref = weakref.ref(steps)
    return steps


def _steps(scheduler: "Scheduler", requests: list[Request], return_exceptions: bool) -> Generator[StepOutput]:
    scheduler.decoder.runner.cache.reclaim()
    try:
        for request in requests:
            scheduler.add(request)
        while not scheduler.is_idle:
            output = scheduler.step()
            if output.failed and not return_exceptions:
                output.failed[0].result()
            yield output
    finally:
        for request in requests:
            scheduler.remove(request)


class Scheduler:
    """Runs requests on a decoder, step by step. Slots are given in the order of arrival, one for each answer.

    Only one thread may call it, and it must hold the runner's lock.
    is_used: see `SlotCache.allocate`.
    is_shared: whether requests of others may come. Then a request with several answers leaves one slot in eight to
        them, which would else wait for the end of an answer, and requests wait where no slot is free; else they fail.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        is_used: Callable[[], bool],
        stats: EngineStats | None = None,
        *,
        is_shared: bool = False,
    ):
        self.decoder, self.stats = decoder, stats or EngineStats()
        self._is_used, self._is_shared = is_used, is_shared
        self._waiting, self._running = deque[Answer](), list[Answer]()
        self._reading = dict[Answer, Iterator[None]]()  # chunk by chunk
        self._output = StepOutput()

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do, or no slot is free to do it in."""
        return not (self._reading or self._running or self._next())

    @property
    def has_waiting(self) -> bool:
        """Whether an answer waits for a slot."""
        return bool(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request. Where others may come, its next answer waits for the first round of this one."""
        self._waiting += request.answers[:1] if self._is_shared else request.answers

    def remove(self, request: Request) -> None:
        """Drop a request and release its slots; harmless for an unknown one."""
        for answer in request.answers:
            self._reading.pop(answer, None)
            for queue in (self._waiting, self._running):
                if answer in queue:
                    queue.remove(answer)
        for seq in request.seqs:
            try:
                self.decoder.release(seq)
            except Exception:  # the slot is free nevertheless, and its next user resets the drafter again
                _log.exception("the drafter or the policy failed to forget a slot")

    def fail(self, request: Request, error: Exception) -> None:
        """Drop a request that cannot go on."""
        self.remove(request)
        if request.error is None:
            request.error = error
            self.stats.failed += 1
            self._output.failed.append(request)

    def step(self) -> StepOutput:
        """Read prompts, then run a round of all sequences whose prompts are complete."""
        self._output = StepOutput()
        if self._waiting or self._reading:
            self._read()
        if self._running:
            self._round()
        return self._output

    def _read(self) -> None:
        runner = self.decoder.runner
        cache, budget = runner.cache, runner.chunk if self._is_shared else math.inf
        while budget > 0:
            while answer := self._next():
                self._admit(answer)
            if not self._reading:
                return
            answer, chunks = next(iter(self._reading.items()))
            seq = answer.seq
            before = cache.lengths[seq.slot]
            try:
                is_done = next(chunks, self) is self
            except Exception as error:
                self.fail(answer.request, error)
                continue
            count = cache.lengths[seq.slot] - (before or seq.num_cached_tokens)
            if is_done:
                del self._reading[answer]
                self._running.append(answer)
                self.stats.count_prompt(seq, bool(runner.prefixes.max_bytes))
                budget -= count + len(deferred_tokens(runner, seq))  # which this round will read
                if seq.ends_when_read:
                    seq.finish_reason = "length"
                    self._output.updated.setdefault(answer.request, []).append(answer)
                    self._end(answer)
            elif self._is_shared:
                self._reading[answer] = self._reading.pop(answer)  # now the last
                budget -= count or budget  # no tokens: it encoded images

    def _admit(self, answer: Answer) -> None:
        """Give a free slot to a waiting answer."""
        self._waiting.remove(answer)
        try:
            chunks = self.decoder.admit(answer.seq, self._is_used)
            if answer.index == 0:
                answer.seq.queue_s = time.perf_counter() - answer.request.begin
                read_pixels(answer.request)
        except Exception as error:
            self.fail(answer.request, error)
            return
        self._reading[answer] = chunks

    def _next(self) -> Answer | None:
        """The first waiting answer for which a slot is free, or that must have one now."""
        cache = self.decoder.runner.cache
        if not self._is_shared:
            is_due = cache.num_free or not (self._reading or self._running)
            return self._waiting[0] if self._waiting and is_due else None
        kept = cache.num_slots // 8  # from further answers of a request
        return next((answer for answer in self._waiting if cache.num_free > (kept if answer.index else 0)), None)

    def _round(self) -> None:
        answers = list(self._running)
        seen = [len(answer.seq.rounds) for answer in answers]
        try:
            self.decoder.step([answer.seq for answer in answers])
        except Exception as error:
            if len(answers) > 1:
                _log.warning("a round of %d answers raised; they run alone", len(answers), exc_info=True)
                self.stats.retried += 1
            for answer in answers:
                self._step_alone(answer.seq, error, is_tried=len(answers) == 1)
        self.stats.rounds += 1
        for answer, begin in zip(answers, seen, strict=True):
            request, seq = answer.request, answer.seq
            self.stats.count(seq.rounds[begin:])
            if seq.error is not None:
                self.fail(request, seq.error)
            elif request.error is None:
                self._output.updated.setdefault(request, []).append(answer)
                if begin == 0 and self._is_shared:  # from now on the prompt is in the prefix cache
                    self._waiting += request.answers[answer.index + 1 :][:1]
                if seq.is_finished:
                    self._end(answer)

    def _end(self, answer: Answer) -> None:
        """Release the slot of an answer that has ended, and the pixels of its prompt."""
        self._running.remove(answer)
        try:
            self.decoder.release(answer.seq)
        except Exception as error:
            self.fail(answer.request, error)
        if answer.seq.vision is not None:
            answer.seq.vision = answer.seq.vision.without_pixels()

    def _step_alone(self, seq: TokenSequence, error: Exception, is_tried: bool) -> None:
        """Run one answer of a round that raised, unless it has logits processors, which run once for each token."""
        if is_tried or seq.params.logits_processors or not self.decoder.can_go_on(seq):
            seq.error = seq.error or error
        elif not seq.is_finished:
            try:
                self.decoder.reset_slot(seq.slot)  # the drafter may have been interrupted anywhere
                self.decoder.step([seq])
            except Exception as own:
                seq.error = own
