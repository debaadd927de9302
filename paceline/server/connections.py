"""Limits of connections: their number, and how slowly a client may send and read."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 30.0  # until the header of a request must be complete
STALL_S = 60.0  # for which a client may read nothing of an answer
REFUSED = 64  # connections beyond the limit that get an error; further ones are closed


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 with these limits. h11 limits the size of a header; `Gate` limits bodies and their time.

    max_connections: open at once. `Gate` answers requests of further ones with status 503.
    """

    def __init__(self, *args: Any, max_connections: int, **options: Any):
        super().__init__(*args, **options)
        self.max_connections = max_connections
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        extra = len(self.connections) - self.max_connections
        if extra > REFUSED:
            transport.abort()
            return
        self.app_state = {**self.app_state, "is_refused": extra > 0}
        self._head_timer = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        """Receive bytes. The timer of a header is not extended by further bytes."""
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._note_first_byte()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head_timer = _cancel(self._head_timer)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)

    def on_response_complete(self) -> None:
        """The time of a request that was sent behind this one begins now."""
        self._note_first_byte()
        super().on_response_complete()

    def _note_first_byte(self) -> None:
        self.app_state = {**self.app_state, "first_byte_at": self.loop.time()}

    def pause_writing(self) -> None:
        """The client reads too slowly: start the timer."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall_timer = _cancel(self._stall_timer)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; unread data is dropped after another timeout."""
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self._stall_timer = _cancel(self._stall_timer) or self.loop.call_later(STALL_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._head_timer, self._stall_timer = _cancel(self._head_timer), _cancel(self._stall_timer)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
