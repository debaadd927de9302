"""What the tests of scripts share: the script itself, the tiny model of the benchmarks and its bandwidth."""

import importlib
from pathlib import Path

import pytest

from tests.measure.bench.conftest import model  # noqa: F401
from tests.measure.conftest import known_bandwidth  # noqa: F401

SCRIPTS = Path(__file__).parents[2] / "bench"


@pytest.fixture
def script(request, monkeypatch):
    """The file of bench/ that the module of a test names in SCRIPT."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module(request.module.SCRIPT)
