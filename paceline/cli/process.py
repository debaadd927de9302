"""The process of a command: Ctrl-C at any moment, closed streams, limited encodings.

It imports almost nothing, so that its signal handler is installed first.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal


class CtrlC:
    """Ctrl-C raises KeyboardInterrupt while a command runs, and ends the process before and after.

    pressed: whether it was, since libraries may turn the exception into another.
    """

    def __init__(self) -> None:
        self.stage: Literal["starting", "running", "ending"] = "starting"
        self.pressed = self._said = False

    def watch(self) -> None:
        """Take over from Python, which would print stack traces; an ignored Ctrl-C stays ignored."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_signal)
            sys.unraisablehook = _press_again

    def end(self) -> int:
        """Say that the command was stopped, once; returns the exit code as shells report it."""
        if not self._said:
            self._said = True
            os.write(2, b"Stopped.\n")
        return 130

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        if self.stage == "running":
            raise KeyboardInterrupt
        os._exit(self.end())


def _press_again(lost: "sys.UnraisableHookArgs") -> None:
    """Python drops what is raised within a `__del__`; if that was Ctrl-C, it comes again a moment later."""
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    from threading import Timer, main_thread

    # A signal, not _thread.interrupt_main(), which would not end a call that waits.
    timer = Timer(0.05, signal.pthread_kill, (main_thread().ident, signal.SIGINT))
    timer.daemon = True
    timer.start()


ctrl_c = CtrlC()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C in this block, which must not take long; for the main thread."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def prepare() -> None:
    """Prepare the process for a command; call it first."""
    ctrl_c.watch()
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:  # closed: the next file that is opened would get this number, and be written to
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def silence_loggers() -> None:
    """Let libraries log errors only. Some warn while they are imported: call it before that."""
    import logging

    for library in ("torch", "torch.utils._pytree", "torchao", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.ERROR)
