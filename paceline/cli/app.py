"""The app with all commands; exit codes and one-line error messages."""

import gc
import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Never

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import PacelineError
from ..integrations import other_names
from ..integrations.vllm_options import spelled
from ..schema import meant
from .bench import bench
from .calibrate import calibrate
from .chat import chat
from .check import check, check_draft
from .demo import demo
from .doctor import doctor
from .generate import generate
from .help import Command, print_help
from .index import index
from .models import convert, export, models, pull
from .others import TABLE
from .process import ctrl_c
from .route import route
from .screen import DebugFlag, NoProgressFlag, Screen
from .serve import serve
from .show import plot, show
from .train import TrainCommand, train
from .tune import tune


class _Commands(TyperGroup):
    """Runs a command, and turns what it raises into a message and an exit code.

    With --json the message is also one line of JSON on stdout. --debug shows the stack trace instead.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print it."""
        print_help(self, ctx)

    def main(self, args: Sequence[str] | None = None, **_: object) -> Never:  # type: ignore[override]
        """Parse the arguments, run, exit."""
        self._main_shell_completion({}, "paceline")  # exits if a shell asks for completions
        words = sys.argv[1:] if args is None else list(args)
        screen, code = Screen(), 0
        ctrl_c.stage = "running"
        try:
            try:
                with self.make_context("paceline", [*words], obj=screen) as ctx:
                    gc.enable()
                    self.invoke(ctx)
            finally:
                sys.stdout.flush()  # so that a full disk is an error here, not while Python exits
        except BaseException as error:
            if screen.debug and not isinstance(error, typer.Exit | KeyboardInterrupt) and not _is_usage(error):
                raise
            screen.json |= _is_usage(error) and "--json" in words  # which was perhaps not parsed
            code = _report(error, screen)
        finally:
            ctrl_c.stage = "ending"
        sys.exit(code)


def _report(error: BaseException, screen: Screen) -> int:
    """Print why a command ended; returns the exit code."""
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt) or ctrl_c.pressed:
        screen.put_error("KeyboardInterrupt", "Stopped.")
        return ctrl_c.end()
    if isinstance(error, BrokenPipeError):  # the reader of a pipe is gone
        # Python flushes stdout once more at exit, and would fail there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if _is_usage(error):
        from typer import rich_utils

        _suggest(error)
        screen.put_error("UsageError", error.format_message())  # type: ignore[attr-defined]
        rich_utils.rich_format_error(error)  # type: ignore[arg-type]
        return error.exit_code  # type: ignore[attr-defined]
    if isinstance(error, PacelineError):
        message = str(error)
        screen.put_error(type(error).__name__, error.what, error.got, error.expected, error.fix)
    elif isinstance(error, OSError):
        message = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}."
        screen.put_error(type(error).__name__, message)
    elif isinstance(error, Exception):  # libraries raise errors of their own
        lines = str(error).strip().splitlines()
        message = f"Unexpected {type(error).__name__}{': ' + lines[0] if lines else ''}."
        fix = "run again with --debug for the stack trace"
        screen.put_error(type(error).__name__, message, fix=fix)
        message += f" This is a bug in Paceline or in a library; {fix}."
    else:
        raise error
    screen.say_error(message)
    return 1


def _suggest(error: Any) -> None:
    """Say what an unknown option or command may be here, in place of what typer says, which has other meanings."""
    unknown = re.match(r"No such (command|option):? '?(.+?)'?([ .]|$)", error.message)
    if unknown is None:
        return
    kind, word = unknown[1], unknown[2]
    if kind == "command":
        known = list(error.ctx.command.commands)
    else:
        known = [name for param in error.ctx.command.params for name in (*param.opts, *param.secondary_opts)]
    name, question = word.lstrip("-").replace("-", "_"), meant(word, known)
    if instead := other_names.OPTIONS.get(word):
        said = f" In Paceline it is {instead}."
    elif kind == "option" and name in TABLE:
        fix = spelled(TABLE[name].instead, is_command=True) or "leave it out: it changes nothing here"
        said = f" {fix[0].upper()}{fix[1:]}."
    else:
        said = f" D{question[1:]}" if question else ""
    error.message, error.possibilities = f"No such {kind}: {word}.{said}", None


def _is_usage(error: BaseException) -> bool:
    """Whether typer raised it for wrong arguments; the class differs between versions of typer."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


app = typer.Typer(
    cls=_Commands,
    name="paceline",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with:  paceline demo",
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _global(
    ctx: typer.Context,
    debug: DebugFlag = False,
    no_progress: NoProgressFlag = False,
    version: Annotated[
        bool,
        typer.Option("--version", metavar="", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Exact speculative decoding for Hugging Face language models: faster answers, the same answers."""


_MEASURING = (demo, chat, generate, serve, route, check, check_draft, bench, plot, show, doctor, tune, calibrate)
for _command in (*_MEASURING, train, index, convert, export, models, pull):
    app.command(_command.__name__.replace("_", "-"), cls=TrainCommand if _command is train else Command)(_command)
