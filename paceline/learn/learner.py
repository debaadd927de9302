"""What happens beside the serving thread: answers are written, the trainer runs in idle time, new heads are read.

    serving thread   put(answer), pause()  ->  queue  ->  thread here: write, resume, read a new head  ->  `offered`
                                                          trainer's process: FOLDER -> FOLDER/heads/

Where any of that fails, such as on a full disk, learning ends with one warning, and serving goes on.
"""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import final

from ..core.interfaces import Drafter
from ..errors import PacelineError
from .folder import LearnFolder, LearnSettings, Recorded, Recorder

_LOG = logging.getLogger("paceline")
_WAITING = 64  # answers that wait to be written; further ones are dropped
_POLL_S, _END_S = 0.1, 5.0


class TrainerEnded(PacelineError):
    """The trainer's process has ended by itself."""


@final
class TrainerProcess:
    """The trainer's process, in a process group of its own, so that Ctrl-C reaches the server alone."""

    def __init__(self, folder: LearnFolder, settings: LearnSettings):
        self._log, self.is_paused, self._turning = folder.path / "trainer.log", True, threading.Lock()
        command = [sys.executable, "-m", "paceline.learn.trainer", str(folder.path), json.dumps(asdict(settings))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, process_group=0, bufsize=0,
                umask=0o077,  # a head may remember texts
            )  # fmt: skip
        assert self.process.stdin is not None
        self._pipe = self.process.stdin
        os.set_blocking(self._pipe.fileno(), False)

    def turn(self, is_paused: bool) -> None:
        """Pause it, or let it go on. Both threads may ask, and the trainer hears them in the order of `is_paused`."""
        with self._turning:
            if is_paused != self.is_paused:
                self.is_paused = is_paused
                with suppress(OSError, ValueError):  # it has ended, which `check` reports, and the pipe may be closed
                    self._pipe.write(b"0" if is_paused else b"1")

    def check(self) -> None:
        """Raise `TrainerEnded` where it has ended."""
        if self.process.poll() is not None:
            lines = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
            raise TrainerEnded("the trainer has ended", got=lines[-1] if lines else f"status {self.process.returncode}")

    def end(self) -> None:
        """End it, and wait for that."""
        self._pipe.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@final
class Learner:
    """Runs beside one drafter that learns.

    is_busy: whether any request has a slot. read: makes a drafter of a head's folder. trains: whether to start the
    trainer; otherwise answers are recorded alone.
    """

    def __init__(
        self, folder: LearnFolder, recorder: Recorder, settings: LearnSettings, is_busy: Callable[[], bool],
        read: Callable[[Path], Drafter], trains: bool = True,
    ):  # fmt: skip
        self.folder, self.recorder, self._settings = folder, recorder, settings
        self._is_busy, self._read = is_busy, read
        self.offered: tuple[Path, Drafter] | None = None  # a new head, for the drafter to take
        self.has_failed, self.dropped = False, 0
        self._known, self._kept = set(folder.heads()[:1]), SimpleQueue[Path]()
        self._queue, self._count = SimpleQueue[Recorded](), threading.Semaphore(_WAITING)
        self._ending, self._busy_at = threading.Event(), time.monotonic()
        self._trainer = TrainerProcess(folder, settings) if trains else None
        self._thread = threading.Thread(target=self._run, name="paceline-learn", daemon=True)
        self._thread.start()

    def put(self, answer: Recorded) -> None:
        """Have an answer written; it is dropped where the disk does not keep up."""
        if self.has_failed:
            return
        if self._count.acquire(blocking=False):
            self._queue.put(answer)
        else:
            self.dropped += 1

    def pause(self) -> None:
        """Requests run: the trainer must not."""
        self._busy_at = time.monotonic()
        if self._trainer is not None:
            self._trainer.turn(is_paused=True)

    def keep(self, head: Path) -> None:
        """The comparison of two heads has ended; the other is removed."""
        self._kept.put(head)

    def close(self) -> None:
        """Write what waits, and end thread and process."""
        self._ending.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_S)
        self._end()

    def _end(self) -> None:
        if self._trainer is not None:
            self._trainer.end()
        self.folder.release()

    def _run(self) -> None:
        try:
            while True:
                with suppress(Empty):
                    answer = self._queue.get(timeout=_POLL_S)
                    self._count.release()
                    self.recorder.write(answer)
                    continue
                if self._ending.is_set():
                    return
                self._tend()
        except Exception as error:
            self.has_failed = True
            _LOG.warning("learning has stopped, and serving goes on without it: %s", error)
            self._end()

    def _tend(self) -> None:
        with suppress(Empty):
            head = self._kept.get_nowait()
            self.folder.keep(head)
            self._known = {head}
        if self._trainer is not None:
            self._trainer.check()
            if self._is_busy():
                self.pause()
            elif time.monotonic() - self._busy_at >= self._settings.idle_s:
                self._trainer.turn(is_paused=False)
        new = [head for head in self.folder.heads() if head not in self._known]
        if new and self.offered is None:
            self._known.add(new[0])
            self.offered = new[0], self._read(new[0])
