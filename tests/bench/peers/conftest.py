"""Runs of the tiny model, for peers to take part in."""

from tests.eval.bench.conftest import engine, measure, questions  # noqa: F401
