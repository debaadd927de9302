"""Continuous batching: requests join and leave between rounds.

    waiting  -- a slot is free -->  reading  -- chunk by chunk -->  running  -- round by round -->  ended
       ^                                                               |
       +---------------- its slot or its memory goes to another -------+

A step first reads prompts, and then runs one round. Where requests of others may come, it reads one chunk of tokens, of
one prompt or of several short ones. So a long prompt delays the others by one chunk per round, and a short prompt never
waits for a long one. An error ends only the requests that caused it: a round that raises is run again, one sequence at
a time.

Who gets a slot, and whose, `queue` decides. An answer that gave its slot is read again later and goes on with the same
tokens, see `SpeculativeDecoder.can_resume`.
"""

import logging
import math
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import GEN_CLOSED, getgeneratorstate

from ..core.request import TokenSequence
from .first_pass import deferred_tokens
from .loop import SpeculativeDecoder
from .queue import Queue, accounts, growing, may_pass, yielding
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
    """Runs requests on a decoder, step by step. Each answer has a slot.

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
        self._waiting, self._running = Queue(), list[Answer]()
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
        for answer in request.answers[:1] if self._is_shared else request.answers:
            self._waiting.add(answer)

    def remove(self, request: Request) -> None:
        """Drop a request and release its slots; harmless for an unknown one."""
        for answer in request.answers:
            self._waiting.remove(answer)
            self._forget(answer)
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

    def preempt(self, answer: Answer) -> None:
        """Let an answer that has a slot wait for another one."""
        self._forget(answer)
        answer.served_s += time.perf_counter() - answer.since
        self.stats.preemptions += 1
        try:
            self.decoder.release(answer.seq)
        except Exception as error:
            self.fail(answer.request, error)
        else:
            self._waiting.add(answer)

    def _forget(self, answer: Answer) -> None:
        self._reading.pop(answer, None)
        if answer in self._running:
            self._running.remove(answer)

    def step(self) -> StepOutput:
        """Read prompts, then run a round of all sequences whose prompts are complete."""
        self._output = StepOutput()
        if self._waiting and self._is_shared and self.decoder.can_resume:
            self._make_way()
        if self._waiting or self._reading:
            self._read()
        if self._running:
            self._make_room()
        if self._running:
            self._round()
        return self._output

    def _make_way(self) -> None:
        """Let answers give their slots to others that wait, see `queue`."""
        while given := next(filter(None, map(self._given_to, self._waiting.heads(accounts(self._holders)))), None):
            answer, *others = given
            for one in others:
                self.preempt(one)
            if answer.request.error is None:  # of another answer to it that gave its slot
                self._admit(answer)

    def _given_to(self, answer: Answer) -> list[Answer]:
        """An answer that waits, and those that give their slots to it; empty where that is not needed or not enough."""
        cache, kept = self.decoder.runner.cache, self._num_kept if answer.index else 0

        def is_enough(given: Sequence[Answer]) -> bool:
            slots = [one.seq.slot for one in given]
            return cache.num_free + len(slots) > kept and self.decoder.has_room(answer.seq, slots)

        given = () if is_enough([]) else yielding(answer, self._running, is_enough)
        return [answer, *given] if given else []

    def _make_room(self) -> None:
        """Reserve the columns of a round; where the cache is full, the newest answers that grow give theirs."""
        for answer in list(self._running):
            while answer in self._running and not self.decoder.reserve(answer.seq):
                self.preempt(growing(self._holders, lambda one: self.decoder.has_all(one.seq)))

    @property
    def _holders(self) -> list[Answer]:
        """The answers that have slots."""
        return [*self._running, *self._reading]

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
            count = max(0, cache.lengths[seq.slot] - (before or seq.num_cached_tokens))
            if is_done:
                del self._reading[answer]
                self._running.append(answer)
                budget -= count + len(deferred_tokens(runner, seq))  # which this round will read
                if seq.ends_when_read:
                    self.stats.count_prompt(seq, bool(runner.prefixes.max_bytes))
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
            waited_since, answer.since = answer.since, time.perf_counter()
            if answer.index == 0 or answer.seq.rounds:
                answer.seq.queue_s += answer.since - (waited_since if answer.served_s else answer.request.begin)
            if answer.index == 0:
                read_pixels(answer.request)
        except Exception as error:
            self.fail(answer.request, error)
            return
        self._reading[answer] = chunks

    def _next(self) -> Answer | None:
        """The waiting answer that is next, if it can have a slot now or must have one."""
        cache = self.decoder.runner.cache
        if not self._waiting or not (cache.num_free or self._must_start):
            return None
        heads = self._waiting.heads(
            accounts(self._holders), with_further=self._must_start or cache.num_free > self._num_kept
        )
        if self._must_start:
            return heads[0]
        for answer in heads:
            if self.decoder.has_room(answer.seq):
                return answer
            if self._holders and not (self.decoder.can_resume and may_pass(answer)):
                return None  # others must not take what this one waits for
        return None

    @property
    def _num_kept(self) -> int:
        """The slots that are kept from further answers of a request."""
        return self.decoder.runner.cache.num_slots // 8 if self._is_shared else 0

    @property
    def _must_start(self) -> bool:
        """Whether nobody else will give a slot, so that the next answer has one or fails."""
        return not (self._is_shared or self._reading or self._running)

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
            if begin == 0:  # no sooner: it may have given its slot since its prompt was read
                self.stats.count_prompt(seq, bool(self.decoder.runner.prefixes.max_bytes))
            self.stats.count(seq.rounds[begin:])
            answer.read_s = max([answer.read_s, *(record.prefill_s for record in seq.rounds[begin:])])
            if seq.error is not None:
                self.fail(request, seq.error)
            elif request.error is None:
                self._output.updated.setdefault(request, []).append(answer)
                if begin == 0 and self._is_shared:  # from now on the prompt is in the prefix cache
                    for further in request.answers[answer.index + 1 :][:1]:
                        self._waiting.add(further)
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
