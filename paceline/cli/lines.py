"""Messages that are typed in a terminal, or read from a pipe."""

import select
import sys
from contextlib import suppress

from ..system.files import as_text


def edit_lines() -> bool:
    """Let the user edit and recall lines, where the platform has readline; whether pasted lines come as one."""
    try:
        import readline
    except ImportError:
        return False
    readline.parse_and_bind("set enable-bracketed-paste on")
    return "GNU" in (readline.__doc__ or "")


def read_message(is_interactive: bool, pastes_whole: bool) -> str:
    """The next message: a line, and those after it where it ends with a backslash or more was pasted.

    Raises `EOFError` at the end.
    """
    lines = [_line("> ", is_interactive)]
    with suppress(EOFError):
        while lines[-1].endswith("\\") or (not pastes_whole and _has_more()):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(_line(". ", is_interactive))
    return "\n".join(lines)


def _line(prompt: str, is_interactive: bool) -> str:
    if is_interactive:
        return input(prompt)
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return as_text(line, "the standard input").removesuffix("\n")


def _has_more() -> bool:
    """Whether the terminal has more lines already, as after a paste."""
    with suppress(OSError, ValueError):  # Windows selects sockets alone
        return bool(select.select([sys.stdin], [], [], 0.01)[0])
    return False
