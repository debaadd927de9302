"""The thread that runs the steps of a scheduler, and its communication with asyncio.

asyncio     submit, abort ->  inbox  -> thread: step, step, step ...
            Ticket.take   <-  put    <- outputs and errors, once per step for each loop
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeAlias

import torch

from ..core.request import RequestOutputKind, SamplingParams
from ..errors import EngineStopped
from .loop import SpeculativeDecoder
from .output import RequestOutput
from .request import Answer, Request
from .scheduler import Scheduler, StepOutput

_log = logging.getLogger(__name__)
_POLL_S = 0.01  # how long to wait before looking for free slots again, while others hold all of them
_JOIN_S = 10.0  # how long `stop` waits for the end of a round


class Ticket:
    """A request as asyncio and the thread share it.

    loop: the event loop of the caller.
    request: None until the prompt is tokenised.
    ended: done once the request has ended and its slots are free.
    """

    def __init__(self, request_id: str, params: SamplingParams, loop: asyncio.AbstractEventLoop):
        self.request_id, self.kind, self.loop = request_id, params.output_kind, loop
        self.request: Request | None = None
        self.ended = Future[None]()
        self.is_submitted = self.is_aborted = False
        self._ready = asyncio.Event()
        self._output: RequestOutput | None = None
        self._error: Exception | None = None

    @property
    def is_running(self) -> bool:
        """Whether one of its answers has a slot, or all have ended."""
        return self.request is not None and (
            any(seq.slot >= 0 for seq in self.request.seqs) or self.request.is_finished
        )

    async def take(self) -> RequestOutput:
        """Wait for output since the last call and return it. Raises the error that ended the request."""
        while self._output is None:
            if self._error is not None:
                raise self._error
            self._ready.clear()
            await self._ready.wait()
        output, self._output = self._output, None
        return output

    def put(self, output: RequestOutput | Exception) -> None:
        """Add an output, or the error that ended the request. Called in the event loop."""
        if isinstance(output, Exception):
            self._error = output
        else:
            self._output = output if self._output is None else self._output.joined(output)
        self._ready.set()

    def output(self, answers: list[Answer]) -> RequestOutput | None:
        """The output of these answers since the last call; None if none is due yet. Called by the thread."""
        request = self.request
        assert request is not None
        if self.kind is RequestOutputKind.FINAL_ONLY:
            return request.output() if request.is_finished else None
        return request.output([answer.part() if answer in answers else answer.nothing() for answer in request.answers])


_Post: TypeAlias = tuple[Ticket, RequestOutput | Exception]


class EngineThread:
    """Runs requests on a decoder until `stop`.

    tickets: the requests that have not ended, by id. ends: when the last ones were answered, by time.perf_counter.
    error: why it accepts no more requests; None while the thread runs.
    """

    def __init__(self, decoder: SpeculativeDecoder):
        self.runner = decoder.runner
        self.tickets, self.ends = dict[str, Ticket](), deque[float](maxlen=32)
        self.error: EngineStopped | None = None
        self._inbox = SimpleQueue[tuple[Ticket, bool | None] | None]()  # a ticket to add, or to abort: see `abort`
        self.scheduler = Scheduler(decoder, lambda: self.is_alive, is_shared=True)
        self._num_threads = torch.get_num_threads()  # a new thread's number is whatever `one_thread` has set elsewhere
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive() and self.error is None

    def submit(self, ticket: Ticket) -> None:
        """Queue a request whose prompt is tokenised. Raises `EngineStopped`."""
        ticket.is_submitted = True
        self._inbox.put((ticket, None))
        if ticket.is_aborted:
            self._inbox.put((ticket, True))
        if self.error is not None:
            raise self.error

    def abort(self, ticket: Ticket, is_read: bool = True) -> None:
        """End a request after the round in progress. is_read: whether somebody waits for its last output."""
        if ticket.is_submitted:
            if not ticket.ended.done():
                self._inbox.put((ticket, is_read))
        elif is_read:
            ticket.is_aborted = True  # `submit` will abort it
        else:
            self._post([], [ticket])

    def stop(self) -> None:
        """End the thread after the round in progress."""
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        reason = EngineStopped("the engine was shut down")
        torch.set_num_threads(self._num_threads)
        try:
            while self._read_inbox():
                with self.runner.fair_lock():
                    output = self.scheduler.step()
                self._publish(output)
        except BaseException as error:
            _log.exception("the engine broke")
            reason = EngineStopped("the engine broke", got=f"{type(error).__name__}: {error}", fix="start another")
            reason.__cause__ = error
        self.error = reason
        with self.runner.fair_lock():
            for ticket in list(self.tickets.values()):
                if ticket.request is not None:
                    self.scheduler.remove(ticket.request)
                self.scheduler.stats.failed += 1
                self._post([(ticket, reason)], [ticket])

    def _read_inbox(self) -> bool:
        """Handle new messages; wait for one if there is nothing else to do. False: the thread must end."""
        waits, timeout = self.scheduler.is_idle, _POLL_S if self.scheduler.has_waiting else None
        while True:
            try:
                message = self._inbox.get(waits, timeout)
            except Empty:
                return True
            if message is None:
                return False
            waits = False
            ticket, is_read = message
            if is_read is not None:
                self._abort(ticket, is_read)
            elif ticket.request is not None and not ticket.ended.done():
                self.scheduler.add(ticket.request)

    def _abort(self, ticket: Ticket, is_read: bool) -> None:
        request = ticket.request
        if request is None or ticket.ended.done():
            return
        with self.runner.fair_lock():
            self.scheduler.remove(request)
        self.scheduler.stats.aborted += 1
        left = [answer for answer in request.answers if not answer.seq.is_finished]
        for answer in left:
            answer.seq.finish_reason = "abort"
        self._post([(ticket, self._output(ticket, left))] if is_read else [], [ticket])

    def _publish(self, step: StepOutput) -> None:
        posts, ended = list[_Post](), list[Ticket]()
        for request, answers in step.updated.items():
            if request.error is not None:
                continue
            ticket = self.tickets[request.request_id]
            output = self._output(ticket, answers)
            if isinstance(output, Exception):
                with self.runner.fair_lock():
                    self.scheduler.fail(request, output)
                continue
            if output is not None:
                posts.append((ticket, output))
            if request.is_finished:
                self.scheduler.stats.finished += 1
                self.ends.append(time.perf_counter())
                ended.append(ticket)
        for request in step.failed:
            assert request.error is not None
            ended.append(self.tickets[request.request_id])
            posts.append((ended[-1], request.error))
        self._post(posts, ended)

    def _output(self, ticket: Ticket, answers: list[Answer]) -> RequestOutput | Exception | None:
        """The output, or the error of making it."""
        try:
            return ticket.output(answers)
        except Exception as error:
            return error

    def _post(self, posts: Iterable[tuple[Ticket, RequestOutput | Exception | None]], ended: Iterable[Ticket]) -> None:
        """Send outputs and errors to their event loops. ended: the requests whose last output is among these."""
        for ticket in ended:
            self.tickets.pop(ticket.request_id, None)
        by_loop = dict[asyncio.AbstractEventLoop, list[_Post]]()
        for ticket, output in posts:
            if output is not None:
                by_loop.setdefault(ticket.loop, []).append((ticket, output))
        for loop, own in by_loop.items():
            with suppress(RuntimeError):  # the loop is closed: nobody reads
                loop.call_soon_threadsafe(_put_all, own)

        for ticket in ended:
            if not ticket.ended.done():
                ticket.ended.set_result(None)


def _put_all(posts: list[_Post]) -> None:
    for ticket, output in posts:
        ticket.put(output)
