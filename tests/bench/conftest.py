"""The tiny model of the benchmarks, for the scripts."""

from tests.eval.bench.conftest import model  # noqa: F401
