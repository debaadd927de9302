"""Check a share of the answers that the small model gave alone, behind the user's back, and raise the drift alarm.

Which requests are audited is drawn for each anew before anybody answers, so it depends neither on the answer nor on the
prompt: of a prompt that is asked often the same share is looked at as of all others. A chosen request that the large
model answered counts too, as one that does not differ: the promise is about all prompts. Where the queue is full a
chosen request is left out whoever answers it, for the same reason.

    requests   . . . A . . A . . .        A: chosen, `audit_share` of all
    answered     s s s l s s l s s        s: by the small model alone, l: by the large one
    counted      . . y . . 0 . . .        y: 1 where the large model says something else
"""

import atexit
import contextlib
import queue
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from ..errors import ConfigError
from .drift import DriftAlarm

Check = Callable[[], bool]
"""Runs the large model; True iff its answer differs."""


@dataclass(frozen=True)
class AuditCounts:
    """What became of the requests that were chosen.

    seen: counted. checked: of these, answers of the small model that the large one looked at. differed: of these.
    pending: still waiting. dropped: left out because the queue was full. errors: audits that failed, and the last one's
    message; they are not counted in `seen`.
    """

    seen: int = 0
    checked: int = 0
    differed: int = 0
    pending: int = 0
    dropped: int = 0
    errors: int = 0
    last_error: str | None = None


@final
class Auditor:
    """A worker thread with a bounded queue.

    share: of all requests, 0 to 1; 0 audits nothing. seed: of the draws; None: of the system's own. The worker
    starts with the first job. `close` ends it.
    """

    def __init__(self, alarm: DriftAlarm, share: float = 0.05, queue_size: int = 64, seed: int | None = None):
        if not 0.0 <= share <= 1.0:
            raise ConfigError("audit_share is out of range", got=share, expected="0 to 1")
        if queue_size < 1:
            raise ConfigError("queue_size is too small", got=queue_size, expected=">= 1")
        self.alarm, self.share = alarm, share
        self._rng = random.Random(seed)
        self._jobs: queue.Queue[Check | None] = queue.Queue(queue_size)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._checked = self._differed = self._dropped = self._errors = self._pending = 0
        self._last_error: str | None = None
        self._unreported: list[str] = []

    @property
    def is_closed(self) -> bool:
        """Whether it takes nothing any more."""
        return self._ends.is_set()

    def draws(self) -> bool:
        """Whether the next request is to be audited; every call draws anew."""
        return self._rng.random() < self.share

    def take(self, check: Check | None) -> bool:
        """Queue a chosen request; None: the large model answered it. Never waits; False where the queue is full."""
        if self._ends.is_set():
            raise ConfigError("the cascade is closed", fix="make a new one")
        with self._lock:
            if self._jobs.full():
                self._dropped += 1
                return False
            self._pending += 1
            self._jobs.put_nowait(check)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="paceline-audit", daemon=True)
            self._thread.start()
            atexit.register(self.close, discard=True)
        return True

    def counts(self) -> AuditCounts:
        """So far."""
        with self._lock:
            return AuditCounts(
                self.alarm.seen,
                self._checked,
                self._differed,
                self._pending,
                self._dropped,
                self._errors,
                self._last_error,
            )

    def new_errors(self) -> list[str]:
        """Messages of audits that failed since the last call."""
        with self._lock:
            told, self._unreported = self._unreported, []
        return told

    def reset_alarm(self) -> None:
        """Lower the alarm and start it anew."""
        with self._lock:
            self.alarm.reset()

    def drain(self) -> None:
        """Wait until everything queued is done."""
        self._jobs.join()

    def close(self, discard: bool = False) -> None:
        """Finish what is queued, or only what is running, and end the thread. Calling it again does nothing."""
        if self._thread is None or self._ends.is_set():
            self._ends.set()
            return
        if discard:
            self._ends.set()
            with contextlib.suppress(queue.Empty):
                while True:
                    self._jobs.get_nowait()
                    self._jobs.task_done()
        else:
            self.drain()
            self._ends.set()
        self._thread.join()
        atexit.unregister(self.close)

    def _work(self) -> None:
        while not self._ends.is_set():
            try:
                check = self._jobs.get(timeout=0.05)
            except queue.Empty:
                continue
            try:
                differs = check is not None and check()
                with self._lock:
                    self._checked += check is not None
                    self._differed += differs
                    self.alarm.see(differs)
            except Exception as error:  # told by `new_errors` and `counts`; the thread goes on
                told = f"{type(error).__name__}: {error}"
                with self._lock:
                    self._errors += 1
                    self._last_error = told
                    self._unreported.append(told)
            finally:
                with self._lock:
                    self._pending -= 1
                self._jobs.task_done()
