"""The tiny model of the benchmarks and its bandwidth, for the scripts."""

from tests.eval.bench.conftest import known_bandwidth, model  # noqa: F401
