"""Audits: does the promise still hold? A share of the requests is checked in the background, and an alarm is raised.

Which requests are audited is drawn before anybody answers, so the draw depends on neither prompt nor answer. A drawn
request that the large model answered counts as one that agrees, because the promise is about all requests. Where the
queue is full a drawn request is left out, whichever model answered it, for the same reason.

    requests   . . . A . . A . . .        A: drawn, `audit_share` of all
    answered   s s s l s s l s s s        s: by the small model alone, l: by the large one
    counted    . . . 0 . . y . . .        y: 1 where the large model's answer differs
"""

import atexit
import contextlib
import queue
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

from ..errors import ConfigError

Check = Callable[[], bool]
"""Runs the large model; True if its answer differs."""
_RATES = (1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0)
"""Rates of disagreement that the alarm bets on, in multiples of the promised one."""


@final
class DriftAlarm:
    """A sequential test of "at most a share `limit` of the answers differ", valid however often one looks.

    Each audited request either differs (y = 1) or not. A bet against the promise multiplies its stake by
    (q/m)^y ((1-q)/(1-m))^(1-y), where m is the limit and q > m the rate that is bet on. While the promise holds no bet
    can be expected to grow, and neither can a fixed mixture of bets over several q and over all starting times s (a
    change may come late). By Ville's inequality the wealth of the mixture then ever reaches 1 / false_alarm with a
    probability of at most `false_alarm` (Ville 1939; Waudby-Smith and Ramdas 2010.09686).

        wealth_t = mean over q of A_q + 1 / (t + 1)      A_q <- (A_q + w_t) * factor(y_t)      w_t = 1 / (t (t + 1))
                   bets that have started   the rest

    Once raised it stays raised until `reset`.
    """

    def __init__(self, limit: float, false_alarm: float = 0.01):
        for name, value in (("limit", limit), ("false_alarm", false_alarm)):
            if not 0.0 < value < 1.0:
                raise ConfigError(f"{name} is out of range", got=value, expected="a number between 0 and 1")
        self.limit, self.false_alarm = limit, false_alarm
        rates = [limit * times for times in _RATES if limit * times < 1.0] or [(1.0 + limit) / 2]
        self._factors = [((1.0 - q) / (1.0 - limit), q / limit) for q in rates]
        self.reset()

    def reset(self) -> None:
        """Start anew, as after a new calibration."""
        self.seen = self.differed = 0
        self.raised = False
        self._bets = [0.0] * len(self._factors)

    @property
    def wealth(self) -> float:
        """The evidence against the promise; it starts at 1, and at `1 / false_alarm` the alarm is raised."""
        return sum(self._bets) / len(self._bets) + 1.0 / (self.seen + 1)

    def see(self, differs: bool) -> bool:
        """Count one audited request; returns whether the alarm is raised."""
        self.seen += 1
        self.differed += differs
        start = 1.0 / (self.seen * (self.seen + 1))
        self._bets = [(bet + start) * factor[differs] for bet, factor in zip(self._bets, self._factors, strict=True)]
        self.raised = self.raised or self.wealth >= 1.0 / self.false_alarm
        return self.raised


@dataclass(frozen=True)
class AuditCounts:
    """What became of the requests that were drawn.

    seen: the requests that count.
    checked: those of them that the small model answered and the large one checked.
    differed: the checked ones whose answers differ.
    pending: the requests that still wait.
    dropped: the requests left out because the queue was full.
    errors: the audits that failed, which are not in `seen`, and the message of the last one.
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
    """A worker thread with a bounded queue, started by the first job and ended by `close`.

    share: the share of all requests that is audited, 0 to 1.
    seed: the seed of the draws; None takes the system's own.
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
        self._closed = threading.Event()
        self._counts = AuditCounts()
        self._new_errors: list[str] = []

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more jobs."""
        return self._closed.is_set()

    def draws(self) -> bool:
        """Whether the next request is to be audited; every call draws anew."""
        return self._rng.random() < self.share

    def take(self, check: Check | None) -> bool:
        """Queue a drawn request; None: the large model answered it. Never waits; False where the queue is full."""
        if self.is_closed:
            raise ConfigError("the cascade is closed", fix="make a new one")
        try:
            self._jobs.put_nowait(check)
        except queue.Full:
            self._count(dropped=1)
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="paceline-audit", daemon=True)
            self._thread.start()
            atexit.register(self.close, discard=True)
        return True

    def counts(self) -> AuditCounts:
        """The counts so far."""
        with self._lock:
            return replace(self._counts, seen=self.alarm.seen, pending=self._jobs.unfinished_tasks)

    def new_errors(self) -> list[str]:
        """Messages of the audits that failed since the last call."""
        with self._lock:
            errors, self._new_errors = self._new_errors, []
        return errors

    def reset_alarm(self) -> None:
        """Lower the alarm and start it anew."""
        with self._lock:
            self.alarm.reset()

    def drain(self) -> None:
        """Wait until everything queued is done."""
        self._jobs.join()

    def close(self, discard: bool = False) -> None:
        """End the thread after everything queued, or with `discard` after the running job; may be called again."""
        if self._thread is None or self.is_closed:
            self._closed.set()
            return
        if discard:
            self._closed.set()
            with contextlib.suppress(queue.Empty):
                while True:
                    self._jobs.get_nowait()
                    self._jobs.task_done()
        else:
            self.drain()
            self._closed.set()
        self._thread.join()
        atexit.unregister(self.close)

    def _count(self, **more: int) -> None:
        with self._lock:
            self._counts = replace(self._counts, **{name: getattr(self._counts, name) + n for name, n in more.items()})

    def _work(self) -> None:
        while not self.is_closed:
            try:
                check = self._jobs.get(timeout=0.05)
            except queue.Empty:
                continue
            try:
                differs = check is not None and check()
                self._count(checked=check is not None, differed=differs)
                with self._lock:
                    self.alarm.see(differs)
            except Exception as error:  # reported by `new_errors` and `counts`; the thread continues
                message = f"{type(error).__name__}: {error}"
                self._count(errors=1)
                with self._lock:
                    self._counts = replace(self._counts, last_error=message)
                    self._new_errors.append(message)
            finally:
                self._jobs.task_done()
