"""Connections: how many there may be, and how slowly a client may send and read, so that none is held for ever."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 30.0  # until the head of a request must be there
STALL_S = 60.0  # that a client may read nothing while an answer waits for it
REFUSED = 64  # connections beyond the limit that are told so; more are closed without a word


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 with these limits. h11 bounds the size of a head; `Gate` bounds bodies and their time.

    max_connections: open at once. `Gate` answers requests of further ones with status 503.
    """

    def __init__(self, *given: Any, max_connections: int, **options: Any):
        super().__init__(*given, **options)
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
        """Some bytes came. Bytes of a head do not give it more time."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head_timer = _cancel(self._head_timer)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)

    def pause_writing(self) -> None:
        """The client does not read as fast as it is answered."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall_timer = _cancel(self._stall_timer)

    def timeout_keep_alive_handler(self) -> None:
        """Nothing more was asked for in time; what it has not read by then is dropped."""
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self._stall_timer = _cancel(self._stall_timer) or self.loop.call_later(STALL_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._head_timer, self._stall_timer = _cancel(self._head_timer), _cancel(self._stall_timer)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
