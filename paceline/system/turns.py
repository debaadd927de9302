"""A lock for threads that work in turns."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Turns:
    """A thread that leaves its turn lets waiting threads go first. A thread may take a turn within its own."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._waiting = list[object]()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for a turn, which is the body."""
        ticket = object()
        try:
            self._waiting.append(ticket)
            with self.lock:
                yield
        finally:
            with suppress(ValueError):
                self._waiting.remove(ticket)
            if self._waiting:
                time.sleep(0.0005)


SHARED = Turns()
"""The turns of models that one server has, so that their threads do not compete for the cores.

A pass that is timed takes one, also while its model is loaded, and so does whatever makes a model of transformers: it
sets torch's default dtype, which all threads share.
"""
