"""The process that a command runs in: Ctrl-C at any moment, closed streams, poor encodings, narrow screens.

It imports almost nothing, since it has to be in place before the command line is.
"""

import _thread
import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended, as shells report it."""
_STOPPED_AS_JSON = (
    '{"error": {"type": "KeyboardInterrupt", "message": "Stopped.", "got": null, "expected": null, "fix": null}}\n'
)
_NARROWEST = 40  # columns; tables show nothing in fewer


class CtrlC:
    """What Ctrl-C does: while a command runs it raises KeyboardInterrupt; before and after, the process just ends.

    pressed: whether it was; libraries turn the exception into others.
    """

    def __init__(self) -> None:
        self.stage: Literal["starting", "running", "ending"] = "starting"
        self.pressed = self._told = False

    def watch(self) -> None:
        """Take over from Python, which would print stack traces; an ignored Ctrl-C stays ignored."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_signal)
            sys.unraisablehook = _raise_again
            # The last of these functions to be called: what Python still does then is short, and would forget ours.
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)

    def end(self) -> int:
        """Say that the command was stopped, once; returns the exit code."""
        if not self._told:
            self._told = True
            os.write(2, b"Stopped.\n")
        return INTERRUPTED

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        if self.stage == "running":
            raise KeyboardInterrupt
        if self.stage == "starting" and "--json" in sys.argv:
            os.write(1, _STOPPED_AS_JSON.encode())
        os._exit(self.end())


ctrl_c = CtrlC()


def prepare() -> None:
    """Make the process fit for a command: to be called first."""
    ctrl_c.watch()
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:  # closed: the next file to be opened would take its number, and be printed into
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) < _NARROWEST:
        del os.environ["COLUMNS"]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, which must not take long, and is raised there."""
    before, pressed = signal.getsignal(signal.SIGINT), list[int]()
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or not callable(before):  # ignored, or not Python's
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _raise_again(lost: "sys.UnraisableHookArgs") -> None:
    """A Ctrl-C that came while Python could not raise it, as in a weak reference's callback, is raised later."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        threading.Timer(0.01, _thread.interrupt_main).start()  # at once would be in here, where it is lost again
    else:
        sys.__unraisablehook__(lost)
