"""The commands and what they share: the entry point, and errors told in one line."""

import os
import sys
from typing import Annotated

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import PacelineError
from ..threads import set_waiting
from .bench import bench
from .calibrate import calibrate
from .check import check
from .check_draft import check_draft
from .demo import demo
from .demo_vlm import demo_vlm
from .doctor import doctor
from .export import export
from .generate import generate
from .models import models, pull
from .plot import plot
from .screen import DebugOption, NoProgressOption, Screen, screen_of
from .show import show
from .train import train
from .tune import tune

INTERRUPTED = 130  # as shells report a process that Ctrl-C ended


class _Commands(TyperGroup):
    """Runs a command and turns what it raises into one message and an exit code; --debug lets the stack trace out."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        screen = screen_of(ctx)
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader of a pipe went away: nobody is left to tell
            _discard_output()
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            if screen.debug:
                raise
            screen.err.print("Stopped.")
            raise typer.Exit(INTERRUPTED) from None
        except PacelineError as error:
            if screen.debug:
                raise
            screen.say_error(str(error))
            raise typer.Exit(1) from None
        except OSError as error:
            if screen.debug:
                raise
            screen.say_error(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}.")
            raise typer.Exit(1) from None
        except Exception as error:  # the libraries below raise kinds of their own
            if screen.debug or _is_typers(error):
                raise
            told = str(error).strip().splitlines()
            screen.say_error(
                f"Unexpected {type(error).__name__}{': ' + told[0] if told else ''}. "
                "This is a fault in Paceline or in a library; run again with --debug for the stack trace."
            )
            raise typer.Exit(1) from None


def _is_typers(error: Exception) -> bool:
    """Usage errors and exits, which typer shows itself."""
    return isinstance(error, typer.Exit | typer.Abort) or type(error).__module__.startswith(("typer", "click"))


def _discard_output() -> None:
    # Python flushes stdout once more at exit, and would complain there.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


app = typer.Typer(
    cls=_Commands,
    name="paceline",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with:  [bold]paceline demo[/bold]",
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _global(
    ctx: typer.Context,
    debug: DebugOption = False,
    no_progress: NoProgressOption = False,
    version: Annotated[
        bool,
        typer.Option("--version", metavar="", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Exact speculative decoding for Hugging Face language models: faster answers, the same answers."""


app.command()(demo)
app.command("demo-vlm")(demo_vlm)
app.command()(generate)
app.command()(check)
app.command("check-draft")(check_draft)
app.command()(bench)
app.command()(plot)
app.command()(show)
app.command()(doctor)
app.command()(tune)
app.command()(calibrate)
app.command()(train)
app.command()(export)
app.command()(models)
app.command()(pull)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 refused or failed, 2 wrongly called, 130 interrupted."""
    set_waiting()  # before torch is imported
    app(args=arguments, prog_name="paceline")


__all__ = ["Screen", "app", "main"]
