"""A command that runs in a terminal while keys are typed; what it put out is kept, with the times."""

import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from contextlib import suppress
from fcntl import ioctl
from typing import NamedTuple

COLUMNS, ROWS = 92, 40
KEY_S, TURN_S = 0.03, 1.5  # between two keys, and of all keys of a turn at most
READ_S = 0.8  # between an answer and the next turn
LIMIT_S = 300.0
OF_OTHER_TERMINALS = ("NO_COLOR", "FORCE_COLOR", "COLORTERM")


class Turn(NamedTuple):
    """Keys that are typed once the command shows a prompt."""

    prompt: str
    keys: str


class Output(NamedTuple):
    """Bytes for the terminal, at a second. has_cursor: somebody types."""

    at: float
    data: bytes
    has_cursor: bool = False


def typed(command: str) -> list[Output]:
    """A command line, typed at a prompt and sent."""
    keys = [Output(0.6 + KEY_S * at, key.encode(), True) for at, key in enumerate(command)]
    return [Output(0.0, b"$ ", True), *keys, Output(keys[-1].at + 0.4, b"\r\n")]


def record(
    command: Sequence[str],
    shown: str,
    turns: Sequence[Turn] = (),
    folder: str | None = None,
    statuses: Sequence[int] = (0,),
) -> list[Output]:
    """Run a command in a terminal of COLUMNS and ROWS, and keep what it puts out.

    shown: what a reader would type for it. turns: keys, at the pace of a fast typist; the command is ended where the
    last prompt comes again. folder: where it runs. Raises `TimeoutError` after LIMIT_S, and `CalledProcessError` for
    another exit status than those.
    """
    kept, waiting, keys, tail = typed(shown), list(turns), list[str](), b""
    next_key = pace = 0.0
    environment = {name: value for name, value in os.environ.items() if name not in OF_OTHER_TERMINALS}
    environment |= {"TERM": "xterm", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    began = time.monotonic() - kept[-1].at
    child = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=environment, cwd=folder, start_new_session=True
    )
    os.close(slave)
    try:
        while (data := _read(master)) is not None:
            if (at := time.monotonic() - began) > LIMIT_S:
                raise TimeoutError(f"{shown}: not done after {LIMIT_S:g} s")
            if data:
                kept.append(Output(at, data, bool(keys)))
                tail = (tail + data)[-80:]
            if keys and at >= next_key:
                os.write(master, keys.pop(0).encode())
                next_key, tail = next_key + pace, b""
            elif turns and not keys and tail.endswith((waiting or turns)[-1].prompt.encode()):
                if not waiting:
                    break
                keys, next_key = list(waiting.pop(0).keys), at + READ_S
                pace = min(KEY_S, TURN_S / len(keys))
        if not turns:
            child.wait(30)
    finally:
        os.close(master)
        if child.poll() is None:
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                child.wait(20)
            child.kill()
    if not turns and child.wait() not in statuses:
        raise subprocess.CalledProcessError(child.returncode, shown, b"".join(one.data for one in kept))
    return kept


def _read(master: int) -> bytes | None:
    """What was put out within a hundredth of a second; None at the end."""
    if not select.select([master], [], [], 0.01)[0]:
        return b""
    try:
        return os.read(master, 1 << 16) or None
    except OSError:  # how a terminal says that the other side is gone
        return None
