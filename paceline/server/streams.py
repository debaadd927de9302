"""Answers that end when the client disconnects or at a deadline, and event streams."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ApiError, ClientGone, as_api_error

_T = TypeVar("_T")
DONE = "data: [DONE]\n\n"


@asynccontextmanager
async def connected(receive: Receive, end_at: float) -> AsyncIterator[None]:
    """Ends its block with `ClientGone` when the client disconnects, and with TimeoutError at `end_at` (loop time)."""
    is_gone = False
    async with asyncio.timeout_at(end_at) as deadline:

        async def watch() -> None:
            nonlocal is_gone
            while (await receive())["type"] != "http.disconnect":
                pass
            is_gone = True
            deadline.reschedule(0)

        watching = asyncio.create_task(watch())
        try:
            yield
        except asyncio.CancelledError:
            if is_gone:
                raise ClientGone from None
            raise
        finally:
            watching.cancel()


def event(value: object, name: str = "") -> str:
    """A server-sent event."""
    named = f"event: {name}\n" if name else ""
    return f"{named}data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


class EventStream(Response):
    """Events, sent by the server. An error before the first event has its own status, a later one is an event.

    log: the request's log line, which gets the error. failed: makes the end of a stream with an error.
    """

    def __init__(
        self,
        events: AsyncGenerator[str],
        end_at: float,
        log: dict[str, Any],
        failed: Callable[[ApiError], str],
        media_type: str = "text/event-stream",
    ):
        super().__init__(media_type=media_type, headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self.events, self.end_at, self.log, self.failed = events, end_at, log, failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def put(text: str, is_last: bool = False) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": not is_last})

        try:
            async with connected(receive, self.end_at), aclosing(self.events):
                async for item in self.events:
                    if not has_begun:
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                        has_begun = True
                    await put(item)
        except ClientGone:
            if not has_begun:
                raise
            self.log["error"] = "client gone"
        except Exception as error:
            if not has_begun:
                raise
            self.log["error"] = str(error) or type(error).__name__
            await put(self.failed(as_api_error(error)))
        await put("", is_last=True)


async def merged(sources: Sequence[AsyncGenerator[_T]]) -> AsyncGenerator[tuple[int, _T]]:
    """The items of all sources as they come, each with the index of its source. Closing it closes the sources."""
    pending = {asyncio.ensure_future(anext(source, None)): place for place, source in enumerate(sources)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place, item = pending.pop(task), task.result()
                if item is not None:
                    pending[asyncio.ensure_future(anext(sources[place], None))] = place
                    yield place, item
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for source in sources:
            await source.aclose()
