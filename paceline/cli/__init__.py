"""The command line. Nothing heavy is imported before a command runs, so that `--help` answers at once."""

from .app import app, main

__all__ = ["app", "main"]
