"""An `LLM` for asyncio with continuous batching; each request gets the answer that it would get alone.

engine = AsyncLLM(LLM("smollm2-135m", drafter="lookup"))
async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=64)):
    print(output.text, end="")
"""

import asyncio
import itertools
import threading
import weakref
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import Field
from transformers import PreTrainedTokenizerBase

from .core.request import RequestOutputKind, SamplingParams, params_of
from .engine.embeddings import EmbeddingOutput, PoolingParams, open_embedding, reading_params
from .engine.output import RequestOutput
from .engine.request import MAX_WAITING_PIXEL_BYTES, Request
from .engine.scores import Method, ScoringOutput, open_score
from .engine.stats import EngineStats
from .engine.thread import EngineThread, Ticket
from .errors import ConfigError, EngineStopped, QueueFull
from .hf.image_prompts import pixel_bytes
from .llm import LLM
from .schema import brief, checked_call
from .target.prompts import Prompt, holds_images

_T = TypeVar("_T")
_IMAGE_READERS = 4  # threads; how much they decode at once is bounded by `open_images`


class AsyncLLM:
    """Answers many requests at once on one `LLM`; the methods are vLLM's.

    A thread runs the model. Requests get its `max_num_seqs` slots in the order of arrival, one for each of their `n`
    answers, and join and leave between rounds. Images are opened and processed in other threads: a request with images
    arrives when that is done. Long prompts are read in chunks, with rounds of other requests in between. The LLM's own
    methods may be called at the same time: they and the engine take turns.

    max_waiting: requests that may wait for a slot.
    prefix_cache_bytes: see `LLM`, whose prefix cache is used. None: its size there, or 1 GiB, for all prompts.

    An answer has the tokens that `LLM.generate` gives with the same seed, whatever other requests run.
    """

    @checked_call
    def __init__(
        self,
        llm: LLM,
        *,
        max_waiting: Annotated[int, Field(ge=0)] = 256,
        prefix_cache_bytes: Annotated[int, Field(ge=0)] | None = None,
    ):
        self.llm, self.max_waiting = llm, max_waiting
        prefixes = llm.runner.prefixes
        with llm.runner.fair_lock():
            prefixes.resize(prefixes.max_bytes if prefix_cache_bytes is None else prefix_cache_bytes)
        self._thread = EngineThread(llm.decoder)
        self._stop = weakref.finalize(self, self._thread.stop)  # also when the interpreter ends
        self._reader = ThreadPoolExecutor(1, "paceline-reader")
        self._image_reader = ThreadPoolExecutor(_IMAGE_READERS, "paceline-images")
        self._lock, self._count, self._is_draining = threading.Lock(), itertools.count(), False

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """Answer one prompt, as `LLM.generate` takes it; yields what `sampling_params.output_kind` says.

        Every output has all `n` answers, in order. With DELTA, the default, each has what is new since the last output,
        which may be nothing; for a slow reader, rounds are joined. CUMULATIVE: each has the answer so far. FINAL_ONLY:
        one output, once all have ended.

        Closing the iterator, or cancelling the task that reads it, aborts the request.

        Raises `ConfigError` and `CacheFull` for what cannot be answered and `QueueFull` where `max_waiting` requests
        wait, all before the prompt is queued; `EngineStopped` after `shutdown`; and errors of decoding.
        """
        (params,) = params_of(sampling_params, 1, self.llm.get_default_sampling_params())
        ticket = self._enter(request_id, params)
        try:
            seed = self.llm.draw_seed(params)
            opening = partial(self.llm.open_request, prompt, params, ticket.request_id, seed=seed)
            await self._submit(ticket, prompt, opening)
            whole = None
            while whole is None or not whole.finished:
                output = await ticket.take()
                whole = (
                    output if whole is None or params.output_kind is RequestOutputKind.DELTA else whole.joined(output)
                )
                yield whole
        finally:
            self._thread.abort(ticket, is_read=False)

    async def embed(
        self, prompt: Prompt, pooling_params: PoolingParams | None = None, request_id: str | None = None
    ) -> EmbeddingOutput:
        """The embedding of one text, as of `LLM.embed`. It is read in chunks, beside the rounds of other requests.

        Cancelling the task that waits aborts the request. Raises what `generate` raises.
        """
        opening = partial(open_embedding, self.llm, prompt, pooling_params or PoolingParams())
        return await self._read_alone(prompt, opening, request_id)

    async def score(
        self, query: str, document: str, method: Method | None = None, instruction: str | None = None, *,
        request_id: str | None = None, extra_args: dict[str, Any] | None = None,
    ) -> ScoringOutput:  # fmt: skip
        """The score of a query and a document, as of `LLM.score`; read as `embed` reads. Raises what `embed` raises."""
        opening = partial(open_score, self.llm, query, document, method, instruction, extra_args=extra_args)
        return await self._read_alone(query, opening, request_id)

    async def encode(self, prompt: Prompt) -> list[int]:
        """Token ids as of `LLM.encode`, read as the prompts of requests are. Cancelling the task ends it."""
        ended = Future[None]()
        try:
            return await self._read(prompt, partial(self.llm.encode, prompt), ended)
        finally:
            ended.set_result(None)

    async def abort(self, request_id: str) -> None:
        """End a request; returns when its slots are free, within a round. Its iterator gets the answers so far.

        Answers that had not ended get the finish reason "abort". Unknown request ids are ignored.
        """
        ticket = self._thread.tickets.get(request_id)
        if ticket is not None:
            self._thread.abort(ticket)
            await asyncio.shield(asyncio.wrap_future(ticket.ended))

    async def drain(self, timeout: float | None = None) -> None:
        """Accept no more requests, and wait for those in progress, which are aborted after `timeout` seconds."""
        self._is_draining = True
        tickets = list(self._thread.tickets.values())
        if not tickets:
            return
        ended = [asyncio.wrap_future(ticket.ended) for ticket in tickets]
        await asyncio.wait(ended, timeout=timeout)
        for ticket in tickets:
            self._thread.abort(ticket)
        await asyncio.wait(ended)

    def shutdown(self) -> None:
        """End the thread after its round; requests in progress raise `EngineStopped`. The `LLM` can still be used."""
        self._is_draining = True
        self._reader.shutdown(wait=False)
        self._image_reader.shutdown(wait=False)
        self._stop()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self.llm.tokenizer

    async def reset_prefix_cache(self) -> bool:
        """See `LLM.reset_prefix_cache`; it waits for the round in progress."""
        return await asyncio.to_thread(self.llm.reset_prefix_cache)

    @property
    def is_alive(self) -> bool:
        """Whether requests can be answered."""
        return self._thread.is_alive

    @property
    def num_running(self) -> int:
        """Requests of which at least one answer has had a slot."""
        return sum(ticket.is_running for ticket in list(self._thread.tickets.values()))

    @property
    def num_waiting(self) -> int:
        """Requests whose prompt is being tokenised, or that wait for their first slot."""
        return sum(not ticket.is_running for ticket in list(self._thread.tickets.values()))

    def stats(self) -> EngineStats:
        """Counts of the work so far."""
        return replace(self._thread.scheduler.stats, free_slots=self.llm.runner.cache.num_free)

    async def _read(self, prompt: Prompt, work: Callable[..., _T], ended: Future[None]) -> _T:
        """The result of `work` in the thread for such prompts. ended: once done, nobody waits for it."""

        def check() -> None:
            if ended.done():
                raise EngineStopped("the reading of a prompt was ended", got="nobody waits for it any more")

        reader = self._image_reader if holds_images(prompt) else self._reader
        return await asyncio.get_running_loop().run_in_executor(reader, partial(work, check=check))

    async def _read_alone(self, prompt: Prompt, opening: Callable[..., Request], request_id: str | None) -> Any:
        """The output of a request that ends when its text is read."""
        ticket = self._enter(request_id, reading_params(None))
        try:
            await self._submit(ticket, prompt, partial(opening, request_id=ticket.request_id))
            return await ticket.take()
        finally:
            self._thread.abort(ticket, is_read=False)

    async def _submit(self, ticket: Ticket, prompt: Prompt, opening: Callable[..., Request]) -> None:
        """Read the prompt of a ticket, and queue its request."""
        ticket.request = await self._read(prompt, opening, ticket.ended)
        self._check_pixels(ticket)
        self._thread.submit(ticket)

    def _enter(self, request_id: str | None, params: SamplingParams) -> Ticket:
        """Register a request as waiting."""
        request_id = str(next(self._count)) if request_id is None else request_id
        with self._lock:
            if self._is_draining or not self.is_alive:
                raise EngineStopped("the engine accepts no requests", got=self._thread.error or "drain or shutdown")
            if request_id in self._thread.tickets:
                raise ConfigError("a request with this id is in progress", got=brief(request_id), fix="use another id")
            if self.num_waiting >= self.max_waiting + self.llm.runner.cache.num_free:
                raise QueueFull(
                    "the queue is full", got=f"{self.num_waiting} requests are waiting", fix="try again later"
                )
            ticket = Ticket(request_id, params, asyncio.get_running_loop())
            self._thread.tickets[request_id] = ticket
        return ticket

    def _check_pixels(self, ticket: Ticket) -> None:
        """Raise `QueueFull` where waiting requests would hold too many pixels."""
        waiting = [t.request for t in list(self._thread.tickets.values()) if t.request and not t.is_running]
        visions = {request: vision for request in waiting if (vision := request.seqs[0].vision) is not None}
        held = sum(map(pixel_bytes, visions.values()))
        if held > MAX_WAITING_PIXEL_BYTES and len(waiting) > 1 and ticket.request in visions:
            got = f"images of {held:,} bytes"
            raise QueueFull(
                "the queue is full", got=got, expected=f"<= {MAX_WAITING_PIXEL_BYTES:,}", fix="try again later"
            )
