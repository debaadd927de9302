"""A peer in a process of its own, stopped whenever it is not asked."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .base import PeerFailed

WIRE = Path(__file__).parent / "workers" / "wire.py"
_LAST_LINES = 12


class WorkerProcess:
    """One worker and its pipe: a line of JSON goes in, a line comes out, and in between the whole process group sleeps.

    Runtimes like OpenMP keep their threads spinning after the work is done, on cores that others are timed on. A group
    that is stopped (SIGSTOP) cannot, whatever the runtime. Should we be killed, Linux kills the worker, and hangs up
    what else is in its group, which is why that group stays in our session. The thread that makes this object must
    outlive it.

    Raises `OSError` where the executable cannot run.
    """

    def __init__(self, name: str, python: str, script: Path, settings: Mapping[str, Any]):
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        environment = {**os.environ, "OMP_NUM_THREADS": str(settings["threads"])}
        self._process = subprocess.Popen(
            [python, "-I", str(WIRE), str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            process_group=0,
            env=environment,
        )
        self._settings = settings
        self._kill = weakref.finalize(self, _kill_group, self._process.pid)

    @property
    def pid(self) -> int:
        """Of the worker, and of its process group."""
        return self._process.pid

    def start(self, seconds: float) -> dict[str, Any]:
        """Send the settings; the reply is "ready", "missing" or "error"."""
        return self.ask(self._settings, seconds)

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """One request and its reply. Raises `PeerFailed`, and ends the worker, if it dies or takes longer."""
        if not self._kill.alive:
            raise PeerFailed(f"the peer {self.name} has been closed", fix="open it again")
        try:
            self._signal(signal.SIGCONT)
            reply = json.loads(self._exchange(json.dumps(request).encode() + b"\n", seconds))
            self._signal(signal.SIGSTOP)
        except json.JSONDecodeError as error:
            self.close()
            raise self._failure("did not speak its protocol", repr(error.doc[:200])) from error
        except BaseException:
            self.close()
            raise
        return reply

    def close(self) -> None:
        """Kill the process group and reap the worker; safe twice."""
        if not self._kill.alive:
            return
        self._kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def last_words(self) -> str:
        """The last lines the worker wrote to standard error."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(size - 8192, 0))
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return "\n".join(lines[-_LAST_LINES:])

    # Helpers

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # its death is read off the pipe
            os.killpg(self.pid, number)

    def _exchange(self, line: bytes, seconds: float) -> bytes:
        """Write while reading, so that neither side can block the other."""
        deadline = time.monotonic() + seconds
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        os.set_blocking(stdin.fileno(), False)
        unsent, received = memoryview(line), bytearray()
        with selectors.DefaultSelector() as ready:
            ready.register(stdin, selectors.EVENT_WRITE)
            ready.register(stdout, selectors.EVENT_READ)
            while not received.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._failure("did not answer in time", f"nothing after {seconds:.0f} s")
                for key, _ in ready.select(left):
                    if key.fileobj is stdout:
                        piece = os.read(stdout.fileno(), 1 << 16)
                        if not piece:
                            raise self._failure("died", self._exit_status())
                        received += piece
                        continue
                    try:
                        unsent = unsent[os.write(stdin.fileno(), unsent) :]
                    except BrokenPipeError:
                        unsent = unsent[:0]
                    if not unsent:
                        ready.unregister(stdin)
        return bytes(received)

    def _exit_status(self) -> str:
        try:
            code = self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def _failure(self, what: str, got: str) -> PeerFailed:
        words = self.last_words()
        shown = f"{got}; its last lines:\n{words}" if words else f"{got}, and nothing on standard error"
        return PeerFailed(f"the peer {self.name} {what}", got=shown, fix="see what it printed, and open it again")


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
