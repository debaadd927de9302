"""A machine whose bandwidth is known: to measure it takes seconds."""

import pytest

BANDWIDTH = 1e9  # bytes per second


@pytest.fixture(autouse=True)
def known_bandwidth(monkeypatch, request):
    for user in ("machine", "doctor"):
        monkeypatch.setattr(f"paceline.measure.{user}.read_bandwidth", lambda device: BANDWIDTH)
