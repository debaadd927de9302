"""Threads that hold a lock in turns."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress


@contextmanager
def taking_turns(lock: AbstractContextManager[object], waiting: list[object]) -> Iterator[None]:
    """Hold a lock; a thread that leaves it lets waiting threads go first. waiting: those that want it or hold it."""
    ticket = object()
    try:
        waiting.append(ticket)
        with lock:
            yield
    finally:
        with suppress(ValueError):
            waiting.remove(ticket)
        if waiting:
            time.sleep(0.0005)
