"""Runs of the tiny model, for peers to take part in."""

from tests.measure.bench.conftest import engine, measure, questions  # noqa: F401
