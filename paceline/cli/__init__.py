"""The command line. Imports are delayed: a command imports heavy modules only when it runs."""

import gc
import sys

from .process import ctrl_c, prepare, silence_loggers


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong arguments, 130 interrupted."""
    prepare()
    if "--debug" not in (sys.argv if arguments is None else arguments):
        silence_loggers()
    from ..system.hardware import set_waiting

    set_waiting()  # before torch is imported
    gc.disable()  # until the command runs: what is imported stays
    from .app import app

    try:
        app(args=arguments)
    except KeyboardInterrupt:  # pressed again, while the first was being handled
        raise SystemExit(ctrl_c.end()) from None


__all__ = ["main"]
